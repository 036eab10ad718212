"""One output of an artifact against the eager model's: what is allowed, and what the difference is.

Floats. An element passes when |got − reference| ≤ atol + rtol·|reference|, with
atol = max(atol_scale·scale, 4·min(noise, 1e-3·scale), 2·min(rounding, 1e-2·scale), 1e-30). scale is the root mean
square of the reference output in that case, or 1 % of that output's largest over the ordinary cases where this is more
(a case that happens to answer zeros). noise is what the eager model itself was seen to move by, in absolute terms; it
counts up to 1e-3·scale. rounding is what the eager model moves by when every value in it is rounded to the artifact's
precision, 0 for fp32; it counts up to 1e-2·scale. rtol and atol_scale come from the artifact's precision
(`TOLERANCES`); rtol is at least one step of the output's dtype. Nothing else loosens it.

An INT8 artifact has no elementwise tolerance: the step of an activation is a share of its whole range, so the error of
a small value is as large as that of a large one. Its outputs are held to the floors of a case
(`quantize.score.Floors`): SQNR and cosine of floats, equal values but for one or 2 % of integers.

NaN equals NaN at the same place alone, infinity the same infinity. Integers and bools must be equal; an index that
differs counts as a tie where the scores that it ranks tie (`Ranking`). Complex outputs are compared in both parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from deployer.quantize.score import FLOORS, Floors, judge_case
from deployer.spec import Array, Arrays, ModelSpec

NOISE_FACTOR = 4.0
NOISE_CEILING = 1e-3  # of the output's scale: noise beyond it is no noise
ROUNDING_FACTOR = 2.0  # two right artifacts round at other places, each about as far from float32
ROUNDING_CEILING = 1e-2  # of the output's scale: beyond it, the precision does not carry the model
SCALE_SHARE = 0.01  # of the output's usual scale, for cases that answer near zero
_ATOL_FLOOR = 1e-30


class Tolerance(msgspec.Struct, frozen=True):
    """`atol_scale` is relative to the root mean square of the reference output."""

    rtol: float
    atol_scale: float


#: by precision of the artifact; the reference is float32 always. Half the digits, half the demands: fp16 has 11 bits,
#: bf16 8, and a network of many layers rounds each of them.
TOLERANCES = {
    "fp32": Tolerance(rtol=1e-4, atol_scale=2e-5),
    "fp16": Tolerance(rtol=2e-3, atol_scale=2e-3),
    "bf16": Tolerance(rtol=1.6e-2, atol_scale=1.6e-2),
}


def limits_for(precision: str) -> Tolerance | Floors:
    """What an artifact of this precision is held to."""
    return FLOORS if precision == "int8" else TOLERANCES[precision]


class OutputCheck(msgspec.Struct, frozen=True):
    """One output in one case, or (`kind` "refusal") one input that must be refused; of kind "structure", an output held
    to shape, dtype and finiteness alone.

    `error_over_allowed` ≤ 1 passes; `argmax_agreement` is the share of equal argmax along the last axis (None where
    there is no class axis); `ties` counts indices that differ where the scores tie.
    """

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
    ties: int = 0
    kind: str = "answer"
    sqnr_db: float | None = None


def rms(array: Array) -> float:
    """Root mean square of the finite values, in float64; 0 where there is none."""
    values = real_view(array)
    values = values[np.isfinite(values)].astype(np.float64)
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0


def real_view(array: Array) -> Array:
    """Complex numbers as pairs of floats along a new last axis; everything else as it is."""
    if array.dtype.kind != "c":
        return array
    return np.stack([array.real, array.imag], axis=-1)


def difference(got: Array, expected: Array) -> float:
    """Largest absolute difference of two arrays of one shape; infinite where NaN or infinity stand apart. For integers
    and bools the number of values that differ."""
    got, expected = real_view(got), real_view(expected)
    if got.dtype.kind != "f":
        return float(np.count_nonzero(got != expected))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(got.astype(np.float64) - expected.astype(np.float64))
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    apart = np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
    return float(apart.max(initial=0.0))


def allowed_scale(expected: Array, usual_scale: float) -> float:
    """The `scale` of the formula above."""
    return max(rms(expected), SCALE_SHARE * usual_scale)


def allowed_error(
    expected: Array, tolerance: Tolerance, noise: float = 0.0, usual_scale: float = 0.0, rounding: float = 0.0
) -> Array:
    """What the formula above allows at each element of a float output, float64 of its shape."""
    scale = allowed_scale(expected, usual_scale)
    atol = max(
        tolerance.atol_scale * scale,
        NOISE_FACTOR * min(noise, NOISE_CEILING * scale),
        ROUNDING_FACTOR * min(rounding, ROUNDING_CEILING * scale),
        _ATOL_FLOOR,
    )
    rtol = max(tolerance.rtol, float(np.finfo(expected.dtype).eps))
    with np.errstate(invalid="ignore"):
        allowed: Array = atol + rtol * np.abs(expected.astype(np.float64))
    return allowed


def compare(
    case: str,
    name: str,
    got: Array,
    expected: Array,
    limits: Tolerance | Floors,
    noise: float = 0.0,
    usual_scale: float = 0.0,
    tied: Array | None = None,
    rounding: float = 0.0,
) -> OutputCheck:
    """Hold one output of an artifact to the eager model's.

    `limits`       by the artifact's precision, see `limits_for`
    `noise`        absolute, as measured on the eager model
    `usual_scale`  the output's largest rms over the ordinary cases
    `tied`         for an index output: bool of its shape, True where the artifact's index is a tie (see `tied_indices`)
    `rounding`     absolute, as measured on the eager model rounded to the artifact's precision
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        reason = f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}"
        return OutputCheck(case, name, False, reason, finite=bool(np.isfinite(got).all()))
    got, expected = real_view(got), real_view(expected)
    if expected.dtype.kind != "f":
        slack = limits.may_differ(expected.size) if isinstance(limits, Floors) else 0
        return _compare_exactly(case, name, got, expected, tied, slack)
    if isinstance(limits, Floors):
        return _compare_by_floors(case, name, got, expected, limits, usual_scale)
    allowed = allowed_error(expected, limits, noise, usual_scale, rounding)
    scale = allowed_scale(expected, usual_scale)
    return _compare_floats(case, name, got.astype(np.float64), expected.astype(np.float64), allowed, scale)


