"""Every case through an artifact, and the report on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from deployer.bundle import VALIDATION, Bundle
from deployer.errors import BundleError, GateError, RequestError, first_line
from deployer.formats import Loaded
from deployer.quantize.score import Floors
from deployer.runtime import Runner
from deployer.spec import Array, Arrays, ModelSpec, TensorSpec
from deployer.validate.batching import measure_int8_batching
from deployer.validate.cases import cases_for, refusals_for, stress_cases
from deployer.validate.compare import (
    ROUNDING_CEILING,
    OutputCheck,
    Ranking,
    Tolerance,
    allowed_error,
    allowed_scale,
    compare,
    compare_structure,
    find_rankings,
    limits_for,
    recorded_rankings,
    tied_indices,
)
from deployer.validate.reference import Reference, all_inputs, read_outputs
from deployer.validate.selfcheck import ModelFacts

SCHEMA_VERSION = 2

Run = Callable[[Arrays], dict[str, Array]]


class ValidationReport(msgspec.Struct, frozen=True):
    """What `validation.json` holds.

    `noise`        by output: what the eager model itself moves by; `case_noise` the same in each stress case
    `batch_reason` why requests may not share a run, "" where they may
    `rounding`     by case and output: what the eager model moves by when it is rounded to `precision`; none for fp32
    `facts`        what the self-checks of the eager model saw and let pass; `notes` says it in words
    `rankings`     which score each index output ranks, in words
    `errors`       inputs at which the eager model raises an index error
    `skipped`      stress cases that nothing can be held to, with the reason
    `tolerance`    what was allowed; None for INT8, which is held to `floors`
    """

    passed: bool
    reasons: tuple[str, ...]
    checks: tuple[OutputCheck, ...]
    engine: str
    precision: str
    tolerance: Tolerance | None
    noise: dict[str, float]
    batch_independent: bool
    batch_reason: str = ""
    case_noise: dict[str, dict[str, float]] = {}
    facts: ModelFacts = ModelFacts()
    notes: tuple[str, ...] = ()
    rankings: dict[str, str] = {}
    errors: dict[str, str] = {}
    skipped: dict[str, str] = {}
    floors: Floors | None = None
    rounding: dict[str, dict[str, float]] = {}
    schema_version: int = SCHEMA_VERSION


def run_gate(
    run: Run, spec: ModelSpec, samples: Arrays, reference: Reference, precision: str, engine: str
) -> ValidationReport:
    """Every case through the artifact, held to the reference. A case in which the artifact fails is a failed check.

    `run` is an open Runner, or a bare callable that is put behind one, as every artifact is. INT8 is held to floors in
    place of tolerances, in stress cases to its structure alone, and its own rows are run alone and in a batch.
    """
    runner = run if isinstance(run, Runner) else Runner(spec, Loaded(run, engine))
    rankings = find_rankings(
        spec, ((case.inputs(spec, samples), reference.outputs[case.name]) for case in cases_for(spec))
    )
    measure = Measure(spec, reference, precision, rankings)
    limits = measure.limits
    judge = _Judge(runner, spec, reference, measure)
    checks: list[OutputCheck] = []
    for name, inputs in all_inputs(spec, samples):
        if name in reference.outputs:
            checks += judge.answer(name, inputs)
        elif name in reference.errors:
            checks.append(judge.error(name, inputs))
    checks += [judge.refusal(refusal.name, refusal.arrays) for refusal in refusals_for(spec)]
    reasons = tuple(_reason(check) for check in checks if not check.passed)
    independent, batch_reason, floors = reference.batch_independent, reference.batch_reason, None
    if isinstance(limits, Floors):
        floors = limits
        if independent and not reasons:  # the eager model keeps rows apart; ranges taken at run time may not
            batching = measure_int8_batching(runner, spec, samples)
            independent, batch_reason = batching.independent, batching.reason
    return ValidationReport(
        not reasons,
        reasons,
        tuple(checks),
        engine,
        precision,
        limits if isinstance(limits, Tolerance) else None,
        reference.noise,
        independent,
        batch_reason,
        {case: dict(noise) for case, noise in reference.case_noise.items()},
        reference.facts,
        (*reference.facts.notes(), *_notes(spec, rankings, checks), *_rounding_notes(reference, precision)),
        {name: str(ranking) for name, ranking in rankings.items()},
        dict(reference.errors),
        dict(reference.skipped),
        floors,
        {case: dict(moved) for case, moved in reference.rounding.items()},
    )


def _reason(check: OutputCheck) -> str:
    return f"{check.output} at {check.case}: {check.reason}" if check.output else f"{check.case}: {check.reason}"


def _notes(spec: ModelSpec, rankings: Mapping[str, Ranking], checks: list[OutputCheck]) -> Iterator[str]:
    for tensor in spec.inputs:
        if tensor.bounded:
            yield f"input '{tensor.name}' takes values{tensor.range_text()}; others are refused"
    for name in rankings:
        if ties := sum(check.ties for check in checks if check.output == name):
            yield f"{ties} values of '{name}' are another of several equal bests: ties, not errors"
    if structure := len({check.case for check in checks if check.kind == "structure"}):
        yield (
            f"{structure} stress cases lie outside of what was calibrated for; INT8 is held to shape, dtype and "
            "finiteness there"
        )
    for tensor in spec.outputs:
        if nans := sum(check.nan_count for check in checks if check.output == tensor.name):
            yield f"{nans} values of '{tensor.name}' are NaN in the eager model and in the artifact alike"


def _rounding_notes(reference: Reference, precision: str) -> Iterator[str]:
    """Where the precision alone moves an output by more than its plain tolerance, at worst."""
    scales = reference.scales()
    for name in reference.noise:
        shares = {
            case: moved[name] / scale
            for case, moved in reference.rounding.items()
            if moved[name] and (scale := allowed_scale(reference.outputs[case][name], scales[name]))
        }
        limits, case = limits_for(precision), max(shares, key=lambda at: shares[at], default="")
        if not case or not isinstance(limits, Tolerance) or shares[case] <= limits.atol_scale:
            continue
        counted = f" up to {ROUNDING_CEILING:g}" if shares[case] > ROUNDING_CEILING else ""
        yield (
            f"{precision} alone moves the eager model's '{name}' by {shares[case]:.2g} of its rms at {case}; the "
            f"tolerance counts it{counted}"
        )


class Measure:
    """Holds answers to the eager model's by a precision's tolerance, ties among indices included: what the gate, the
    benchmarks and the trial of a package share."""

    def __init__(self, spec: ModelSpec, reference: Reference, precision: str, rankings: Mapping[str, Ranking]) -> None:
        self.spec = spec
        self.limits = limits_for(precision)
        self.rankings = rankings
        self._reference = reference
        self._scales = reference.scales()

    def check(self, case: str, inputs: Arrays, got: Arrays, expected: Arrays) -> list[OutputCheck]:
        """One check for each output. `case` is one of the reference's, or another: then the noise of the ordinary ones
        counts. Arrays may lack the batch axis, as single items do."""
        inputs, expected = self._batched(self.spec.inputs, inputs), self._batched(self.spec.outputs, expected)
        got = self._batched(self.spec.outputs, got)
        noise, rounding = self._reference.noise_at(case), self._reference.rounding_at(case)

        def ties(name: str) -> Array | None:
            if name not in self.rankings or np.array_equal(got[name], expected[name]):
                return None
            ranking = self.rankings[name]
            scores = (inputs if ranking.from_inputs else expected)[ranking.scores]
            if ranking.from_inputs or isinstance(self.limits, Floors):
                return tied_indices(ranking, got[name], expected[name], scores, scores, None)
            source = ranking.scores
            allowed = allowed_error(scores, self.limits, noise[source], self._scales[source], rounding[source])
            return tied_indices(ranking, got[name], expected[name], got[source], scores, allowed)

        return [
            compare(
                case, name, got[name], array, self.limits, noise[name], self._scales[name], ties(name),
                rounding[name],
            )
            for name, array in expected.items()
        ]  # fmt: skip

    def _batched(self, tensors: Sequence[TensorSpec], arrays: Arrays) -> dict[str, Array]:
        batched = {}
        for tensor in tensors:
            array, axis = arrays[tensor.name], tensor.axis_of(self.spec.batch)
            lacking = axis is not None and array.ndim == len(tensor.shape) - 1
            batched[tensor.name] = np.expand_dims(array, axis) if lacking and axis is not None else array
        return batched


def measure_of(bundle: Bundle, reference: Reference | None = None) -> Measure:
    """What answers to the samples of a bundle, or to rows of them, are held to; with `reference`, to its cases."""
    report, (inputs, outputs) = read_report(bundle), bundle.samples()
    reference = reference or Reference(
        {"samples": outputs},
        report.noise,
        report.batch_independent,
        case_noise=report.case_noise,
        rounding=report.rounding,
    )
    rankings = recorded_rankings(bundle.spec, report.rankings, (inputs, outputs))
    return Measure(bundle.spec, reference, bundle.manifest.target.precision, rankings)


class _Judge:
    """An open artifact before the eager model's answers."""

    def __init__(self, runner: Runner, spec: ModelSpec, reference: Reference, measure: Measure) -> None:
        self._runner = runner
        self._spec = spec
        self._reference = reference
        self._measure = measure

    def answer(self, case: str, inputs: Arrays) -> list[OutputCheck]:
        """One check for each output of a case that the eager model answers."""
        try:
            got = self._runner(inputs)
        except Exception as error:  # noqa: BLE001 - an artifact may fail in any way; it is a verdict, not a crash
            reason = f"the artifact failed with {type(error).__name__}: {first_line(error)}"
            return [OutputCheck(case, tensor.name, False, reason, finite=False) for tensor in self._spec.outputs]
        expected = self._reference.outputs[case]
        if isinstance(self._measure.limits, Floors) and case in self._reference.case_noise:
            return [compare_structure(case, name, got[name], array) for name, array in expected.items()]
        return self._measure.check(case, inputs, got, expected)

    def error(self, case: str, inputs: Arrays) -> OutputCheck:
        """An index error of the eager model must stay an error."""
        try:
            self._runner(inputs)
        except Exception:  # noqa: BLE001 - any error will do
            return OutputCheck(case, "", True, kind="refusal")
        reason = (
            f"the artifact answers where the eager model fails ({self._reference.errors[case]}); declare the input's "
            "smallest and largest value (low, high) in the spec"
        )
        return OutputCheck(case, "", False, reason, kind="refusal")

    def refusal(self, case: str, inputs: Arrays) -> OutputCheck:
        """What the spec does not allow must be refused as such, before the artifact sees it."""
        try:
            self._runner(inputs)
        except RequestError:
            return OutputCheck(case, "", True, kind="refusal")
        except Exception as error:  # noqa: BLE001 - an artifact may fail in any way
            reason = (
                f"not allowed by the spec, and not refused but failed with {type(error).__name__}: {first_line(error)}"
            )
            return OutputCheck(case, "", False, reason, kind="refusal")
        return OutputCheck(case, "", False, "not allowed by the spec, and answered all the same", kind="refusal")


