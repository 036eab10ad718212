"""Every case through an artifact, and the report on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from deployer.bundle import VALIDATION, Bundle
from deployer.errors import BundleError, RequestError, first_line
from deployer.formats import Loaded
from deployer.quantize.score import Floors
from deployer.runtime import Runner
from deployer.spec import Array, Arrays, ModelSpec
from deployer.validate.batching import measure_int8_batching
from deployer.validate.cases import cases_for, refusals_for
from deployer.validate.compare import (
    OutputCheck,
    Ranking,
    Tolerance,
    allowed_error,
    compare,
    compare_structure,
    find_rankings,
    limits_for,
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
    schema_version: int = SCHEMA_VERSION


def run_gate(
    run: Run, spec: ModelSpec, samples: Arrays, reference: Reference, precision: str, engine: str
) -> ValidationReport:
    """Every case through the artifact, held to the reference. A case in which the artifact fails is a failed check.

    `run` is an open Runner, or a bare callable that is put behind one, as every artifact is. INT8 is held to floors in
    place of tolerances, in stress cases to its structure alone, and its own rows are run alone and in a batch.
    """
    runner = run if isinstance(run, Runner) else Runner(spec, Loaded(run, engine))
    limits = limits_for(precision)
    rankings = find_rankings(
        spec, ((case.inputs(spec, samples), reference.outputs[case.name]) for case in cases_for(spec))
    )
    judge = _Judge(runner, spec, reference, limits, rankings)
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
        (*reference.facts.notes(), *_notes(spec, rankings, checks)),
        {name: _ranking_words(ranking) for name, ranking in rankings.items()},
        dict(reference.errors),
        dict(reference.skipped),
        floors,
    )


def _reason(check: OutputCheck) -> str:
    return f"{check.output} at {check.case}: {check.reason}" if check.output else f"{check.case}: {check.reason}"


def _ranking_words(ranking: Ranking) -> str:
    best = "largest" if ranking.largest else "smallest"
    return (
        f"positions of the {best} along axis {ranking.axis} of {'input' if ranking.from_inputs else 'output'} "
        f"'{ranking.scores}'"
    )


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


class _Judge:
    """An open artifact before the eager model's answers."""

    def __init__(
        self,
        runner: Runner,
        spec: ModelSpec,
        reference: Reference,
        limits: Tolerance | Floors,
        rankings: Mapping[str, Ranking],
    ) -> None:
        self._runner = runner
        self._spec = spec
        self._reference = reference
        self._limits = limits
        self._rankings = rankings
        self._scales = reference.scales()

    def answer(self, case: str, inputs: Arrays) -> list[OutputCheck]:
        """One check for each output of a case that the eager model answers."""
        try:
            got = self._runner(inputs)
        except Exception as error:  # noqa: BLE001 - an artifact may fail in any way; it is a verdict, not a crash
            reason = f"the artifact failed with {type(error).__name__}: {first_line(error)}"
            return [OutputCheck(case, tensor.name, False, reason, finite=False) for tensor in self._spec.outputs]
        expected, noise = self._reference.outputs[case], self._reference.noise_at(case)
        if isinstance(self._limits, Floors) and case in self._reference.case_noise:
            return [compare_structure(case, name, got[name], array) for name, array in expected.items()]
        return [
            compare(
                case,
                name,
                got[name],
                array,
                self._limits,
                noise[name],
                self._scales[name],
                self._ties(name, inputs, got, case) if name in self._rankings else None,
            )
            for name, array in expected.items()
        ]

    def _ties(self, name: str, inputs: Arrays, got: Arrays, case: str) -> Array | None:
        ranking, expected = self._rankings[name], self._reference.outputs[case]
        if np.array_equal(got[name], expected[name]):
            return None
        scores = (inputs if ranking.from_inputs else expected)[ranking.scores]
        allowed = None
        if not ranking.from_inputs and isinstance(self._limits, Tolerance):
            noise = self._reference.noise_at(case)[ranking.scores]
            allowed = allowed_error(scores, self._limits, noise, self._scales[ranking.scores])
        return tied_indices(
            ranking, got[name], expected[name], scores if allowed is None else got[ranking.scores], scores, allowed
        )

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
    )
