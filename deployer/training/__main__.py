"""One process of a run: `torchrun --nproc-per-node 2 -m deployer.training config.yaml [key=value …]`."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path

from deployer.errors import DeployerError, UsageError, first_line, with_reason
from deployer.training.config import parse_changes, read_config
from deployer.training.parallel import MEETING_FILE
from deployer.training.running import STOPPED_EXIT_CODE, describe, run


def main(arguments: list[str]) -> int:
    """Exit code of this process; what went wrong is told to the launcher, or printed where torchrun is one's own."""
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    logging.getLogger("deployer").setLevel(logging.INFO)
    warnings.simplefilter("ignore")  # torch's chatter; what a user must know is said by ours
    try:
        if not arguments:
            raise UsageError("no configuration; give the YAML file of the run: -m deployer.training config.yaml")
        outcome = run(read_config(Path(arguments[0]), parse_changes(arguments[1:])))
    except DeployerError as error:
        return _tell(with_reason(error), error.exit_code)
    except Exception as error:  # noqa: BLE001 - whatever it is, the launcher has to be told
        # Who only lost touch with a process that died must not look like the first that failed.
        time.sleep(1.0)
        return _tell(f"{type(error).__name__}: {first_line(error)}", 1)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(describe(outcome)), flush=True)
    return STOPPED_EXIT_CODE if outcome.stopped else 0


def _tell(message: str, exit_code: int) -> int:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and MEETING_FILE in os.environ:
        body = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": body}))
    else:
        print(f"error: process {os.environ.get('RANK', '0')}: {message}", file=sys.stderr, flush=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