def _compare_exactly(
    case: str, name: str, got: Array, expected: Array, tied: Array | None, slack: int = 0
) -> OutputCheck:
    differs = got != expected
    ties = int(np.count_nonzero(differs & tied)) if tied is not None else 0
    wrong = int(np.count_nonzero(differs)) - ties
    reason = ""
    if wrong > slack:
        place = tuple(int(axis) for axis in np.argwhere(differs if tied is None else differs & ~tied)[0])
        at = f"the first at {list(place)}, {got[place]} for {expected[place]}" if place else f"{got} for {expected}"
        asked = f"{expected.dtype} must be equal" + (f" but for {slack}" if slack else "")
        reason = f"{wrong} of {expected.size} values differ ({at}); {asked}"
    over = wrong / slack if slack else float(wrong)
    return OutputCheck(case, name, not reason, reason, max_abs=float(wrong > 0), error_over_allowed=over, ties=ties)


def _compare_by_floors(
    case: str, name: str, got: Array, expected: Array, floors: Floors, usual_scale: float
) -> OutputCheck:
    """NaN and infinities in their places as ever, the rest by the floors of a case."""
    check = _compare_floats(
        case, name, got.astype(np.float64), expected.astype(np.float64), np.full(expected.shape, np.inf), rms(expected)
    )
    if not check.passed:
        return check
    found = judge_case(got, expected, floors, usual_scale)
    return msgspec.structs.replace(
        check,
        passed=not found.reason,
        reason=found.reason,
        cosine=found.cosine,
        error_over_allowed=found.over_allowed,
        sqnr_db=found.sqnr_db,
    )