def read_report(bundle: Bundle) -> ValidationReport:
    """The report in the bundle. Raises BundleError for one of another schema version, saying what to do."""
    data = (bundle.path / VALIDATION).read_bytes()
    try:
        document: Any = msgspec.json.decode(data)
        version = document["schema_version"]
        if version == SCHEMA_VERSION:
            return msgspec.convert(document, ValidationReport)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
        raise BundleError(f"'{bundle.path / VALIDATION}' cannot be read: {error}; export the bundle again") from error
    raise BundleError(
        f"'{bundle.path / VALIDATION}' has schema_version {version}; this deployer reads {SCHEMA_VERSION}: "
        "export the bundle again"
    )


def check_proof(bundle: Bundle) -> None:
    """Raises GateError unless the bundle's own files bear out its `passed`: the report says so too, and every case has
    a recorded reference and a check that passed for every output, or the reason why not.

    It finds folders that were put together by hand. Who rewrites every file, hashes included, is not found out.
    """
    report = read_report(bundle)
    if not (bundle.manifest.passed and report.passed and not report.reasons):
        why = f": {report.reasons[0]}" if report.reasons else ""
        raise GateError(f"'{bundle.path}' has not passed the gate{why}; `deployer validate` shows why, export it again")
    recorded, (inputs, _) = read_outputs(bundle), bundle.samples()
    cases = [case.name for case in cases_for(bundle.spec)]
    cases += [case.name for case in stress_cases(bundle.spec, inputs)]
    passed = {(check.case, check.output) for check in report.checks if check.passed}
    for case in cases:
        if case in report.skipped or (case in report.errors and (case, "") in passed):
            continue
        lacking = "reference" if case not in recorded else "check that passed"
        if case not in recorded or any((case, tensor.name) not in passed for tensor in bundle.spec.outputs):
            raise GateError(
                f"'{bundle.path}' says that it passed the gate and records no {lacking} for the case '{case}'; export "
                "it again"
            )


def read_references(bundle: Bundle, noise: dict[str, float]) -> Reference:
    """The reference recorded in a bundle; `noise` is its report's."""
    report = read_report(bundle)
    return Reference(
        read_outputs(bundle),
        noise,
        bundle.manifest.batch_independent,
        report.batch_reason,
        report.case_noise,
        report.errors,
        report.skipped,
        report.facts,
        bundle.spec,
        report.rounding,
    )
