"""The numeric gate: an artifact answers what the eager model answers, at every size it claims, or it does not ship.

The reference is the eager model in float32 and eval mode. Its own noise is measured first: the same inputs twice (a
difference means that the model is not deterministic, and refuses it) and rows alone against rows in a batch.

Tolerance. An element passes when |got − reference| ≤ atol + rtol·|reference| with rtol = 1e-4 and
atol = max(2e-5·scale, 4·noise, 1e-12). scale is the root mean square of the reference output in that case, or 1 % of
that output's largest over all cases where this is more (a case that happens to answer zeros). noise is the measured
difference between a row alone and in a batch, counted up to 1e-3·scale. Nothing else loosens it.
Integer and bool outputs must be equal. NaN equals NaN only at the same place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import load_file, save_file

from deployer.bundle import REFERENCES, Bundle, read_bundle
from deployer.checkpoint import Checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import DeployerError, GateError, ModelError, first_line
from deployer.runtime import open_bundle
from deployer.samples import sized_inputs
from deployer.spec import Array, Arrays, ModelSpec, TensorSpec

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_NOISE_FACTOR = 4.0
_NOISE_CEILING = 1e-3  # of the output's scale: noise beyond it is no noise, rows mix
_ATOL_FLOOR = 1e-12
_SCALE_SHARE = 0.01  # of the output's usual scale, for cases that answer near zero
_ROWS_ALONE = 8

Run = Callable[[Arrays], dict[str, Array]]


class Tolerance(msgspec.Struct, frozen=True):
    """`atol_scale` is relative to the root mean square of the reference output."""

    rtol: float
    atol_scale: float


#: by precision of the artifact; the reference is float32 always
TOLERANCES = {"fp32": Tolerance(rtol=1e-4, atol_scale=2e-5)}


class OutputCheck(msgspec.Struct, frozen=True):
    """One output in one case. `error_over_allowed` ≤ 1 passes; `argmax_agreement` is the share of equal argmax along
    the last axis (None where there is no class axis)."""

    case: str
    output: str
    passed: bool
    reason: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    cosine: float = 1.0
    finite: bool = True
    nan_count: int = 0
    argmax_agreement: float | None = None
    error_over_allowed: float = 0.0


class ValidationReport(msgspec.Struct, frozen=True):
    """What `validation.json` holds. `noise` is by output: a row alone against itself in a batch, the largest."""

    passed: bool
    reasons: tuple[str, ...]
    checks: tuple[OutputCheck, ...]
    engine: str
    precision: str
    tolerance: Tolerance
    noise: dict[str, float]
    batch_independent: bool
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Case:
    """One input of the gate; `sizes` None stands for the real samples as they are."""

    name: str
    sizes: Mapping[str, int] | None
    contiguous: bool = True

    def inputs(self, spec: ModelSpec, samples: Arrays) -> dict[str, Array]:
        arrays = dict(samples) if self.sizes is None else sized_inputs(spec, samples, self.sizes)
        return arrays if self.contiguous else {name: scatter(array) for name, array in arrays.items()}


@dataclass(frozen=True)
class Reference:
    """The eager model's answers to every case, and what was learnt about the model."""

    outputs: Mapping[str, Arrays]
    noise: dict[str, float]
    batch_independent: bool

    def scales(self) -> dict[str, float]:
        """Largest root mean square of each output over all cases."""
        return {name: max(_rms(arrays[name]) for arrays in self.outputs.values()) for name in self.noise}


def scatter(array: Array) -> Array:
    """Equal values at other strides: every second element of a buffer twice as long."""
    return np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array


def cases_for(spec: ModelSpec) -> list[Case]:
    """Real samples; each Dim at min, 2, 3, 7, typical, max with the others typical; all smallest; all largest;
    typical sizes in non-contiguous memory."""
    typical = {name: dim.typical for name, dim in spec.dims.items()}
    cases = [Case("samples", None)]
    sizings: list[dict[str, int]] = []
    for name, dim in spec.dims.items():
        sizings += [typical | {name: size} for size in dim.sizes()]
    sizings.append({name: dim.min for name, dim in spec.dims.items()})
    sizings.append({name: dim.max for name, dim in spec.dims.items()})
    if spec.dims:
        cases += [Case(label, sizes) for label, sizes in {_label(sizes): sizes for sizes in sizings}.items()]
    cases.append(Case("non-contiguous", typical, contiguous=False))
    return cases