def compare_structure(case: str, name: str, got: Array, expected: Array) -> OutputCheck:
    """Shape, dtype and finiteness alone; the figures are recorded and judge nothing. For INT8 far outside of the ranges
    that it was calibrated for: activations clip there, and what the eager model answers is no measure of the artifact.
    """
    check = compare(case, name, got, expected, FLOORS)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return check
    got, expected = real_view(got), real_view(expected)
    lost = 0 if expected.dtype.kind != "f" else int(np.count_nonzero(np.isfinite(expected) & ~np.isfinite(got)))
    reason = f"{lost} values are NaN or infinite where the eager model's are finite" if lost else ""
    return msgspec.structs.replace(check, passed=not lost, reason=reason, error_over_allowed=0.0, kind="structure")


def _compare_floats(case: str, name: str, got: Array, expected: Array, allowed: Array, scale: float) -> OutputCheck:
    nan_count = int(np.isnan(expected).sum())
    special = ~np.isfinite(expected) | ~np.isfinite(got)
    same_special = np.where(np.isnan(expected), np.isnan(got), got == expected)
    misplaced = int((special & ~same_special).sum())
    regular = ~special
    reference, answer = expected[regular], got[regular]
    error = np.abs(answer - reference)
    ratio = float((error / allowed[regular]).max(initial=0.0))
    reason = ""
    if misplaced:
        place = [int(axis) for axis in np.argwhere(special & ~same_special)[0]]
        reason = (
            f"{misplaced} values are NaN or infinite where the eager model's are not, or the other way round "
            f"(the first at {place})"
        )
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


# ------------------------------------------------------------------------------------------------------------- indices


@dataclass(frozen=True)
class Ranking:
    """An integer output that holds positions along `axis` of `scores` (a float output, or an input), best first."""

    scores: str
    from_inputs: bool
    axis: int
    largest: bool

    def __str__(self) -> str:
        best, source = "largest" if self.largest else "smallest", "input" if self.from_inputs else "output"
        return f"positions of the {best} along axis {self.axis} of {source} '{self.scores}'"


def recorded_rankings(spec: ModelSpec, recorded: Mapping[str, str], case: tuple[Arrays, Arrays]) -> dict[str, Ranking]:
    """The rankings that a report tells in words, from any case of the model's inputs and outputs."""
    return {
        name: ranking
        for name, words in recorded.items()
        for ranking in _candidates(spec, name, case)
        if str(ranking) == words
    }


def find_rankings(spec: ModelSpec, cases: Iterable[tuple[Arrays, Arrays]]) -> dict[str, Ranking]:
    """Which integer outputs rank which scores, seen from the eager model's inputs and outputs in `cases`.

    An output ranks an array when, in every case, it holds exactly the positions of the largest (or smallest) values
    along one axis: argmax, argmin, topk, argsort, with or without the reduced axis. Outputs are tried before inputs.
    """
    names = [tensor.name for tensor in spec.outputs if "int" in tensor.dtype]
    candidates: dict[str, list[Ranking]] = {}
    telling: set[Ranking] = set()
    for inputs, outputs in cases if names else ():  # one case at a time: they may be large
        if not candidates:
            candidates = {name: list(_candidates(spec, name, (inputs, outputs))) for name in names}
        for name, possible in candidates.items():
            candidates[name] = [ranking for ranking in possible if _ranks(ranking, name, inputs, outputs)]
            telling.update(ranking for ranking in candidates[name] if _tells(ranking, inputs, outputs))
    best = {
        name: next((entry for entry in possible if entry in telling), None) for name, possible in candidates.items()
    }
    return {name: ranking for name, ranking in best.items() if ranking is not None}


