"""What the gate asks: ordinary inputs at every size, stress inputs made of the samples, inputs that must be refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from deployer.samples import sized_inputs
from deployer.spec import Array, Arrays, ModelSpec, TensorSpec

_SEED = 20_261_130
_STRESS_ROWS = 3
_FLOATS = "floats "
_DENORMAL = 1e-40  # of float32: below the smallest normal number, 1.2e-38


@dataclass(frozen=True)
class Case:
    """An ordinary input: real samples at some sizes; `sizes` None stands for the samples as they are.

    `form` is `plain`, `scattered` (the same values at other strides) or `broadcast` (the first entry along one axis
    seen again and again, by a stride of 0).
    """

    name: str
    sizes: Mapping[str, int] | None
    form: str = "plain"

    @property
    def contiguous(self) -> bool:
        return self.form == "plain"

    def inputs(self, spec: ModelSpec, samples: Arrays) -> dict[str, Array]:
        arrays = dict(samples) if self.sizes is None else sized_inputs(spec, samples, self.sizes)
        if self.form == "scattered":
            return {name: scatter(array) for name, array in arrays.items()}
        if self.form == "broadcast":
            return {tensor.name: _broadcast(arrays[tensor.name], tensor, spec) for tensor in spec.inputs}
        return arrays


@dataclass(frozen=True)
class StressCase:
    """An input made of the samples that no sample looks like."""

    name: str
    arrays: Mapping[str, Array]


@dataclass(frozen=True)
class Refusal:
    """An input that the spec does not allow and the runtime must refuse. Its arrays take no memory of their size."""

    name: str
    arrays: Mapping[str, Array]


def scatter(array: Array) -> Array:
    """Equal values at other strides: every second element of a buffer twice as long."""
    return np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array


def _broadcast(array: Array, tensor: TensorSpec, spec: ModelSpec) -> Array:
    """The first entry along the batch axis (the first dynamic axis, else axis 0) at every place of it."""
    if array.ndim == 0:
        return array
    axis = tensor.axis_of(spec.batch)
    if axis is None:
        axis = next((axis for axis, size in enumerate(tensor.shape) if isinstance(size, str)), 0)
    first = array.take([0], axis=axis)
    return np.broadcast_to(first, array.shape)


def cases_for(spec: ModelSpec) -> list[Case]:
    """Real samples; each Dim at min, 2, 3, 7, typical, max with the others typical; all smallest; all largest;
    typical sizes broadcast, and in non-contiguous memory."""
    typical = {name: dim.typical for name, dim in spec.dims.items()}
    cases = [Case("samples", None)]
    sizings: list[dict[str, int]] = []
    for name, dim in spec.dims.items():
        sizings += [typical | {name: size} for size in dim.sizes()]
    sizings.append({name: dim.min for name, dim in spec.dims.items()})
    sizings.append({name: dim.max for name, dim in spec.dims.items()})
    if spec.dims:
        cases += [Case(label, sizes) for label, sizes in {label_of(sizes): sizes for sizes in sizings}.items()]
    cases.append(Case("broadcast", typical, "broadcast"))
    cases.append(Case("non-contiguous", typical, "scattered"))
    return cases


def label_of(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())


# -------------------------------------------------------------------------------------------------------------- stress


def stress_base(spec: ModelSpec, samples: Arrays) -> dict[str, Array]:
    """A few real rows at typical sizes, which the stress cases change."""
    sizes = {name: dim.typical for name, dim in spec.dims.items()}
    if spec.batch is not None:
        dim = spec.dims[spec.batch]
        sizes[spec.batch] = min(max(_STRESS_ROWS, dim.min), dim.max)
    return sized_inputs(spec, samples, sizes)


def stress_cases(spec: ModelSpec, samples: Arrays) -> list[StressCase]:
    """Large, tiny, zero, denormal and sign-flipped floats; each input's values in a seeded other order; masks in every
    pattern with wholly masked rows; ids at the ends of their range and one below zero. The same for the same samples.
    """
    base = stress_base(spec, samples)
    cases = [StressCase(name, base | changed) for name, changed in _float_patterns(spec, base)]
    for tensor in spec.inputs:
        array = base[tensor.name]
        patterns = [("shuffled", _shuffled(array)), *_integer_patterns(tensor, array)]
        if is_mask(samples[tensor.name]):
            patterns += _mask_patterns(array)
        cases += [StressCase(f"{tensor.name} {name}", base | {tensor.name: value}) for name, value in patterns]
    return cases


def is_mask(array: Array) -> bool:
    """Zeros and ones alone, with at least a one: a mask, as far as values tell."""
    return bool(array.size and array.any() and np.isin(array, (0, 1)).all())


def is_float_pattern(case: str) -> bool:
    """Whether a stress case, by its name, changes the size of all floats."""
    return case.startswith(_FLOATS)


def _float_patterns(spec: ModelSpec, base: Arrays) -> Iterator[tuple[str, dict[str, Array]]]:
    """All float inputs changed together."""
    floats = {tensor.name: base[tensor.name] for tensor in spec.inputs if tensor.dtype.startswith("float")}
    if floats:
        for name, changed in _scaled_floats(floats):
            yield name, {key: _clipped(array, spec.input(key)) for key, array in changed.items()}


def _clipped(array: Array, tensor: TensorSpec) -> Array:
    """Held to the declared range of values."""
    return np.clip(array, tensor.low, tensor.high).astype(array.dtype) if tensor.bounded else array


def _scaled_floats(floats: Arrays) -> Iterator[tuple[str, dict[str, Array]]]:
    for name, factor in (("×1000", 1e3), ("×1e-6", 1e-6), ("zeros", 0.0), ("sign flipped", -1.0)):
        with np.errstate(over="ignore"):
            scaled = {key: (array * array.dtype.type(factor)).astype(array.dtype) for key, array in floats.items()}
        if all(np.isfinite(array).all() for array in scaled.values()):
            yield f"{_FLOATS}{name}", scaled
    yield (
        f"{_FLOATS}denormal",
        {
            key: (array / max(float(np.abs(array).max(initial=0)), 1e-30) * _DENORMAL).astype(array.dtype)
            for key, array in floats.items()
        },
    )
    yield (
        f"{_FLOATS}of mixed magnitude",
        {
            key: (array * np.resize(np.array([1, 30, 1e-3, 1], array.dtype), array.shape)).astype(array.dtype)
            for key, array in floats.items()
            if array.dtype != np.float16
        },
    )


def _shuffled(array: Array) -> Array:
    return np.random.default_rng(_SEED).permutation(array.ravel()).reshape(array.shape)


def _integer_patterns(tensor: TensorSpec, array: Array) -> list[tuple[str, Array]]:
    if array.dtype.kind not in "iu" or not array.size or is_mask(array):
        return []
    narrow = np.iinfo(array.dtype) if array.dtype.itemsize == 1 else None
    low = int(tensor.low) if tensor.low is not None else (int(narrow.min) if narrow else None)
    high = int(tensor.high) if tensor.high is not None else (int(narrow.max) if narrow else None)
    patterns = [("at its lowest", low), ("at its highest", high)]
    if low is None and array.dtype.kind == "i":
        patterns.append(("below zero", -1))
    return [(name, with_value(array, value)) for name, value in patterns if value is not None]


def with_value(array: Array, value: int) -> Array:
    """`array` with `value` at the first place of every row (of its only place, for a scalar)."""
    changed = array.copy()
    changed[..., 0 if array.ndim else ()] = value
    return changed


def _mask_patterns(array: Array) -> list[tuple[str, Array]]:
    ones, zeros = np.ones_like(array), np.zeros_like(array)
    patterns = [("all set", ones), ("nothing set", zeros)]
    if array.ndim == 0:
        return patterns
    columns = np.arange(array.shape[-1])
    row_off = ones.copy()
    row_off[0] = 0
    patterns.append(("first row off", row_off))
    patterns.append(("holes", (ones * (columns % 2 == 0)).astype(array.dtype)))
    patterns.append(("last alone", (ones * (columns == array.shape[-1] - 1)).astype(array.dtype)))
    return patterns


# ------------------------------------------------------------------------------------------------------------ refusals


def refusals_for(spec: ModelSpec) -> list[Refusal]:
    """Each Dim one beyond its max and one below its min, each input in another dtype, missing, beside an unknown one,
    and outside its declared values."""
    typical = {name: dim.typical for name, dim in spec.dims.items()}
    legal = _hollow(spec, typical)
    found = []
    for name, dim in spec.dims.items():
        found.append(Refusal(f"{name}={dim.max + 1}", _hollow(spec, typical | {name: dim.max + 1})))
        found.append(Refusal(f"{name}={dim.min - 1}", _hollow(spec, typical | {name: dim.min - 1})))
    for tensor in spec.inputs:
        other = "float32" if tensor.dtype != "float32" else "float64"
        wrong = np.broadcast_to(np.zeros((), other), legal[tensor.name].shape)
        found.append(Refusal(f"{tensor.name} as {other}", legal | {tensor.name: wrong}))
        rest = {name: array for name, array in legal.items() if name != tensor.name}
        found.append(Refusal(f"without {tensor.name}", rest))
        for value in _illegal_values(tensor):
            outside = np.broadcast_to(np.array(value, tensor.dtype), legal[tensor.name].shape)
            found.append(Refusal(f"{tensor.name} of {value}", legal | {tensor.name: outside}))
    unknown = "not_an_input"
    found.append(Refusal(f"with {unknown}", legal | {unknown: np.zeros(1, np.float32)}))
    return found


def _hollow(spec: ModelSpec, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Inputs of these sizes that hold one legal number, seen everywhere."""
    return {
        tensor.name: np.broadcast_to(
            np.array(_legal_value(tensor), tensor.dtype),
            tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape),
        )
        for tensor in spec.inputs
    }


def _legal_value(tensor: TensorSpec) -> int | float:
    """Zero, or the end of the declared range that is nearest to it."""
    low = tensor.low if tensor.low is not None else 0
    high = tensor.high if tensor.high is not None else 0
    return max(low, min(high, 0)) if tensor.bounded else 0


def _illegal_values(tensor: TensorSpec) -> list[int | float]:
    """Values one outside the declared range, as far as the dtype can hold them."""
    values = [tensor.low - 1] if tensor.low is not None else []
    values += [tensor.high + 1] if tensor.high is not None else []
    if tensor.dtype.startswith("float"):
        return list(values)
    limits = (0, 1) if tensor.dtype == "bool" else (np.iinfo(tensor.dtype).min, np.iinfo(tensor.dtype).max)
    return [value for value in values if limits[0] <= value <= limits[1]]