def _label(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def make_reference(checkpoint: Checkpoint) -> Reference:
    """Run the eager model on every case. Raises GateError when it does not answer the same twice."""
    spec, samples = checkpoint.spec, checkpoint.samples
    model = checkpoint.build()
    log.info("running the eager model on %d cases", len(cases_for(spec)))
    once, twice = (run_eager(model, spec, samples) for _ in range(2))
    for name in once:
        if not np.array_equal(once[name], twice[name], equal_nan=once[name].dtype.kind == "f"):
            raise GateError(
                f"the model is not deterministic in eval mode: output '{name}' differs between two runs on one input; "
                "look for dropout called without `training=self.training`, or noise drawn in forward"
            )
    outputs = {case.name: run_eager(model, spec, case.inputs(spec, samples)) for case in cases_for(spec)}
    for case, arrays in outputs.items():
        try:
            spec.check_outputs(arrays, spec.check_inputs(_inputs_of(case, spec, samples)))
        except DeployerError as error:
            raise ModelError(f"the eager model does not fit its own spec at {case}: {error}") from error
    noise, independent = _batch_noise(lambda arrays: run_eager(model, spec, arrays), spec, samples)
    return Reference(outputs, noise, independent)


def _inputs_of(name: str, spec: ModelSpec, samples: Arrays) -> dict[str, Array]:
    return next(case for case in cases_for(spec) if case.name == name).inputs(spec, samples)


def _batch_noise(run: Run, spec: ModelSpec, samples: Arrays) -> tuple[dict[str, float], bool]:
    """Largest difference, by output, of a row alone to itself inside a batch; and whether that is mere noise."""
    noise = {tensor.name: 0.0 for tensor in spec.outputs}
    if not spec.stackable or spec.batch is None or spec.dims[spec.batch].min > 1:
        return noise, False
    dim = spec.dims[spec.batch]
    rows = min(max(dim.typical, 2), dim.max, _ROWS_ALONE)
    sizes = {name: other.typical for name, other in spec.dims.items()} | {spec.batch: rows}
    arrays = sized_inputs(spec, samples, sizes)
    together = run(arrays)
    independent = True
    for row in range(rows):
        alone = run({tensor.name: take_row(arrays[tensor.name], tensor, spec.batch, row) for tensor in spec.inputs})
        for tensor in spec.outputs:
            expected, got = take_row(together[tensor.name], tensor, spec.batch, row), alone[tensor.name]
            if expected.shape != got.shape:
                independent = False
                continue
            difference = _difference(got, expected)
            noise[tensor.name] = max(noise[tensor.name], difference)
            limit = _NOISE_CEILING * _rms(together[tensor.name]) if got.dtype.kind == "f" else 0.0
            independent &= difference <= max(limit, _ATOL_FLOOR)
    return noise, independent


def take_row(array: Array, tensor: TensorSpec, batch: str, row: int) -> Array:
    """Row `row` along the batch axis, which stays in place with size 1."""
    axis = tensor.axis_of(batch)
    assert axis is not None  # noqa: S101 - callers hold spec.stackable
    return array.take([row], axis=axis)


def _difference(got: Array, expected: Array) -> float:
    if got.dtype.kind != "f":
        return float(np.count_nonzero(got != expected))
    with np.errstate(invalid="ignore"):
        difference = np.abs(got.astype(np.float64) - expected.astype(np.float64))
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    difference = np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))
    return float(difference.max(initial=0.0))


def _rms(array: Array) -> float:
    values = array[np.isfinite(array)].astype(np.float64)
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0


