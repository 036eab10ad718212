"""Do requests that share a run keep their answers? Every row alone against the same row in a batch, on the eager model.

Rows are also put beside extreme neighbours: a branch on a sum over the batch, a maximum, a batch statistic show there.
A difference within rounding is noise, and is measured; anything more, and the model is served one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from deployer.errors import DeployerError
from deployer.samples import resize, sized_inputs
from deployer.spec import ANY, Array, Arrays, ModelSpec, TensorSpec
from deployer.validate.cases import is_mask
from deployer.validate.compare import NOISE_CEILING, NOISE_FACTOR, TOLERANCES, difference, real_view, rms

Run = Callable[[Arrays], dict[str, Array]]

_ROWS_TRIED = 64
_NOISE_FLOOR = 1e-4  # of an output's scale: row noise of deep models, whose inputs may hold nothing to nudge
_LOUD = 1e3
#: of an output's rms: by how much (rms over the row) neighbours may move a row's answer in INT8. A float that rounds to
#: the other side of a step moves by one of 256 steps; ranges taken over the whole batch move every value.
INT8_ROW_SHARE = 0.03


@dataclass(frozen=True)
class Batching:
    """`independent` False comes with a `reason`; `noise` is by output, a row alone against itself in a batch."""

    independent: bool
    reason: str = ""
    noise: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Difference:
    """How one output of one row differs; `apart` None for another shape."""

    output: str
    row: int
    apart: float | None
    scale: float
    shapes: str = ""

    def __str__(self) -> str:
        if self.apart is None:
            return f"output '{self.output}' of row {self.row} is {self.shapes}"
        share = f", {self.apart / self.scale:.2g} times its rms" if self.scale else ""
        return f"output '{self.output}' of row {self.row} differs by {self.apart:.3g}{share}"


def why_not_stackable(spec: ModelSpec) -> str:
    """Why the spec alone rules out that requests share a run, or nothing."""
    if spec.batch is None:
        return "the spec declares no batch axis"
    for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        for tensor in tensors:
            if tensor.axis_of(spec.batch) is None:
                by_data = " (as many rows as the data decides)" if ANY in tensor.shape else ""
                return f"{kind} '{tensor.name}' has no batch axis '{spec.batch}'{by_data}"
    if spec.dims[spec.batch].min > 1:
        return f"the smallest '{spec.batch}' is {spec.dims[spec.batch].min}, so no row can be run alone to compare"
    return ""


def measure_batching(run: Run, spec: ModelSpec, samples: Arrays, noise: Mapping[str, float]) -> Batching:
    """Run the eager model on every row of the samples (64 at most) alone, in a batch, and beside loud neighbours.

    `noise` is what the outputs move by when inputs move by one ulp.
    """
    if reason := why_not_stackable(spec):
        return Batching(False, reason)
    batch = spec.batch or ""
    dim = spec.dims[batch]
    sample_rows = _rows_of(spec, samples)
    rows = min(max(sample_rows, 2), dim.max, _ROWS_TRIED)
    sizes = {name: other.typical for name, other in spec.dims.items()} | {batch: rows}
    arrays = sized_inputs(spec, samples, sizes)
    try:
        together = run(arrays)
        alone = [run(row_of(arrays, spec, row)) for row in range(rows)]
    except DeployerError as error:
        return Batching(False, f"the rows of a batch cannot be run alone: {error}")
    limits = {name: _limit(array, noise.get(name, 0.0)) for name, array in together.items()}
    differences = _differences(spec, alone, together, range(rows))
    if found := _beyond(differences, limits, together, spec):
        hint = _hint(run, spec, arrays)
        return Batching(False, f"a row in a batch of {rows} is not answered as alone: {found}{hint}")
    reason = _beside_loud_neighbours(run, spec, arrays, alone, limits)
    measured = {tensor.name: 0.0 for tensor in spec.outputs}
    for entry in differences:
        if entry.apart is not None and together[entry.output].dtype.kind == "f":
            measured[entry.output] = max(measured[entry.output], entry.apart)
    return Batching(not reason, reason, measured)


def measure_int8_batching(run: Run, spec: ModelSpec, samples: Arrays) -> Batching:
    """As `measure_batching`, on an INT8 artifact: a row alone may differ from itself in a batch, of samples or beside
    loud neighbours, by INT8_ROW_SHARE of the output's rms."""
    if reason := why_not_stackable(spec):
        return Batching(False, reason)
    batch = spec.batch or ""
    rows = min(max(_rows_of(spec, samples), 2), spec.dims[batch].max, _ROWS_TRIED)
    sizes = {name: other.typical for name, other in spec.dims.items()} | {batch: rows}
    arrays = sized_inputs(spec, samples, sizes)
    loud = {tensor.name: _loud_rows(arrays[tensor.name], tensor.shape.index(batch)) for tensor in spec.inputs}
    try:
        alone = [run(row_of(arrays, spec, row)) for row in range(rows)]
        if worst := _worst_share(run(arrays), alone, spec, range(rows)):
            return Batching(False, f"INT8: a row in a batch of {rows} is not answered as alone: {worst}")
    except DeployerError as error:
        return Batching(False, f"the rows of a batch cannot be run alone: {error}")
    try:
        worst = _worst_share(run(loud), alone, spec, range(0, rows, 2))
    except DeployerError:
        worst = ""  # as above: it says nothing of the neighbours
    return Batching(not worst, f"INT8: a row is answered otherwise beside extreme neighbours: {worst}" if worst else "")


