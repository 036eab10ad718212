"""How good a quantized model is: a user's metric over labelled data, or the fidelity of its outputs to the eager ones.

Fidelity, by output, over held-out calibration data and the samples:

- SQNR in dB: 10·log10(mean of the eager output's squares / mean of the squared differences). It sees a wrong scale.
- cosine of each row with the eager model's: the mean and the smallest. Rows of less than a tenth of the usual norm,
  whose direction is rounding, do not count; outputs of one value a row are one vector over all rows.
- agreement: rows whose largest entry along the last axis is the same. Every row counts where the labels name that
  axis; elsewhere (a row of 2 or more entries may be an embedding) rows whose two largest entries are half a standard
  deviation apart. Integers and bools: values that are equal.
- NaN or infinity where the eager model has none, and a dead output (one answer to all inputs where the eager model has
  several), fail whatever the figures are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from deployer.errors import DeployerError, RequestError, UsageError, first_line
from deployer.quantize.calibration import legal_cuts, rows_of, take_rows
from deployer.references import load_reference, source_sha256
from deployer.spec import Array, Arrays, ModelSpec, TensorSpec

Call = Callable[[Arrays], dict[str, Array]]

#: SQNR is reported between these: no noise at all is +DB_LIMIT, NaN or infinity is −DB_LIMIT
DB_LIMIT = 200.0
_SMALL_ROW = 0.1  # of the usual norm
_DECIDED = 0.5  # of an output's standard deviation
_DEAD = 0.01  # of the eager output's spread
_FLAT = 1e-4  # of an output's rms: an eager output that spreads less than this is constant itself


class Floors(msgspec.Struct, frozen=True):
    """What an INT8 artifact must reach. `cosine`, `row_cosine`, `sqnr_db` and `agreement` are over all scored inputs;
    `case_cosine` and `case_sqnr_db` are for one case of the gate or one request, which may be a single row."""

    cosine: float = 0.98
    row_cosine: float = 0.95
    sqnr_db: float = 13.0
    agreement: float = 0.98
    case_cosine: float = 0.95
    case_sqnr_db: float = 10.0

    def may_differ(self, total: int) -> int:
        """Of `total` rows or values, how many may disagree: one, or 2 % where that is more."""
        return max(1, math.floor((1 - self.agreement) * total + 1e-9))


FLOORS = Floors()


class Fidelity(msgspec.Struct, frozen=True):
    """One output against the eager model's; `agreement` None where it has no class axis, `agreed` of `judged` rows."""

    cosine: float
    row_cosine: float
    sqnr_db: float
    agreement: float | None = None
    judged: int = 0
    reason: str = ""


class Score(msgspec.Struct, frozen=True):
    """How a model answers: `sqnr_db` is the worst output's; `metric` None where no metric was given."""

    passed: bool
    reason: str
    sqnr_db: float
    outputs: dict[str, Fidelity]
    metric: float | None = None

    def __str__(self) -> str:
        told = [] if self.metric is None else [f"metric {self.metric:.4g}"]
        worst = min((entry.cosine for entry in self.outputs.values()), default=1.0)
        return ", ".join([*told, f"SQNR {self.sqnr_db:.1f} dB", f"cosine {worst:.4f}"])


# -------------------------------------------------------------------------------------------------------------- metric


@dataclass(frozen=True)
class Metric:
    """A user's function: it gets `predict` (named arrays → named arrays) and returns one number over its own labelled
    data, higher is better. `sha256` is its file's."""

    reference: str
    sha256: str
    function: Callable[[Call], Any]

    def measure(self, run: Call, spec: ModelSpec) -> float:
        """The number for `run`. Raises UsageError when the function fails, does not ask, or returns no number."""
        calls = 0

        def predict(arrays: Arrays) -> dict[str, Array]:
            nonlocal calls
            calls += 1
            return _in_legal_batches(run, spec, arrays)

        try:
            value = float(self.function(predict))
        except RequestError as error:
            raise UsageError(f"--metric '{self.reference}' asked for what the spec does not allow: {error}") from error
        except DeployerError:
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"--metric '{self.reference}' failed with {type(error).__name__}: {first_line(error)}; a function of "
                "predict(named arrays) that returns one number is expected"
            ) from error
        if calls == 0:
            raise UsageError(f"--metric '{self.reference}' never called predict, so it says nothing of any model")
        if not math.isfinite(value):
            raise UsageError(f"--metric '{self.reference}' returned {value}; a finite number is expected")
        return value


def load_metric(reference: str, folder: Path | None = None) -> Metric:
    """Import `module:function` or `path.py:function`; a relative path starts in `folder`. Raises ModelError."""
    return Metric(reference, source_sha256(reference, folder), load_reference(reference, folder))


