"""What a model takes and gives: names, dtypes, shapes, dynamic axes.

A shape is a tuple of ints and of names of Dims; the Dims themselves stand once, in `ModelSpec.dims`, so that two
tensors which share an axis cannot disagree about it. The batch axis of a tensor is where the Dim named by
`ModelSpec.batch` stands in its shape: axis 0 or any other, or nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from deployer.errors import RequestError, SpecError, nearest

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

#: dtypes that cross every border (numpy, torch, ONNX, JSON) unchanged
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")

#: an output axis whose size follows from the data or from arithmetic on a Dim, and is not checked
ANY = "?"


class Dim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named dynamic axis. `typical` is the size to tune for; sizes outside min..max are refused."""

    min: int = 1
    typical: int = 8
    max: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.typical <= self.max:
            raise SpecError(
                f"a dynamic axis needs 1 ≤ min ≤ typical ≤ max, got min={self.min}, "
                f"typical={self.typical}, max={self.max}"
            )

    def sizes(self) -> list[int]:
        """The sizes that the gate tries: min, 2, 3, 7, typical, max, as far as they are legal; ascending."""
        return sorted({size for size in (self.min, 2, 3, 7, self.typical, self.max) if self.min <= size <= self.max})


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One named input or output. `low` and `high` are the smallest and largest value that an input may hold, both
    included: ids of a vocabulary, say. An artifact may answer an id of -1 with the last row, and no error."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    low: int | float | None = None
    high: int | float | None = None

    def __post_init__(self) -> None:
        if not self.name.replace(".", "_").isidentifier():
            raise SpecError(f"tensor name '{self.name}' is not an identifier; use letters, digits and _")
        if self.dtype not in DTYPES:
            raise SpecError(
                f"'{self.name}' has dtype {self.dtype}, which no format here carries{nearest(self.dtype, DTYPES)}"
            )
        for size in self.shape:
            if isinstance(size, int) and size < 0:
                raise SpecError(f"'{self.name}' has the negative size {size} in its shape; name a dynamic axis instead")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise SpecError(f"'{self.name}' allows values from {self.low} to {self.high}, which is none")

    def axis_of(self, dim: str | None) -> int | None:
        """The axis along which this tensor has the Dim `dim`, or None."""
        return self.shape.index(dim) if dim is not None and dim in self.shape else None

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]{self.range_text()}"

    @property
    def bounded(self) -> bool:
        return self.low is not None or self.high is not None

    def range_text(self) -> str:
        """ " from 0 to 9", or what of it is declared."""
        parts = (("from", self.low), ("to", self.high))
        return "".join(f" {word} {value}" for word, value in parts if value is not None)