def _worst_share(together: Arrays, alone: list[dict[str, Array]], spec: ModelSpec, rows: range) -> str:
    """The output and row that differ most, where they differ by more than INT8_ROW_SHARE; or nothing."""
    worst, told = INT8_ROW_SHARE, ""
    for tensor in spec.outputs:
        axis = tensor.shape.index(spec.batch or "")
        usual = rms(np.concatenate([alone[row][tensor.name].ravel() for row in rows]))
        for row in rows:
            got, expected = alone[row][tensor.name], together[tensor.name].take([row], axis=axis)
            if got.shape != expected.shape:
                return f"output '{tensor.name}' of row {row} is {list(got.shape)} and {list(expected.shape)}"
            if got.dtype.kind not in "fc":
                continue  # an index that ties is no sign; the scores that it ranks are
            share = rms(real_view(got).astype(np.float64) - real_view(expected)) / usual if usual else 0.0
            if difference(got, expected) == float("inf"):
                share = float("inf")
            if share > worst:
                worst, told = share, f"output '{tensor.name}' of row {row} moves by {share:.2g} of its rms"
    return told


def _rows_of(spec: ModelSpec, samples: Arrays) -> int:
    first = spec.inputs[0]
    return int(samples[first.name].shape[first.shape.index(spec.batch or "")])


def _limit(array: Array, noise: float) -> float:
    """What counts as rounding, absolute: as for an artifact, or what nudged inputs do, up to the ceiling."""
    if array.dtype.kind not in "fc":
        return 0.0
    scale = rms(array)
    return max(_NOISE_FLOOR * scale, NOISE_FACTOR * min(noise, NOISE_CEILING * scale), 1e-30)


def _differences(spec: ModelSpec, alone: list[dict[str, Array]], together: Arrays, rows: range) -> list[_Difference]:
    found = []
    for row in rows:
        for tensor in spec.outputs:
            whole = together[tensor.name]
            if row >= whole.shape[tensor.shape.index(spec.batch or "")]:
                found.append(_Difference(tensor.name, row, None, 0.0, "absent from the batch's answer"))
                continue
            expected, got = take_row(whole, tensor, spec.batch or "", row), alone[row][tensor.name]
            if expected.shape != got.shape:
                shapes = f"{list(got.shape)} alone and {list(expected.shape)} in the batch"
                found.append(_Difference(tensor.name, row, None, 0.0, shapes))
                continue
            found.append(_Difference(tensor.name, row, difference(got, expected), rms(whole)))
    return found


