"""Export every model of the zoo in every format and write what became of each to docs/coverage.md.

    scripts/coverage                                   all cells; the unchanged ones are taken from the cache
    scripts/coverage --only 'vit*' --formats onnx      some of them; docs/coverage.md is left as it is
    scripts/coverage --jobs 1 --limit-s 600 --fresh    one at a time, a longer limit, nothing from the cache

Each cell runs in a process of its own under a time limit: a crash or a hang of one is a row of the table, and never
ends the others. A cell is kept in build/coverage under a hash of its model's source, the source of deployer up to
export, this script's, and the versions of the libraries.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKSPACE = ROOT / "build/coverage"
FORMATS = ("torchscript", "exported", "onnx", "aoti")
#: files of deployer/formats that one format alone runs through
OWN_FILES = {
    "torchscript": ("torchscript.py",),
    "onnx": ("onnx.py", "decompositions.py"),
    "aoti": ("aoti.py",),
    "trt": ("trt.py", "trt_rtx.py", "trt_torch.py"),
}

#: reasons that say more of the machine than of the model
TRANSIENT = ("timed_out", "machine")

# Read by torch when it is imported. One thread a cell; no pool of compile workers for graphs this small.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TORCHINDUCTOR_COMPILE_THREADS="1",
    TORCHINDUCTOR_CACHE_DIR=str(WORKSPACE / "inductor"),
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_VERBOSITY="error",
    PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
)
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


@dataclass(frozen=True)
class Cell:
    """One model in one format, and the hash of all that its outcome depends on."""

    model: str
    format: str
    key: str

    @property
    def stored(self) -> Path:
        return WORKSPACE / "cells" / f"{self.model}-{self.format}.json"

    def cached(self) -> dict[str, Any] | None:
        """The outcome of an earlier run with the same key, or None; what the machine's load did is not kept."""
        try:
            found = json.loads(self.stored.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found if found.get("key") == self.key and found.get("reason") not in TRANSIENT else None


def main() -> None:
    options = parse_arguments()
    cells = list(all_cells(options.only, options.formats))
    if not cells:
        sys.exit(f"no model of the zoo is called {', '.join(options.only)}; --list shows them")
    (WORKSPACE / "cells").mkdir(parents=True, exist_ok=True)
    todo = [cell for cell in cells if options.fresh or cell.cached() is None]
    print(f"{len(cells)} cells, {len(cells) - len(todo)} of them from the cache", file=sys.stderr)
    done = run_all(todo, options.jobs, options.limit_s)
    outcomes = {(cell.model, cell.format): done.get(cell) or cell.cached() or {} for cell in cells}
    if not options.only and set(options.formats) == set(FORMATS):
        from coverage_report import write_report

        write_report(ROOT / "docs/coverage.md", outcomes, FORMATS)
    failed = [key for key, outcome in outcomes.items() if outcome.get("status") not in ("passed", "refused")]
    sys.exit(1 if failed else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/coverage", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="name or glob; repeatable")
    parser.add_argument("--formats", action="append", metavar="FORMAT", help=f"{', '.join(FORMATS)}; repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time  [default: 2]")
    parser.add_argument("--limit-s", type=float, default=300, help="seconds a cell may take  [default: 300]")
    parser.add_argument("--fresh", action="store_true", help="take nothing from the cache")
    parser.add_argument("--list", action="store_true", help="print the names of the models and end")
    options = parser.parse_args()
    options.formats = [name for given in options.formats or FORMATS for name in given.split(",")]
    if unknown := set(options.formats) - set(FORMATS):
        parser.error(f"no format '{sorted(unknown)[0]}'; valid: {', '.join(FORMATS)}")
    if options.list:
        from tests.zoo import ENTRIES

        print("\n".join(f"{entry.family:16} {name}" for name, entry in ENTRIES.items()))
        sys.exit(0)
    return options


def all_cells(only: Sequence[str], formats: Sequence[str]) -> Iterator[Cell]:
    """Format by format, so that the quick ones are done first."""
    from tests.zoo import ENTRIES

    for format_name in formats:
        common = common_key(format_name)
        for name, entry in ENTRIES.items():
            if only and not any(fnmatch.fnmatch(name, pattern) for pattern in only):
                continue
            sources = [Path(sys.modules[entry.build.__module__].__file__ or ""), ROOT / "tests/zoo/entry.py"]
            if entry.read is not None:
                sources += sorted((ROOT / "examples" / name).glob("*.py"))
            yield Cell(name, format_name, hash_of(common, *sources))


def common_key(format_name: str) -> str:
    """A hash of deployer's source up to export (of the formats' own files only those of this format), of the cell's
    own code, and of the versions."""
    from deployer.versions import tool_versions
    from tests.test_architecture import ORDER

    rooms = ORDER[: ORDER.index("export") + 1]
    files = [path for room in rooms for path in sorted((ROOT / "deployer").glob(f"{room}.py"))]
    files += [path for room in rooms for path in sorted((ROOT / "deployer" / room).rglob("*.py"))]
    others = {name for other, names in OWN_FILES.items() if other != format_name for name in names}
    files = [path for path in files if path.parent.name != "formats" or path.name not in others]
    versions = tool_versions("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "numpy")
    return hash_of(json.dumps(versions, sort_keys=True), ROOT / "scripts/coverage_cell.py", *files)


def hash_of(text: str, *files: Path) -> str:
    digest = hashlib.sha256(text.encode())
    for path in files:
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass
class Running:
    cell: Cell
    process: multiprocessing.process.BaseProcess
    deadline_s: float

    @property
    def result(self) -> Path:
        return self.cell.stored.with_suffix(".new")


def run_all(cells: Sequence[Cell], jobs: int, limit_s: float) -> dict[Cell, dict[str, Any]]:
    """At most `jobs` cells at a time, each forked from this process, which has imported everything heavy once."""
    done: dict[Cell, dict[str, Any]] = {}
    if not cells:
        return done
    preload()
    waiting, running = list(reversed(cells)), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(start(waiting.pop(), limit_s))
        wait([item.process.sentinel for item in running], timeout=1.0)
        for item in list(running):
            if item.process.is_alive() and time.monotonic() < item.deadline_s:
                continue
            outcome = finish(item, limit_s)
            running.remove(item)
            done[item.cell] = outcome
            word = outcome["status"] if outcome["status"] == "passed" else f"{outcome['status']}: {outcome['reason']}"
            print(
                f"{len(done)}/{len(cells)} {item.cell.model} {item.cell.format} {word} ({outcome['seconds']} s)",
                file=sys.stderr,
                flush=True,
            )
    return done


def preload() -> None:
    """Import what cells need, once, so that their processes start with it: the libraries, what they import when first
    used, and each model's own module. It starts no threads, so forking is safe."""
    import onnxruntime
    import torch._inductor.codegen.cpp_wrapper_cpu
    import torch._inductor.compile_fx
    import torch._inductor.lowering

    import deployer.export
    from tests.zoo import ENTRIES

    print(f"loading torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, {deployer.export.__name__}")
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    torch.onnx.export(program, dynamo=True, verbose=False)
    for entry in ENTRIES.values():
        if entry.read is None:
            entry.build()


def start(cell: Cell, limit_s: float) -> Running:
    from coverage_cell import run_cell

    result, log = cell.stored.with_suffix(".new"), cell.stored.with_suffix(".log")
    result.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=run_cell, args=(cell.model, cell.format, WORKSPACE, result, log)
    )
    process.start()
    return Running(cell, process, time.monotonic() + limit_s)


def finish(item: Running, limit_s: float) -> dict[str, Any]:
    """Reap the process, with whatever it started, and store the outcome that it left, or what its end says."""
    late = item.process.is_alive()
    end_group(item.process.pid)
    item.process.join()
    if item.result.is_file():
        outcome = json.loads(item.result.read_text())
        item.result.unlink()
    else:
        code = item.process.exitcode
        reason = "timed_out" if late else "crashed"
        message = f"no answer within {limit_s:g} s" if late else f"the process ended with {code} (see the log)"
        outcome = {"status": "failed", "reason": reason, "message": message, "seconds": limit_s if late else 0}
    outcome["key"] = item.cell.key
    item.cell.stored.write_text(json.dumps(outcome, indent=1))
    return outcome


def end_group(pid: int | None) -> None:
    """The cell leads a process group of its own; a compiler that outlived it is in there."""
    if pid is None:
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


if __name__ == "__main__":
    main()
