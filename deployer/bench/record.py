"""What a benchmark leaves behind: rows, environment, report. All of it encodes to JSON by msgspec."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping
from typing import Any

import msgspec

from deployer.bench.statistics import Latency
from deployer.machine import cpu_name, usable_cores
from deployer.versions import tool_versions

SCHEMA_VERSION = 1


class Warmup(msgspec.Struct, frozen=True):
    """What was run before measuring and is in no figure of the row.

    `runs` counts all of it, the first call included; `steady` is False where the limit came before latencies settled.
    """

    first_ms: float
    runs: int
    failed: int
    wall_s: float
    steady: bool


class InProcessRow(msgspec.Struct, frozen=True, tag_field="kind", tag="in_process"):
    """One batch size: one caller, run after run. `batch_size` is None where the model has no batch axis, and a run is
    then one item; `sizes` are those of every Dim."""

    batch_size: int | None
    sizes: dict[str, int]
    runs: int
    latency: Latency
    runs_per_s: float | None
    items_per_s: float | None
    wall_s: float
    warmup: Warmup


class HttpRow(msgspec.Struct, frozen=True, tag_field="kind", tag="http"):
    """One concurrency. requests = ok + wrong + status_errors + connection_errors + timeouts.

    `latency`, `requests_per_s` and `items_per_s` are of ok requests alone, rates over the wall clock from the first
    request sent to the last answer; `items_per_s` is None where nothing says how many items a request holds.
    `statuses` counts answers by HTTP status, `first_errors` quotes the first failure of each kind. `connections` were
    opened in the whole row, warm-up included. `client_busy` is the share of the wall clock that the client's own
    thread spent computing, `client_lag_p99_ms` how late its event loop woke up. Where requests were split among
    versions, a row is those of one `version`; connections, client and warm-up are those of all of them.
    """

    concurrency: int
    requests: int
    ok: int
    wrong: int
    status_errors: int
    connection_errors: int
    timeouts: int
    statuses: dict[str, int]
    first_errors: dict[str, str]
    latency: Latency
    requests_per_s: float | None
    items_per_s: float | None
    wall_s: float
    connections: int
    client_busy: float
    client_lag_p99_ms: float | None
    warmup: Warmup
    version: str = ""


class Environment(msgspec.Struct, frozen=True):
    """Where the figures were taken. `device` and `engine` are what ran the model, None where a server did and this
    process cannot know; `threads` None is the engine's own default. `cpu` and `cores` are of this machine."""

    cpu: str
    cores: int
    system: str
    versions: dict[str, str]
    device: str | None = None
    device_name: str | None = None
    engine: str | None = None
    threads: int | None = None


class BenchReport(msgspec.Struct, frozen=True):
    """One benchmark; `command` repeats it, `options` are those it ran under, defaults included.

    `open_s` is how long it took to verify and open the bundle (None over HTTP). `passed` is False where an answer was
    wrong or a request failed.
    """

    target: str
    rows: tuple[InProcessRow | HttpRow, ...]
    environment: Environment
    command: str
    options: dict[str, Any]
    notes: tuple[str, ...] = ()
    open_s: float | None = None
    schema_version: int = SCHEMA_VERSION
    passed: bool = True


def environment(
    *distributions: str,
    device: str | None = None,
    device_name: str | None = None,
    engine: str | None = None,
    threads: int | None = None,
) -> Environment:
    """This machine and the versions of `distributions` that are installed."""
    return Environment(
        cpu=cpu_name(),
        cores=usable_cores(),
        system=f"{platform.system()} {platform.release()}",
        versions=tool_versions("numpy", *distributions),
        device=device,
        device_name=device_name,
        engine=engine,
        threads=threads,
    )


def command_line(target: str, options: Mapping[str, Any]) -> str:
    """The `deployer bench` line with every option that is set, quoted for a shell."""
    words = ["deployer", "bench", target]
    for name, value in options.items():
        if value is None:
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    return shlex.join(words)
