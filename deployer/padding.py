"""Requests of several lengths in one run: padded at the end to the longest, the padding masked, answers cut back.

A spec says so by `masks: {"sequence": "attention_mask"}`: zeros of the input `attention_mask` switch positions along
`sequence` off. Whether padding leaves answers alone is measured on the eager model (`deployer.validate.padding`); only
Dims for which it does are ever padded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from deployer.spec import Array, Arrays, ModelSpec, TensorSpec


def pad_inputs(spec: ModelSpec, arrays: Arrays, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Every input lengthened at the end of each axis of `sizes` to the size there: masks by zeros, others by zero or
    the value nearest to it that the spec allows."""
    padded = {}
    for tensor in spec.inputs:
        array = arrays[tensor.name]
        widths = [
            (0, max(0, sizes[size] - array.shape[axis]) if isinstance(size, str) and size in sizes else 0)
            for axis, size in enumerate(tensor.shape)
        ]
        value = _filler(tensor)
        padded[tensor.name] = np.pad(array, widths, constant_values=value) if any(map(any, widths)) else array
    return padded


def _filler(tensor: TensorSpec) -> int | float:
    value: int | float = 0
    if tensor.low is not None:
        value = max(value, tensor.low)
    if tensor.high is not None:
        value = min(value, tensor.high)
    return value


def cut_outputs(spec: ModelSpec, arrays: Arrays, sizes: Mapping[str, int], dims: Collection[str]) -> dict[str, Array]:
    """Every output shortened to `sizes` along those of its axes that are among `dims`."""
    cut = {}
    for tensor in spec.outputs:
        array = arrays[tensor.name]
        place = tuple(
            slice(sizes[size]) if isinstance(size, str) and size in dims else slice(None) for size in tensor.shape
        )
        cut[tensor.name] = array[place]
    return cut