def _beyond(
    differences: list[_Difference], limits: Mapping[str, float], together: Arrays, spec: ModelSpec
) -> _Difference | None:
    """The worst difference that is more than rounding, or None. Single elements may differ by rtol as an artifact's."""
    rtol = TOLERANCES["fp32"].rtol
    beyond = []
    for entry in differences:
        if entry.apart is None:
            return entry
        tensor = next(tensor for tensor in spec.outputs if tensor.name == entry.output)
        row = take_row(together[entry.output], tensor, spec.batch or "", entry.row)
        finite = row[np.isfinite(row)] if row.dtype.kind == "f" else np.zeros(0)
        limit = limits[entry.output] + (rtol * float(np.abs(finite).max(initial=0.0)) if row.dtype.kind == "f" else 0.0)
        if entry.apart > limit:
            beyond.append(entry)
    return max(beyond, key=lambda entry: entry.apart or 0.0, default=None)


def _beside_loud_neighbours(
    run: Run, spec: ModelSpec, arrays: Arrays, alone: list[dict[str, Array]], limits: Mapping[str, float]
) -> str:
    """Odd rows made extreme; the even ones must not notice. Returns the reason, or nothing."""
    batch = spec.batch or ""
    loud = {tensor.name: _loud_rows(arrays[tensor.name], tensor.shape.index(batch)) for tensor in spec.inputs}
    if all(np.array_equal(loud[name], arrays[name]) for name in loud):
        return ""
    try:
        together = run(loud)
    except DeployerError:
        return ""  # an extreme row that the model cannot answer at all says nothing of its neighbours
    rows = range(0, len(alone), 2)
    found = _beyond(_differences(spec, alone, together, rows), limits, together, spec)
    return f"a row is answered otherwise beside extreme neighbours: {found}" if found else ""


def _loud_rows(array: Array, axis: int) -> Array:
    """Odd rows along `axis`: floats a thousand times larger, masks empty, other integers reversed."""
    rows = np.moveaxis(array.copy(), axis, 0)
    odd = rows[1::2]
    if is_mask(array):
        rows[1::2] = 0
    elif array.dtype.kind == "f" and array.dtype != np.float16:
        rows[1::2] = odd * array.dtype.type(_LOUD)
    elif rows.ndim > 1:
        rows[1::2] = odd[..., ::-1]
    return np.ascontiguousarray(np.moveaxis(rows, 0, axis))


def row_of(arrays: Arrays, spec: ModelSpec, row: int) -> dict[str, Array]:
    """Row `row` of every input, as a batch of one."""
    return {tensor.name: take_row(arrays[tensor.name], tensor, spec.batch or "", row) for tensor in spec.inputs}


def take_row(array: Array, tensor: TensorSpec, batch: str, row: int) -> Array:
    """Row `row` along the batch axis, which stays in place with size 1."""
    axis = tensor.axis_of(batch)
    assert axis is not None  # noqa: S101 - callers hold spec.stackable
    return array.take([row], axis=axis)


# --------------------------------------------------------------------------------------------------------------- hints


def _hint(run: Run, spec: ModelSpec, arrays: Arrays) -> str:
    """`; declare the batch on axis 1` where the model does keep the entries of another axis apart, or nothing."""
    declared = {tensor.shape.index(spec.batch or "") for tensor in spec.inputs}
    for axis in range(min(array.ndim for array in arrays.values())):
        if axis not in declared and _keeps_apart(run, spec, arrays, axis):
            return (
                f"; it keeps the entries of axis {axis} apart: if those are the batch, declare the batch on axis {axis}"
            )
    return ""


def _keeps_apart(run: Run, spec: ModelSpec, arrays: Arrays, axis: int) -> bool:
    """True when each entry along `axis` of all inputs is answered alone as among three, at some axis of each output."""
    three = {name: resize(array, axis, 3, distinct=True) for name, array in arrays.items()}
    try:
        together = run(three)
        alone = [run({name: array.take([entry], axis=axis) for name, array in three.items()}) for entry in range(3)]
    except DeployerError:
        return False
    return all(_same_at_some_axis(together[name], [one[name] for one in alone]) for name in together)


def _same_at_some_axis(together: Array, alone: list[Array]) -> bool:
    for axis in range(together.ndim):
        if together.shape[axis] != len(alone):
            continue
        entries = [together.take([entry], axis=axis) for entry in range(len(alone))]
        same_shape = all(one.shape == other.shape for one, other in zip(entries, alone, strict=True))
        if same_shape and all(
            difference(one, other) <= _limit(together, 0.0) for one, other in zip(entries, alone, strict=True)
        ):
            return True
    return False
