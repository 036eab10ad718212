"""One cell of the coverage table: one model of the zoo exported in one format, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deployer.errors import DeployerError  # noqa: E402
from deployer.spec import Array, Arrays, ModelSpec  # noqa: E402

#: what an artifact may be off by on inputs that the gate never saw, relative to the output's root mean square
_TOLERANCE = 1e-3
#: what an overloaded machine says
_MACHINE = ("can't start new thread", "Cannot allocate memory", "No space left on device")
_SEEDS = (101, 102, 103, 104)


def run_cell(name: str, format_name: str, workspace: Path, result: Path, log: Path) -> None:
    """Run the cell and write its outcome as JSON to `result`; everything that is printed goes to `log`."""
    os.setsid()  # a time limit then ends the compilers that this process started, too
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    warnings.simplefilter("ignore")
    start = time.monotonic()
    outcome = _outcome(name, format_name, workspace)
    outcome["seconds"] = round(time.monotonic() - start, 1)
    staged = result.with_suffix(".part")
    staged.write_text(json.dumps(outcome))
    staged.rename(result)


def _outcome(name: str, format_name: str, workspace: Path) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    try:
        return _export_and_probe(name, format_name, workspace)
    except DeployerError as error:
        traceback.print_exc()
        if any(words in str(error) for words in _MACHINE):
            return {"status": "failed", "reason": "machine", "message": str(error)}
        return {
            "status": "refused" if error.reason else "failed",
            "reason": error.reason or "unclassified",
            "message": str(error),
            "advice": error.advice,
        }
    except Exception as error:  # noqa: BLE001 - what deployer lets through is a fault of deployer, and a row of the table
        traceback.print_exc()
        return {
            "status": "failed",
            "reason": "traceback",
            "message": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
        }


def _export_and_probe(name: str, format_name: str, workspace: Path) -> dict[str, Any]:
    import tempfile

    from deployer.export import export
    from deployer.formats import Target
    from tests.zoo import ENTRIES

    checkpoint = ENTRIES[name].checkpoint(workspace / "checkpoints")
    with tempfile.TemporaryDirectory(dir=workspace) as folder:
        bundle, report = export(checkpoint, Target(format_name), folder)
        wrong = probe(name, checkpoint, bundle)
    details = {key: value for key, value in bundle.manifest.details.items() if key not in ("inductor", "opset")}
    if wrong:
        return {"status": "failed", "reason": "wrong_artifact", "message": wrong, "details": details}
    return {"status": "passed", "details": details, "checks": len(report.checks)}


def probe(name: str, checkpoint: Any, bundle: Any) -> str:
    """Where the artifact departs from eager on inputs that the gate never saw, or ""; a check that owes the gate
    nothing but the eager model."""
    from deployer.checkpoint.eager import run_eager
    from deployer.runtime import open_bundle

    model, spec = checkpoint.build(), checkpoint.spec
    with open_bundle(bundle) as run:
        for seed in _SEEDS:
            arrays = unseen_inputs(name, checkpoint, seed)
            expected, got = run_eager(model, spec, arrays), run(arrays)
            for output, array in expected.items():
                if difference := departs(got[output], array):
                    return f"{output} at {_sizes(spec, arrays)}, seed {seed}: {difference}"
    return ""


def unseen_inputs(name: str, checkpoint: Any, seed: int) -> dict[str, Array]:
    """Inputs at random legal sizes: drawn anew, or for a real checkpoint its samples in another order."""
    from deployer.samples import sized_inputs
    from tests.zoo import ENTRIES

    rng = np.random.default_rng(seed)
    spec: ModelSpec = checkpoint.spec
    sizes = {dim: int(rng.integers(limits.min, limits.max + 1)) for dim, limits in spec.dims.items()}
    if seed == _SEEDS[0]:
        sizes = {dim: limits.min for dim, limits in spec.dims.items()}
    if ENTRIES[name].inputs:
        return ENTRIES[name].arrays(seed, sizes)
    rows = rng.permutation(next(iter(checkpoint.samples.values())).shape[0])
    return sized_inputs(spec, {key: array[rows] for key, array in checkpoint.samples.items()}, sizes)


def _sizes(spec: ModelSpec, arrays: Arrays) -> str:
    return " ".join(f"{name}={size}" for name, size in spec.check_inputs(arrays).items())


def departs(got: Array, expected: Array) -> str:
    """How `got` differs from `expected`, or ""."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if expected.dtype.kind != "f":
        return "" if np.array_equal(got, expected) else f"{int((got != expected).sum())} of {got.size} values differ"
    finite = expected[np.isfinite(expected)]
    scale = float(np.sqrt(np.mean(finite.astype(np.float64) ** 2))) if finite.size else 0.0
    if np.allclose(got, expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale + 1e-12, equal_nan=True):
        return ""
    return f"largest difference {np.nanmax(np.abs(got - expected)):.3g} where the output's rms is {scale:.3g}"