#: names that are a folder's, a file's and a URL's part: no separators, no leading dot
_URL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Inputs, outputs and dynamic axes of one model; `batch` names the Dim along which requests are stacked, `masks` by
    Dim the input whose zeros switch positions along it off."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...] = ()
    dims: dict[str, Dim] = {}
    batch: str | None = None
    version: str = "1.0"
    labels: tuple[str, ...] = ()
    masks: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not _URL_NAME.fullmatch(self.version):
            raise SpecError(
                f"version '{self.version}' is not usable in a path and a URL; use letters, digits, '-', '_', '.'"
            )
        if not _URL_NAME.fullmatch(self.name):
            raise SpecError(
                f"model name '{self.name}' is not usable in a path and a URL; use letters, digits, '-', '_', '.'"
            )
        if not self.inputs:
            raise SpecError("a model needs at least one input")
        for kind, tensors in (("input", self.inputs), ("output", self.outputs)):
            names = [tensor.name for tensor in tensors]
            if len(set(names)) != len(names):
                raise SpecError(f"two {kind}s have the same name: {', '.join(names)}")
        for tensor in (*self.inputs, *self.outputs):
            named = [size for size in tensor.shape if isinstance(size, str) and size != ANY]
            for dim in named:
                if dim not in self.dims:
                    raise SpecError(
                        f"'{tensor.name}' uses the axis '{dim}', which dims does not declare{nearest(dim, self.dims)}"
                    )
            if self.batch and named.count(self.batch) > 1:
                raise SpecError(f"'{tensor.name}' has the batch axis '{self.batch}' twice")
        for tensor in self.inputs:
            if ANY in tensor.shape:
                raise SpecError(f"input '{tensor.name}' has an axis '{ANY}'; give it a size or a named dynamic axis")
        if self.batch is not None and self.batch not in self.dims:
            raise SpecError(f"the batch axis '{self.batch}' is not among dims{nearest(self.batch, self.dims)}")
        self._check_labels()
        self._check_masks()
        unused = set(self.dims) - {size for tensor in self.inputs for size in tensor.shape}
        if unused:
            raise SpecError(f"no input has the dynamic axis '{sorted(unused)[0]}'; remove it from dims")

    def _check_labels(self) -> None:
        """Labels name the classes along the last axis of an output; labels that fit none would be dropped silently."""
        if not self.labels or not self.outputs:
            return
        if not any(tensor.shape[-1:] == (len(self.labels),) for tensor in self.outputs):
            raise SpecError(
                f"{len(self.labels)} labels fit no output: {', '.join(map(str, self.outputs))}; "
                "give one label for each entry of an output's last axis"
            )

    def _check_masks(self) -> None:
        names = [tensor.name for tensor in self.inputs]
        for dim, mask in self.masks.items():
            if dim not in self.dims or dim == self.batch:
                raise SpecError(f"masks names '{dim}', which is no dynamic axis of requests{nearest(dim, self.dims)}")
            if mask not in names:
                raise SpecError(f"the mask '{mask}' of '{dim}' is no input{nearest(mask, names)}")
            if dim not in self.input(mask).shape:
                raise SpecError(f"the mask {self.input(mask)} has no axis '{dim}', whose positions it is to switch off")

    def input(self, name: str) -> TensorSpec:
        return next(tensor for tensor in self.inputs if tensor.name == name)

    @cached_property
    def stackable(self) -> bool:
        """True when every input and output has the batch axis, so that requests can share one run."""
        return self.batch is not None and all(
            tensor.axis_of(self.batch) is not None for tensor in (*self.inputs, *self.outputs)
        )

    @cached_property
    def batch_axes(self) -> dict[str, int]:
        """The batch axis of each input and output that has one, by name."""
        axes = {tensor.name: tensor.axis_of(self.batch) for tensor in (*self.inputs, *self.outputs)}
        return {name: axis for name, axis in axes.items() if axis is not None}

    def check_inputs(self, arrays: Arrays) -> dict[str, int]:
        """Hold named arrays to this spec; returns the size of each Dim.

        Raises RequestError that names the input at fault, what was expected and what arrived.
        """
        expected_names = [tensor.name for tensor in self.inputs]
        for name in arrays:
            if name not in expected_names:
                raise RequestError(
                    f"unknown input '{name}'{nearest(name, expected_names)}", field=name,
                    expected=", ".join(expected_names), got=name,
                )  # fmt: skip
        sizes: dict[str, int] = {}
        for tensor in self.inputs:
            if tensor.name not in arrays:
                raise RequestError(
                    f"input '{tensor.name}' is missing; expected {tensor}", field=tensor.name,
                    expected=str(tensor), got=", ".join(arrays) or "nothing",
                )  # fmt: skip
            self._check_input(tensor, arrays[tensor.name], sizes)
        return sizes

    def _check_input(self, tensor: TensorSpec, array: Array, sizes: dict[str, int]) -> None:
        def refuse(reason: str) -> RequestError:
            got = f"{array.dtype.name}{list(array.shape)}"
            return RequestError(
                f"input '{tensor.name}' {reason}: expected {tensor}, got {got}",
                field=tensor.name, expected=str(tensor), got=got,
            )  # fmt: skip

        if array.dtype != numpy_dtype(tensor.dtype) and array.dtype.name != tensor.dtype:  # names take long to make
            raise refuse("has the wrong dtype")
        if array.ndim != len(tensor.shape):
            raise refuse("has the wrong number of axes")
        for axis, (size, expected) in enumerate(zip(array.shape, tensor.shape, strict=True)):
            if isinstance(expected, int):
                if size != expected:
                    raise refuse(f"has size {size} on axis {axis} instead of {expected}")
                continue
            dim = self.dims[expected]
            if not dim.min <= size <= dim.max:
                raise refuse(f"has size {size} on axis {axis} ('{expected}', allowed {dim.min} to {dim.max})")
            if sizes.setdefault(expected, size) != size:
                raise refuse(f"has size {size} on axis {axis} where another input has {expected}={sizes[expected]}")
        if tensor.low is None and tensor.high is None:
            return
        inside = np.ones(array.shape, dtype=bool)  # comparisons so that NaN is outside of every range
        if tensor.low is not None:
            inside &= array >= tensor.low
        if tensor.high is not None:
            inside &= array <= tensor.high
        if not inside.all():
            where = np.argwhere(~inside)[0]
            raise refuse(
                f"holds {array[tuple(where)]} at index {where.tolist()}, allowed are values{tensor.range_text()}"
            )

    def check_outputs(self, arrays: Arrays, sizes: Mapping[str, int]) -> None:
        """Hold what an artifact answered to this spec. Raises SpecError naming the output."""
        names = [tensor.name for tensor in self.outputs]
        if sorted(arrays) != sorted(names):
            raise SpecError(f"outputs {sorted(arrays)} instead of {sorted(names)}")
        for tensor in self.outputs:
            array = arrays[tensor.name]
            expected = [sizes.get(size, size) if isinstance(size, str) else size for size in tensor.shape]
            fits = array.ndim == len(expected) and all(
                want in (ANY, size) for want, size in zip(expected, array.shape, strict=True)
            )
            if not fits or (array.dtype != numpy_dtype(tensor.dtype) and array.dtype.name != tensor.dtype):
                raise SpecError(f"output {tensor} came as {array.dtype.name}{list(array.shape)} at {dict(sizes)}")


def decode_spec(data: Any) -> ModelSpec:
    """A ModelSpec from parsed JSON or YAML. Raises SpecError with the path of the fault."""
    try:
        return msgspec.convert(data, ModelSpec)
    except msgspec.ValidationError as error:
        raise SpecError(f"spec: {error}") from error


def in_c_order(array: Array) -> Array:
    """`array` itself or a contiguous copy. Scalars stay scalars (np.ascontiguousarray makes them one-dimensional)."""
    return np.asarray(array, order="C")


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(name)
