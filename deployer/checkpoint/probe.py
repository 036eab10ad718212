"""Reading a spec off a model: run it at several sizes and see which axes follow which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from deployer.checkpoint.eager import call_model, flatten_outputs
from deployer.errors import ModelError
from deployer.samples import resize, sized_inputs
from deployer.spec import ANY, DTYPES, Array, Arrays, Dim, ModelSpec, TensorSpec

_DEFAULT_BATCH = Dim(min=1, typical=8, max=64)


def probe_outputs(model: nn.Module, spec: ModelSpec, samples: Arrays) -> ModelSpec:
    """`spec` with its outputs filled in, each axis named after the Dim whose size it follows.

    An axis that follows a Dim without being equal to it (a strided sequence, say) becomes "?". Raises ModelError.
    """
    base = _distinct_sizes(spec)
    shapes = _output_shapes(model, spec, samples, base)
    axes: dict[str, list[int | str]] = {name: list(shape) for name, (_, shape) in shapes.items()}
    for dim, size in base.items():
        for other_size in _other_sizes(spec.dims[dim], size):
            changed = _output_shapes(model, spec, samples, base | {dim: other_size})
            for name, (_, shape) in changed.items():
                if name not in axes or len(shape) != len(axes[name]):
                    raise ModelError(f"output '{name}' changes its number of axes with '{dim}'; return a fixed rank")
                for axis, (before, after) in enumerate(zip(shapes[name][1], shape, strict=True)):
                    if before != after:
                        follows = (before, after) == (size, other_size) and axes[name][axis] in (before, dim)
                        axes[name][axis] = dim if follows else ANY
    outputs = tuple(TensorSpec(name, dtype, tuple(axes[name])) for name, (dtype, _) in shapes.items())
    return ModelSpec(
        spec.name,
        spec.inputs,
        outputs,
        dims=spec.dims,
        batch=spec.batch,
        version=spec.version,
        labels=spec.labels,
        masks=spec.masks,
    )


def _distinct_sizes(spec: ModelSpec) -> dict[str, int]:
    """A size for each Dim, small and, where the ranges allow it, no two alike."""
    sizes: dict[str, int] = {}
    for name, dim in spec.dims.items():
        free = (size for size in range(max(dim.min, 2), dim.max + 1) if size not in sizes.values())
        sizes[name] = next(free, dim.max)
    return sizes


def _other_sizes(dim: Dim, size: int) -> list[int]:
    """Legal sizes other than `size`: a near one, and one far enough for a stride to show. Empty for a fixed axis."""
    return sorted({max(dim.min, size - 1), min(dim.max, size + 1), min(dim.max, 2 * size + 1)} - {size})


def _output_shapes(
    model: nn.Module, spec: ModelSpec, samples: Arrays, sizes: Mapping[str, int]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = flatten_outputs(call_model(model, sized_inputs(spec, samples, sizes)))
    result = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ModelError(
                f"output '{name}' is {dtype}, which ONNX, numpy or JSON cannot carry; return it as "
                + ("a real view (torch.view_as_real)" if tensor.is_complex() else f"one of {', '.join(DTYPES)}"),
                reason="unsupported_output",
            )
        result[name] = (dtype, tuple(tensor.shape))
    return result


def probe_spec(model: nn.Module, name: str, samples: Arrays) -> tuple[ModelSpec, list[str]]:
    """A spec guessed from samples alone, proved by running the model at other sizes, and notes for the user.

    Axis 0 is taken for the batch when every input has the same size there and the model runs at other sizes.
    Further axes of integer inputs (token sequences) become dynamic when the model runs at another size; such axes of
    float inputs stay fixed, since an image size that happens to work is seldom one that is meant.
    """
    shapes: dict[str, list[int | str]] = {key: list(array.shape) for key, array in samples.items()}
    dims: dict[str, Dim] = {}
    notes: list[str] = []
    batch = None
    if all(array.ndim > 0 for array in samples.values()) and len({array.shape[0] for array in samples.values()}) == 1:
        if all(_runs(model, {key: resize(array, 0, size) for key, array in samples.items()}) for size in (1, 2, 3)):
            batch = "batch"
            dims[batch] = _DEFAULT_BATCH
            for shape in shapes.values():
                shape[0] = batch
        else:
            notes.append("the model does not run at batch sizes 1, 2 and 3: axis 0 was left fixed")
    _probe_sequences(model, samples, shapes, dims, notes)
    inputs = tuple(TensorSpec(key, array.dtype.name, tuple(shapes[key])) for key, array in samples.items())
    spec = ModelSpec(name, inputs, dims=dims, batch=batch)
    return probe_outputs(model, spec, samples), notes


def _probe_sequences(
    model: nn.Module,
    samples: Arrays,
    shapes: dict[str, list[int | str]],
    dims: dict[str, Dim],
    notes: list[str],
) -> None:
    by_size: dict[tuple[int, int], list[str]] = {}
    for key, array in samples.items():
        for axis in range(1, array.ndim):
            by_size.setdefault((axis, array.shape[axis]), []).append(key)
    for (axis, size), keys in by_size.items():
        if size < 3 or not _runs(model, {key: _shorter(array, axis, key in keys) for key, array in samples.items()}):
            continue
        if any(np.issubdtype(samples[key].dtype, np.integer) for key in keys):
            dim = "sequence" if "sequence" not in dims else f"sequence_{len(dims)}"
            dims[dim] = Dim(min=1, typical=size, max=size)
            for key in keys:
                shapes[key][axis] = dim
        else:
            notes.append(
                f"axis {axis} of {', '.join(keys)} also runs at other sizes; name it in dims to make it dynamic"
            )


def _shorter(array: Array, axis: int, shorten: bool) -> Array:
    return array.take(range(array.shape[axis] - 1), axis=axis) if shorten else array


def _runs(model: nn.Module, arrays: dict[str, Any]) -> bool:
    try:
        call_model(model, arrays)
    except ModelError:
        return False
    return True