def _in_legal_batches(run: Call, spec: ModelSpec, arrays: Arrays) -> dict[str, Array]:
    """`run` on arrays of any number of rows; RequestError for what the spec does not allow."""
    named = {name: np.asarray(array) for name, array in arrays.items()}
    if not spec.stackable or spec.batch is None or set(named) != {tensor.name for tensor in spec.inputs}:
        spec.check_inputs(named)
        return run(named)
    dim = spec.dims[spec.batch]
    fits = all(named[tensor.name].ndim == len(tensor.shape) for tensor in spec.inputs)
    rows = rows_of(spec, named) if fits else 0
    if rows <= dim.max:
        spec.check_inputs(named)
        return run(named)
    parts: dict[str, list[Array]] = {tensor.name: [] for tensor in spec.outputs}
    done = 0
    for piece in legal_cuts(rows, dim.min, dim.max):
        arguments = take_rows(spec, named, piece)
        spec.check_inputs(arguments)
        answer = run(arguments)
        for tensor in spec.outputs:
            new = range(done - piece.start, len(piece))
            parts[tensor.name].append(answer[tensor.name].take(list(new), axis=tensor.shape.index(spec.batch)))
        done = piece.stop
    return {
        tensor.name: np.concatenate(parts[tensor.name], axis=tensor.shape.index(spec.batch)) for tensor in spec.outputs
    }


# ------------------------------------------------------------------------------------------------------------ fidelity


class Scorer:
    """The eager model's answers, and what a quantized model is worth beside them.

    `eager`   runs the eager model; asked once for each of `inputs` and, with a metric, over the metric's own data
    """

    def __init__(
        self,
        spec: ModelSpec,
        inputs: Iterable[Arrays],
        eager: Call,
        *,
        metric: Metric | None = None,
        max_drop: float = 0.01,
        floors: Floors = FLOORS,
    ) -> None:
        self._spec = spec
        self._pairs = [(dict(arrays), eager(arrays)) for arrays in inputs]
        self._metric = metric
        self._max_drop = max_drop
        self._floors = floors
        #: the metric of the eager model, None without a metric
        self.before = metric.measure(eager, spec) if metric is not None else None

    def __call__(self, run: Call, *, with_metric: bool = True) -> Score:
        """Score `run`; `with_metric` False leaves the metric out. A model that fails outright has failed, with its
        error as the reason."""
        try:
            answers = [run(arrays) for arrays, _ in self._pairs]
            self._check_shapes(answers)
        except Exception as error:  # noqa: BLE001 - a quantized model may fail in any way; it is a verdict
            return Score(False, f"it fails with {type(error).__name__}: {first_line(error)}", -DB_LIMIT, {})
        outputs = {}
        for tensor in self._spec.outputs:
            pairs = [
                (got[tensor.name], expected[tensor.name])
                for got, (_, expected) in zip(answers, self._pairs, strict=True)
            ]
            outputs[tensor.name] = fidelity(pairs, tensor, self._spec, self._floors, judged=self._metric is None)
        sqnr_db = min((entry.sqnr_db for entry in outputs.values()), default=DB_LIMIT)
        reasons = [f"output '{name}': {entry.reason}" for name, entry in outputs.items() if entry.reason]
        value = None
        if with_metric and self._metric is not None and self.before is not None:
            value = self._metric.measure(run, self._spec)
            if (drop := self.before - value) > self._max_drop + 1e-12:
                reasons.insert(
                    0,
                    f"metric {value:.4g} against {self.before:.4g} in fp32, a drop of {drop:.4g} where "
                    f"{self._max_drop:g} is allowed",
                )
        return Score(not reasons, "; ".join(reasons), sqnr_db, outputs, value)

    def _check_shapes(self, answers: Sequence[Arrays]) -> None:
        for got, (arrays, _) in zip(answers, self._pairs, strict=True):
            self._spec.check_outputs(got, self._spec.check_inputs(arrays))


