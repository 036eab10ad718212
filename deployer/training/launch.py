"""Several processes on this machine, by torch's elastic launcher, and what is said when one of them dies.

The processes meet in a file, and gloo listens on loopback alone. For several machines, torchrun itself is the launcher:
`torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:PORT -m deployer.training config.yaml`.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from deployer.errors import UsageError
from deployer.machine import usable_cores
from deployer.training.parallel import MEETING_FILE, meeting_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """How a job of several processes ended: the process at fault, its exit code and what it said."""

    rank: int
    exit_code: int
    message: str

    @property
    def may_help(self) -> bool:
        """Whether beginning again may help: not where the input is wrong or the machine lacks something."""
        return self.exit_code not in (2, 4)


def launch(arguments: Sequence[str], processes: int, max_restarts: int = 0) -> Failure | None:
    """Run `python -m deployer.training ARGUMENTS` in `processes` processes; None when all of them end well.

    A job that dies is begun again up to `max_restarts` times, each time from its last save. Raises UsageError.
    """
    if processes < 1:
        raise UsageError(f"--nproc is {processes}; at least 1 is expected")
    for attempt in range(max_restarts + 1):
        failure = _launch_once(arguments, processes)
        if failure is None or not failure.may_help or attempt == max_restarts:
            return failure
        log.warning(
            "process %d: %s; beginning again from the last save (%d of %d)",
            failure.rank, failure.message, attempt + 1, max_restarts,
        )  # fmt: skip
    return None


def _launch_once(arguments: Sequence[str], processes: int) -> Failure | None:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    meeting = Path(meeting_file())
    environment = {
        MEETING_FILE: str(meeting),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // processes))),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(meeting.with_name("rendezvous")),
        rdzv_configs={"store_type": "file"},
        max_restarts=0,
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "deployer.training", *arguments)
    except ChildFailedError as error:
        return _failure_of(error)
    except SignalException as error:
        return Failure(
            0, 128 + error.sigval, f"stopped by {signal.Signals(error.sigval).name}; run the same command to go on"
        )
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(meeting.parent, ignore_errors=True)
    return None


def _failure_of(error: ChildFailedError) -> Failure:
    """The process at fault: one that a signal ended, before those that lost touch with it; not one that the launcher
    itself ended with SIGTERM because of another."""

    def order(one: ProcessFailure) -> tuple[int, int]:
        return (1 if one.exitcode >= 0 else 2 if one.exitcode == -signal.SIGTERM else 0), one.timestamp

    failures: list[ProcessFailure] = sorted(error.failures.values(), key=order)
    first = failures[0]
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        more = "; the kernel does that when memory runs out" if name == "SIGKILL" else ""
        return Failure(first.local_rank, 1, f"it was ended by {name}{more}")
    said = _said(first)
    return Failure(first.local_rank, first.exitcode, said or f"it ended with exit code {first.exitcode}")


def _said(failure: ProcessFailure) -> str:
    try:
        data = msgspec.json.decode(Path(failure.error_file).read_bytes())
        return str(data["message"]["message"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return ""
