"""The numeric gate: an artifact answers what the eager model answers, at every size it claims, or it does not ship.

    report = deployer.validate("build/digits-onnx-fp32")

The reference is the eager model in float32 and eval mode. It is checked against itself first (`selfcheck`), then asked
at every size and with stress inputs (`cases`, `reference`), its rows alone and in batches (`batching`). Each artifact
is held to its answers (`compare`, `gate`). `docs/gate.md` says what is asked and what is allowed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deployer.bundle import read_bundle
from deployer.checkpoint import Checkpoint
from deployer.errors import GateError
from deployer.runtime import open_bundle_for_gate
from deployer.validate.batching import take_row
from deployer.validate.cases import Case, cases_for, refusals_for, scatter, stress_cases
from deployer.validate.compare import TOLERANCES, OutputCheck, Tolerance, compare, limits_for
from deployer.validate.gate import (
    SCHEMA_VERSION,
    Measure,
    ValidationReport,
    check_proof,
    measure_of,
    read_references,
    read_report,
    run_gate,
)
from deployer.validate.localize import Departure, localize
from deployer.validate.ranges import without_found_ranges
from deployer.validate.reference import Reference, make_reference, write_references
from deployer.validate.rounding import measure_rounding
from deployer.validate.selfcheck import ModelFacts

__all__ = [
    "SCHEMA_VERSION",
    "TOLERANCES",
    "Case",
    "Departure",
    "Measure",
    "ModelFacts",
    "OutputCheck",
    "Reference",
    "Tolerance",
    "ValidationReport",
    "cases_for",
    "check_proof",
    "compare",
    "limits_for",
    "localize",
    "make_reference",
    "measure_of",
    "measure_rounding",
    "read_references",
    "read_report",
    "refusals_for",
    "run_gate",
    "scatter",
    "stress_cases",
    "take_row",
    "validate",
    "without_found_ranges",
    "write_references",
]


def validate(path: str | Path, *, checkpoint: Checkpoint | None = None, threads: int | None = None) -> ValidationReport:
    """Run the gate again on this machine.

    The reference is the one that was recorded when the bundle was made or, given `checkpoint`, the eager model run
    here and now. Nothing in the bundle is changed. Raises BundleError, IntegrityError, MachineError; a bundle that
    fails gives a report whose `passed` is False.
    """
    bundle = read_bundle(path)
    inputs, _ = bundle.samples()
    if checkpoint is not None:
        if checkpoint.sha256 != bundle.manifest.source.sha256:
            raise GateError(
                f"'{bundle.path}' was made from weights {bundle.manifest.source.sha256[:12]}…, "
                f"'{checkpoint.source}' holds {checkpoint.sha256[:12]}…; give the checkpoint it was made from"
            )
        checkpoint = replace(checkpoint, spec=bundle.spec, samples=inputs)
        reference = measure_rounding(checkpoint, make_reference(checkpoint), bundle.manifest.target.precision)
    else:
        reference = read_references(bundle, read_report(bundle).noise)
    with open_bundle_for_gate(bundle, threads=threads) as runner:
        return run_gate(runner, bundle.spec, inputs, reference, bundle.manifest.target.precision, runner.engine)