def compare(
    case: str,
    name: str,
    got: Array,
    expected: Array,
    tolerance: Tolerance,
    noise: float = 0.0,
    usual_scale: float = 0.0,
) -> OutputCheck:
    """Hold one output of an artifact to the eager model's. `usual_scale`: its largest rms over all cases."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return OutputCheck(
            case,
            name,
            False,
            f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}",
        )
    if expected.dtype.kind != "f":
        wrong = int(np.count_nonzero(got != expected))
        reason = f"{wrong} of {expected.size} values differ; {expected.dtype} must be equal" if wrong else ""
        return OutputCheck(case, name, not wrong, reason, max_abs=float(wrong > 0), error_over_allowed=float(wrong))
    scale = max(_rms(expected), _SCALE_SHARE * usual_scale)
    return _compare_floats(case, name, got.astype(np.float64), expected.astype(np.float64), tolerance, noise, scale)


def _compare_floats(
    case: str, name: str, got: Array, expected: Array, tolerance: Tolerance, noise: float, scale: float
) -> OutputCheck:
    nan_count = int(np.isnan(expected).sum())
    special = ~np.isfinite(expected) | ~np.isfinite(got)
    same_special = np.where(np.isnan(expected), np.isnan(got), got == expected)
    misplaced = int((special & ~same_special).sum())
    regular = ~special
    reference, answer = expected[regular], got[regular]
    error = np.abs(answer - reference)
    atol = max(
        tolerance.atol_scale * scale, _NOISE_FACTOR * min(noise, _NOISE_CEILING * scale), _ATOL_FLOOR
    )  # fmt: skip
    ratio = float((error / (atol + tolerance.rtol * np.abs(reference))).max(initial=0.0))
    reason = ""
    if misplaced:
        reason = f"{misplaced} values are NaN or infinite where the eager model's are not, or the other way round"
    elif ratio > 1.0:
        reason = f"largest error {float(error.max()):.3g} is {ratio:.3g} times what is allowed (output rms {scale:.3g})"
    norms = float(np.linalg.norm(answer) * np.linalg.norm(reference))
    agreement = None
    if expected.ndim >= 2 and expected.shape[-1] > 1 and expected.size and not nan_count:
        agreement = float(np.mean(np.argmax(got, axis=-1) == np.argmax(expected, axis=-1)))
    return OutputCheck(
        case,
        name,
        not reason,
        reason,
        max_abs=float(error.max(initial=0.0)),
        max_rel=float((error / np.maximum(np.abs(reference), max(scale * 1e-3, 1e-30))).max(initial=0.0)),
        cosine=float(np.dot(answer.ravel(), reference.ravel()) / norms) if norms else float(ratio <= 1.0),
        finite=bool(np.isfinite(got).all()),
        nan_count=nan_count,
        argmax_agreement=agreement,
        error_over_allowed=ratio,
    )


def run_gate(
    run: Run, spec: ModelSpec, samples: Arrays, reference: Reference, precision: str, engine: str
) -> ValidationReport:
    """Every case through the artifact, held to the reference. A case in which the artifact fails is a failed check."""
    tolerance = TOLERANCES[precision]
    scales = reference.scales()
    checks: list[OutputCheck] = []
    for case in cases_for(spec):
        expected = reference.outputs[case.name]
        try:
            got = run(case.inputs(spec, samples))
        except Exception as error:  # noqa: BLE001 - an artifact may fail in any way; it is a verdict, not a crash
            reason = f"the artifact failed with {type(error).__name__}: {first_line(error)}"
            checks += [OutputCheck(case.name, tensor.name, False, reason, finite=False) for tensor in spec.outputs]
            continue
        checks += [
            compare(case.name, name, got[name], array, tolerance, reference.noise[name], scales[name])
            for name, array in expected.items()
        ]
    reasons = tuple(f"{check.output} at {check.case}: {check.reason}" for check in checks if not check.passed)
    return ValidationReport(
        not reasons,
        reasons,
        tuple(checks),
        engine,
        precision,
        tolerance,
        reference.noise,
        reference.batch_independent,
    )


def write_references(folder: Path, reference: Reference) -> None:
    """`references.safetensors`: the eager outputs of every case, so that the gate can run again anywhere."""
    arrays = {f"{case}/{name}": array for case, outputs in reference.outputs.items() for name, array in outputs.items()}
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / REFERENCES)


def read_references(bundle: Bundle, noise: dict[str, float]) -> Reference:
    outputs: dict[str, dict[str, Array]] = {}
    for key, array in load_file(bundle.path / REFERENCES).items():
        case, _, name = key.rpartition("/")
        outputs.setdefault(case, {})[name] = array
    ordered = {
        case: {tensor.name: arrays[tensor.name] for tensor in bundle.spec.outputs} for case, arrays in outputs.items()
    }
    return Reference(ordered, noise, bundle.manifest.batch_independent)


def read_report(bundle: Bundle) -> ValidationReport:
    return msgspec.json.decode((bundle.path / "validation.json").read_bytes(), type=ValidationReport)


def validate(path: str | Path, *, checkpoint: Checkpoint | None = None, threads: int | None = None) -> ValidationReport:
    """Run the gate again on this machine.

    The reference is the one that was recorded when the bundle was made or, given `checkpoint`, the eager model run
    here and now. Nothing in the bundle is changed. Raises BundleError, IntegrityError, MachineError; a bundle that
    fails gives a report whose `passed` is False.
    """
    bundle = read_bundle(path)
    if checkpoint is not None:
        if checkpoint.sha256 != bundle.manifest.source.sha256:
            raise GateError(
                f"'{bundle.path}' was made from weights {bundle.manifest.source.sha256[:12]}…, "
                f"'{checkpoint.source}' holds {checkpoint.sha256[:12]}…; give the checkpoint it was made from"
            )
        reference = make_reference(checkpoint)
    else:
        reference = read_references(bundle, read_report(bundle).noise)
    inputs, _ = bundle.samples()
    with open_bundle(bundle, threads=threads) as runner:
        return run_gate(runner, bundle.spec, inputs, reference, bundle.manifest.target.precision, runner.engine)