def fidelity(
    pairs: Sequence[tuple[Array, Array]],
    tensor: TensorSpec,
    spec: ModelSpec,
    floors: Floors = FLOORS,
    *,
    judged: bool = True,
) -> Fidelity:
    """One output over several (got, expected). With `judged` False the floors are left out (a metric decides): NaN,
    other shapes and dead outputs fail all the same."""
    for got, expected in pairs:
        if got.shape != expected.shape:
            told = f"{list(got.shape)} instead of {list(expected.shape)}"
            return Fidelity(0.0, 0.0, -DB_LIMIT, reason=f"it has the shape {told}")
    views = [(_real(got), _real(expected)) for got, expected in pairs]
    if views and views[0][1].dtype.kind != "f":
        return _equality(views, floors, judged=judged)
    misplaced = sum(int(np.count_nonzero(np.isfinite(expected) & ~np.isfinite(got))) for got, expected in views)
    if misplaced:
        return Fidelity(
            0.0, 0.0, -DB_LIMIT, reason=f"{misplaced} values are NaN or infinite, the eager model's are not"
        )
    rows = [
        (row.astype(np.float64), other.astype(np.float64))
        for got, expected in views
        for row, other in zip(_rows(got, tensor, spec), _rows(expected, tensor, spec), strict=True)
    ]
    signal, noise = _powers(rows)
    cosines = row_cosines(rows)
    agreed, judged_rows = _agreement(views, tensor, spec)
    found = Fidelity(
        cosine=float(np.mean(cosines)),
        row_cosine=float(np.min(cosines)),
        sqnr_db=decibels(signal, noise),
        agreement=agreed / judged_rows if judged_rows else None,
        judged=judged_rows,
    )
    reasons = [f"it is dead: {dead}"] if (dead := _dead(rows)) else []
    if judged:
        reasons += _below(found, judged_rows - agreed, floors)
    return msgspec.structs.replace(found, reason=", ".join(reasons))


def _below(found: Fidelity, flipped: int, floors: Floors) -> list[str]:
    reasons = []
    for name, value, floor, digits in (
        ("SQNR", found.sqnr_db, floors.sqnr_db, ".1f"),
        ("mean cosine", found.cosine, floors.cosine, ".4f"),
        ("smallest cosine of a row", found.row_cosine, floors.row_cosine, ".4f"),
    ):
        if not value >= floor:
            unit = " dB" if name == "SQNR" else ""
            reasons.append(f"{name} {value:{digits}}{unit}, the floor is {floor:g}{unit}")
    if found.judged and flipped > floors.may_differ(found.judged):
        reasons.append(
            f"{flipped} of {found.judged} rows have another largest entry, the floor is {floors.agreement:g}"
        )
    return reasons


def _equality(views: Sequence[tuple[Array, Array]], floors: Floors, *, judged: bool) -> Fidelity:
    total = sum(expected.size for _, expected in views)
    differ = sum(int(np.count_nonzero(got != expected)) for got, expected in views)
    agreement = 1 - differ / total if total else 1.0
    reason = ""
    if judged and differ > floors.may_differ(total):
        reason = f"{differ} of {total} values differ, the floor of equal ones is {floors.agreement:g}"
    return Fidelity(1.0, 1.0, decibels(1.0, differ / total if total else 0.0), agreement, total, reason)


def _real(array: Array) -> Array:
    return array if array.dtype.kind != "c" else np.stack([array.real, array.imag], axis=-1)


def _rows(array: Array, tensor: TensorSpec, spec: ModelSpec) -> list[Array]:
    """One vector a sample; a single one where the output has no batch axis."""
    axis = tensor.axis_of(spec.batch)
    if axis is None:
        return [array.ravel()]
    moved = np.moveaxis(array, axis, 0)
    return list(moved.reshape(moved.shape[0], -1)) if moved.size else []


def _powers(rows: Sequence[tuple[Array, Array]]) -> tuple[float, float]:
    """Mean squares of the eager values and of the differences, over values that are finite in both."""
    signal = noise = 0.0
    count = 0
    for got, expected in rows:
        both = np.isfinite(got) & np.isfinite(expected)
        signal += float(np.sum(expected[both] ** 2))
        noise += float(np.sum((got[both] - expected[both]) ** 2))
        count += int(both.sum())
    return (signal / count, noise / count) if count else (0.0, 0.0)


def decibels(signal: float, noise: float) -> float:
    """SQNR of two mean squares, within ±DB_LIMIT."""
    if noise <= 0.0:
        return DB_LIMIT
    if signal <= 0.0:
        return -DB_LIMIT
    return float(np.clip(10 * math.log10(signal / noise), -DB_LIMIT, DB_LIMIT)) if math.isfinite(noise) else -DB_LIMIT


def row_cosines(rows: Sequence[tuple[Array, Array]]) -> list[float]:
    """Cosines of the rows that have a direction; rows of one value are one vector."""
    pairs = [
        (np.where(np.isfinite(got), got, 0), np.where(np.isfinite(expected), expected, 0)) for got, expected in rows
    ]
    if not pairs or all(expected.size < 2 for _, expected in pairs):
        joined = (
            (np.concatenate([got for got, _ in pairs]), np.concatenate([one for _, one in pairs])) if pairs else None
        )
        pairs = [joined] if joined is not None else []
    norms = [float(np.linalg.norm(expected)) for _, expected in pairs]
    usual = math.sqrt(sum(norm**2 for norm in norms) / len(norms)) if norms else 0.0
    return [
        _cosine(got, expected)
        for (got, expected), norm in zip(pairs, norms, strict=True)
        if norm >= _SMALL_ROW * usual and norm > 0
    ] or [1.0]


