"""Which ids a model takes, found on the model itself: an id beyond the table must stay an error.

Formats differ there: eager PyTorch raises, ONNX and compiled code may take −1 for the last row without a word. So the
operators that look integer inputs up are watched, the range of each is read off the table's size, and the eager model
is asked at both ends and one beyond. Ranges that it confirms become `low` and `high` of the input's spec, which
the runtime enforces. What the user declared stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deployer.checkpoint.eager import call_on_tensors, run_eager
from deployer.errors import DeployerError, ModelError
from deployer.samples import sized_inputs
from deployer.spec import Array, Arrays, ModelSpec, TensorSpec
from deployer.validate.cases import is_mask, with_value

#: operator → position of the indices, of the table, of the dimension (None: rows of the table)
_LOOKUPS: dict[str, tuple[int, int, int | None]] = {
    "aten::embedding": (1, 0, None),
    "aten::_embedding_bag": (1, 0, None),
    "aten::_embedding_bag_forward_only": (1, 0, None),
    "aten::index_select": (2, 0, 1),
    "aten::gather": (2, 0, 1),
}


def with_id_ranges(model: nn.Module, spec: ModelSpec, samples: Arrays) -> ModelSpec:
    """`spec` with `low` and `high` filled in for integer inputs that look something up. Raises ModelError where the
    eager model fails within the range that the user declared."""
    base = sized_inputs(spec, samples, {name: dim.min for name, dim in spec.dims.items()})
    found = _lookups(model, spec, base)
    inputs = []
    for tensor in spec.inputs:
        if tensor.bounded:
            _check_declared(model, spec, base, tensor)
        elif tensor.name in found and not is_mask(samples[tensor.name]):
            tensor = _confirmed(model, spec, base, tensor, *found[tensor.name])
        inputs.append(tensor)
    return msgspec.structs.replace(spec, inputs=tuple(inputs))


def without_found_ranges(spec: ModelSpec, declared: ModelSpec) -> ModelSpec:
    """`spec` with only those ranges that `declared` has: what the two share says whether they are the same model."""
    own = {tensor.name: tensor for tensor in declared.inputs}
    inputs = tuple(
        msgspec.structs.replace(tensor, low=None, high=None)
        if tensor.name in own and not own[tensor.name].bounded
        else tensor
        for tensor in spec.inputs
    )
    return msgspec.structs.replace(spec, inputs=inputs)


class _Lookups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the legal range of every index tensor that holds an input's own values."""

    def __init__(self, integers: dict[str, Array]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._integers = integers
        self.ranges: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for indices, low, high in _looked_up(func, args):
            for name, array in self._integers.items():
                if indices.numel() == array.size and np.array_equal(indices.reshape(-1).cpu().numpy(), array.ravel()):
                    old = self.ranges.get(name, (low, high))
                    self.ranges[name] = (max(old[0], low), min(old[1], high))
        return func(*args, **(kwargs or {}))


def _looked_up(func: Any, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, int, int]]:
    """(indices, lowest, highest legal value) of one call."""
    name = func._schema.name
    if name == "aten::index" and len(args) > 1:
        for axis, indices in enumerate(args[1]):
            if isinstance(indices, Tensor) and not indices.is_floating_point() and indices.dtype != torch.bool:
                size = args[0].shape[axis]
                yield indices, -size, size - 1
    elif name in _LOOKUPS:
        at, table, dimension = _LOOKUPS[name]
        if len(args) > max(at, table):
            size = args[table].shape[args[dimension] if dimension is not None else 0]
            yield args[at], 0, size - 1


def _lookups(model: nn.Module, spec: ModelSpec, base: Arrays) -> dict[str, tuple[int, int]]:
    integers = {
        tensor.name: base[tensor.name] for tensor in spec.inputs if "int" in tensor.dtype and base[tensor.name].size
    }
    if not integers:
        return {}
    mode = _Lookups(integers)
    try:
        with mode:
            call_on_tensors(model, {name: torch.tensor(array) for name, array in base.items()})
    except DeployerError:  # a model that cannot run under the mode: the gate's own cases ask for −1 all the same
        return {}
    return mode.ranges


def _answers(model: nn.Module, spec: ModelSpec, base: Arrays, tensor: TensorSpec, value: int) -> bool:
    info = np.iinfo(tensor.dtype)
    if not info.min <= value <= info.max:
        return False
    try:
        run_eager(model, spec, {**base, tensor.name: with_value(base[tensor.name], value)})
    except DeployerError:
        return False
    return True


def _confirmed(model: nn.Module, spec: ModelSpec, base: Arrays, tensor: TensorSpec, low: int, high: int) -> TensorSpec:
    """The tensor with the ends of its range that the eager model confirms: it answers there and fails one beyond."""
    array = base[tensor.name]
    if low > int(array.min()) or high < int(array.max()):
        return tensor
    below = _answers(model, spec, base, tensor, low) and not _answers(model, spec, base, tensor, low - 1)
    above = _answers(model, spec, base, tensor, high) and not _answers(model, spec, base, tensor, high + 1)
    info = np.iinfo(tensor.dtype)
    return msgspec.structs.replace(
        tensor,
        low=low if below and low > info.min else None,
        high=high if above and high < info.max else None,
    )


def _check_declared(model: nn.Module, spec: ModelSpec, base: Arrays, tensor: TensorSpec) -> None:
    if "int" not in tensor.dtype:
        return
    for word, value in (("low", tensor.low), ("high", tensor.high)):
        if value is None:
            continue
        try:
            run_eager(model, spec, {**base, tensor.name: with_value(base[tensor.name], int(value))})
        except DeployerError as error:
            raise ModelError(
                f"input '{tensor.name}' declares {word} {value}, and the model fails there: {error}"
            ) from error