def _candidates(spec: ModelSpec, name: str, case: tuple[Arrays, Arrays]) -> Iterator[Ranking]:
    inputs, outputs = case
    index = outputs[name]
    sources = [(tensor.name, False) for tensor in spec.outputs if tensor.dtype.startswith("float")]
    sources += [(tensor.name, True) for tensor in spec.inputs if tensor.dtype != "bool"]
    for source, from_inputs in sources:
        scores = (inputs if from_inputs else outputs)[source]
        for axis in range(scores.ndim):
            others = scores.shape[:axis] + scores.shape[axis + 1 :]
            reduced = index.shape == others
            kept = index.ndim == scores.ndim and index.shape[:axis] + index.shape[axis + 1 :] == others
            if reduced or (kept and index.shape[axis] <= scores.shape[axis]):
                yield from (Ranking(source, from_inputs, axis, largest) for largest in (True, False))


def _scores(ranking: Ranking, inputs: Arrays, outputs: Arrays) -> Array:
    return (inputs if ranking.from_inputs else outputs)[ranking.scores]


def _at(scores: Array, index: Array, axis: int) -> Array | None:
    """`scores` at the positions `index` along `axis`, or None where a position is outside or the shapes do not go."""
    if index.ndim == scores.ndim - 1:
        index = np.expand_dims(index, axis)
    if index.ndim != scores.ndim or index.size == 0 or scores.shape[axis] == 0:
        return None
    if int(index.min()) < 0 or int(index.max()) >= scores.shape[axis]:
        return None
    values: Array = np.take_along_axis(scores, index.astype(np.int64), axis=axis)
    return values


def _ranks(ranking: Ranking, name: str, inputs: Arrays, outputs: Arrays) -> bool:
    scores, axis = _scores(ranking, inputs, outputs), ranking.axis
    if outputs[name].size == 0:
        return True
    try:
        values = _at(scores, outputs[name], axis)
    except (ValueError, IndexError):  # shapes that went together in one case and do not in another
        return False
    if values is None:
        return False
    if values.shape[axis] == 1:
        best = scores.max(axis, keepdims=True) if ranking.largest else scores.min(axis, keepdims=True)
    else:
        ascending = np.sort(scores, axis=axis)
        ordered = np.flip(ascending, axis) if ranking.largest else ascending
        best = ordered.take(range(values.shape[axis]), axis=axis)
    return bool(np.array_equal(values, best))


def _tells(ranking: Ranking, inputs: Arrays, outputs: Arrays) -> bool:
    """Scores that are all alike fit any index and prove nothing."""
    scores = _scores(ranking, inputs, outputs)
    return bool(scores.size and (scores.max(ranking.axis) != scores.min(ranking.axis)).any())


def tied_indices(
    ranking: Ranking, got: Array, expected: Array, got_scores: Array, scores: Array, allowed: Array | None
) -> Array:
    """Where the index `got` is as good as `expected`: bool of their shape.

    `scores` are the eager model's, `got_scores` the artifact's. Equal eager scores are a tie. So are scores no further
    apart than they may be wrong (`allowed`, elementwise; None: not at all) when the artifact's own scores put its index
    first. A list of best positions that names one twice has no ties.
    """
    axis = ranking.axis
    none = np.zeros(got.shape, bool)
    if got.shape != expected.shape:
        return none
    at_got, at_expected = _at(scores, got, axis), _at(scores, expected, axis)
    if at_got is None or at_expected is None:
        return none
    tied: Array = at_got == at_expected
    if allowed is not None and got_scores.shape == scores.shape:
        own_got, own_expected = _at(got_scores, got, axis), _at(got_scores, expected, axis)
        limit_got, limit_expected = _at(allowed, got, axis), _at(allowed, expected, axis)
        if not any(part is None for part in (own_got, own_expected, limit_got, limit_expected)):
            consistent = own_got >= own_expected if ranking.largest else own_got <= own_expected  # type: ignore[operator]
            near = np.abs(at_got.astype(np.float64) - at_expected) <= limit_got + limit_expected  # type: ignore[operator]
            tied = tied | (consistent & near)
    if at_got.shape[axis] > 1:
        ordered = np.sort(got, axis=axis)
        repeated = (np.diff(ordered, axis=axis) == 0).any(axis=axis, keepdims=True)
        tied = tied & ~repeated
    return tied.reshape(got.shape)