def _cosine(got: Array, expected: Array) -> float:
    norms = float(np.linalg.norm(got)) * float(np.linalg.norm(expected))
    return float(np.dot(got, expected) / norms) if norms else 0.0


def _agreement(views: Sequence[tuple[Array, Array]], tensor: TensorSpec, spec: ModelSpec) -> tuple[int, int]:
    """(rows whose largest entry agrees, rows that count) of an output with a class axis; (0, 0) of others."""
    last = tensor.shape[-1] if tensor.shape else 0
    labelled = bool(spec.labels) and last == len(spec.labels)
    if not labelled and not (len(tensor.shape) == 2 and isinstance(last, int) and last >= 2):
        return 0, 0
    agreed = counted = 0
    for got, expected in views:
        if expected.size == 0 or expected.ndim == 0 or expected.shape[-1] < 2 or not np.isfinite(expected).all():
            continue
        values = expected.reshape(-1, expected.shape[-1]).astype(np.float64)
        best = np.sort(values, axis=-1)
        spread = float(np.sqrt(np.mean((values - values.mean(-1, keepdims=True)) ** 2)))
        counts = np.ones(len(values), bool) if labelled else best[:, -1] - best[:, -2] >= _DECIDED * spread
        if not labelled and spread == 0:
            continue
        same = np.argmax(got.reshape(values.shape), -1) == np.argmax(values, -1)
        agreed += int(np.count_nonzero(same & counts))
        counted += int(np.count_nonzero(counts))
    return agreed, counted


def _dead(rows: Sequence[tuple[Array, Array]]) -> str:
    """Why an output is dead: every row answered alike, where the eager model answers them differently. Or nothing."""
    if len(rows) < 2:
        return ""
    (first, eager_first), moved, eager_moved, size = rows[0], 0.0, 0.0, 0.0
    for got, expected in rows[1:]:
        if got.shape != first.shape:
            return ""
        with np.errstate(invalid="ignore"):
            moved = max(moved, float(np.nanmax(np.abs(got - first), initial=0.0)))
            eager_moved = max(eager_moved, float(np.nanmax(np.abs(expected - eager_first), initial=0.0)))
        size = max(size, float(np.abs(np.nan_to_num(expected, posinf=0, neginf=0)).max(initial=0.0)))
    if eager_moved > _FLAT * size and moved <= _DEAD * eager_moved:
        return f"it moves by {moved:.3g} between inputs between which the eager model's moves by {eager_moved:.3g}"
    return ""


# --------------------------------------------------------------------------------------------------------------- cases


class CaseFigures(msgspec.Struct, frozen=True):
    """One output of one case: `over_allowed` ≤ 1 passes."""

    reason: str
    cosine: float
    sqnr_db: float
    over_allowed: float


def judge_case(got: Array, expected: Array, floors: Floors = FLOORS, usual_scale: float = 0.0) -> CaseFigures:
    """A float output of one case, NaN and infinities already found in their places.

    The noise is held to the rms of the case or to `usual_scale` where that is more: steps of int8 have a fixed size,
    and a case that happens to answer near zero has no less noise than others. The cosine counts where the case has at
    least half of the usual scale and more than one value.
    """
    both = np.isfinite(got) & np.isfinite(expected)
    answer, reference = got[both].astype(np.float64), expected[both].astype(np.float64)
    own = float(np.sqrt(np.mean(reference**2))) if reference.size else 0.0
    noise = float(np.sqrt(np.mean((answer - reference) ** 2))) if reference.size else 0.0
    scale = max(own, usual_scale)
    sqnr_db = decibels(scale**2, noise**2)
    cosine = _cosine(answer, reference) if own > 0 else 1.0
    directed = reference.size > 1 and own > 0 and own >= usual_scale / 2
    over = 10 ** ((floors.case_sqnr_db - sqnr_db) / 20)
    if directed:
        over = max(over, (1 - cosine) / (1 - floors.case_cosine))
    reasons = []
    if sqnr_db < floors.case_sqnr_db:
        reasons.append(f"SQNR {sqnr_db:.1f} dB, the floor of a case is {floors.case_sqnr_db:g} dB")
    if directed and cosine < floors.case_cosine:
        reasons.append(f"cosine {cosine:.4f}, the floor of a case is {floors.case_cosine:g}")
    return CaseFigures(", ".join(reasons), cosine, sqnr_db, over)
