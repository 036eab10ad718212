"""Sample data: real inputs that the gate, the package and the benchmark use. Checked on entry, never random."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors import SafetensorError
from safetensors.numpy import load_file

from deployer.errors import DeployerError, RequestError, SampleError, first_line
from deployer.references import load_reference
from deployer.spec import Array, Arrays, ModelSpec, in_c_order


def read_samples(source: str | Path, folder: Path | None = None) -> dict[str, Array]:
    """Named arrays from `.npz`, `.npy`, `.safetensors`, or from `module:function` / `path.py:function`.

    A function takes nothing and returns a mapping of names to arrays or tensors. Relative paths start in `folder`.
    Raises SampleError naming the source, also for an array without a single value.
    """
    arrays = _read(source, folder)
    for name, array in arrays.items():
        if array.size == 0:
            raise SampleError(f"'{source}': '{name}' has the shape {list(array.shape)} and holds no value")
    return arrays


def _read(source: str | Path, folder: Path | None) -> dict[str, Array]:
    text = str(source)
    if not isinstance(source, Path) and ":" in text and Path(text).suffix.lower() not in (".npz", ".safetensors"):
        return _from_function(text, folder)
    path = (folder or Path()) / text
    try:
        match path.suffix.lower():
            case ".npz":
                with np.load(path, allow_pickle=False) as archive:
                    return {name: archive[name] for name in archive.files}
            case ".npy":
                return {"": np.load(path, allow_pickle=False)}
            case ".safetensors":
                return load_file(path)
    except FileNotFoundError as error:
        raise SampleError(f"no sample file '{path}'; give a .npz, .npy, .safetensors or module:function") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        raise SampleError(
            f"'{path}' ({path.stat().st_size} bytes) cannot be read as sample data: {first_line(error)}"
        ) from error
    raise SampleError(f"'{path}' is no sample data; give a .npz, .npy, .safetensors or module:function")


def _from_function(reference: str, folder: Path | None) -> dict[str, Array]:
    function = load_reference(reference, folder)
    try:
        value: Any = function()
    except DeployerError:
        raise
    except (Exception, SystemExit) as error:
        raise SampleError(f"'{reference}' failed with {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(value, Mapping):
        raise SampleError(f"'{reference}' returned a {type(value).__name__}; a mapping of names to arrays is expected")
    return {name: np.asarray(array) for name, array in value.items()}


def check_samples(spec: ModelSpec, arrays: Arrays) -> dict[str, Array]:
    """Hold samples to the spec; the sole input may be nameless (a bare `.npy`). Raises SampleError.

    NaN and infinite values are refused: they would make every comparison meaningless.
    """
    named = dict(arrays)
    if list(named) == [""] and len(spec.inputs) == 1:
        named = {spec.inputs[0].name: named[""]}
    try:
        spec.check_inputs(named)
    except RequestError as error:
        raise SampleError(f"samples do not fit the spec: {error}") from error
    for name, array in named.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))[0].tolist()
            raise SampleError(f"sample '{name}' holds NaN or infinity at index {where}; remove or repair it")
    return {tensor.name: in_c_order(named[tensor.name]) for tensor in spec.inputs}


def resize(array: Array, axis: int, size: int, *, distinct: bool = False) -> Array:
    """Exactly `size` entries along `axis`, taken from real data only: entry i is entry i mod n of `array`.

    With `distinct` each further round is rolled along the last other axis by one more step, so that repeated rows
    differ (where there is such an axis) and a row mix-up shows. No value is invented: ids stay ids, masks stay masks.
    """
    length = array.shape[axis]
    roll_axis = next((other for other in reversed(range(array.ndim)) if other != axis), None) if distinct else None
    rounds = [
        array if turn == 0 or roll_axis is None else np.roll(array, turn, axis=roll_axis)
        for turn in range(math.ceil(size / length))
    ]
    return np.concatenate(rounds, axis=axis).take(range(size), axis=axis)


def sized_inputs(spec: ModelSpec, samples: Arrays, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Inputs in which each Dim of `sizes` has the size given there, built from `samples` by `resize`.

    Raises SampleError, naming the largest Dim, when they would not fit into half of the memory that is free.
    """
    _check_memory(spec, sizes)
    result = {}
    for tensor in spec.inputs:
        array = samples[tensor.name]
        # The batch axis last: its repeated rows are then rolled along an axis that already has its final size.
        for axis, size in sorted(enumerate(tensor.shape), key=lambda item: item[1] == spec.batch):
            if isinstance(size, str):
                array = resize(array, axis, sizes[size], distinct=size == spec.batch)
        result[tensor.name] = in_c_order(array)
    return result


def _check_memory(spec: ModelSpec, sizes: Mapping[str, int]) -> None:
    needed_bytes = sum(
        math.prod(size if isinstance(size, int) else sizes[size] for size in tensor.shape)
        * np.dtype(tensor.dtype).itemsize
        for tensor in spec.inputs
    )
    free_bytes = psutil.virtual_memory().available
    if needed_bytes > free_bytes // 2:
        largest = max(sizes, key=lambda name: sizes[name])
        raise SampleError(
            f"inputs with {largest}={sizes[largest]} take {needed_bytes:,} bytes, {free_bytes:,} are free here; "
            f"lower the max of '{largest}'"
        )
