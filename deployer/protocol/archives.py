"""Several named arrays in one binary body: `.npz` and `.safetensors`, bit by bit, never larger than the model takes."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from deployer.errors import RequestError, first_line
from deployer.protocol.json_text import check_names
from deployer.protocol.npy import npy_bytes, parse_npy
from deployer.spec import Array, Arrays, ModelSpec, TensorSpec, in_c_order

_HEADER_LIMIT_BYTES = 10_500  # of a .npy file
_ENTRY = ".npy"


def parse_npz(body: bytes | bytearray | memoryview, spec: ModelSpec) -> dict[str, Array]:
    """The arrays of an .npz file, one entry an input.

    An entry that claims more bytes than its input may have is refused before it is unpacked. Raises RequestError.
    """
    limits = {f"{tensor.name}{_ENTRY}": _largest_bytes(tensor, spec) for tensor in spec.inputs}
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            check_names([name.removesuffix(_ENTRY) for name in names], spec)
            if len(set(names)) != len(names):
                raise _bad("npz", "two of its entries have the same name", ", ".join(names))
            for entry in entries:
                _check_entry(entry, limits)
            return {entry.filename.removesuffix(_ENTRY): parse_npy(archive.read(entry)) for entry in entries}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError) as error:
        raise _bad("npz", first_line(error), type(error).__name__) from error


def _check_entry(entry: zipfile.ZipInfo, limits: Mapping[str, int]) -> None:
    name = entry.filename.removesuffix(_ENTRY)
    if entry.filename not in limits:  # its name is right and its ending is not
        raise _bad("npz", f"the entry '{entry.filename}' is no .npy file", entry.filename)
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _bad("npz", f"the entry '{name}' is compressed in another way than deflate", str(entry.compress_type))
    if entry.file_size > limits[entry.filename]:
        raise RequestError(
            f"input '{name}' claims {entry.file_size} bytes in the .npz body, the model takes at most "
            f"{limits[entry.filename]}",
            field=name,
            expected=f"at most {limits[entry.filename]} bytes",
            got=f"{entry.file_size} bytes",
            http_status=413,
        )


def _largest_bytes(tensor: TensorSpec, spec: ModelSpec) -> int:
    sizes = [spec.dims[size].max if isinstance(size, str) else size for size in tensor.shape]
    return math.prod(sizes) * np.dtype(tensor.dtype).itemsize + _HEADER_LIMIT_BYTES


def parse_safetensors(body: bytes | bytearray | memoryview, spec: ModelSpec) -> dict[str, Array]:
    """The arrays of a .safetensors file, one an input. Raises RequestError."""
    try:
        arrays: dict[str, Array] = load(bytes(body))
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise _bad("safetensors", first_line(error), type(error).__name__) from error
    check_names(list(arrays), spec)
    for name, array in arrays.items():
        if array.dtype.kind == "b" and (array.view(np.uint8) > 1).any():
            raise _bad("safetensors", f"the bools of '{name}' hold bytes other than 0 and 1", "other bytes")
    return arrays


def npz_bytes(arrays: Arrays) -> bytes:
    """Named arrays as the bytes of an .npz file, not compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(zipfile.ZipInfo(f"{name}{_ENTRY}"), npy_bytes(array))
    return buffer.getvalue()


def safetensors_bytes(arrays: Arrays) -> bytes:
    """Named arrays as the bytes of a .safetensors file."""
    data: bytes = save({name: in_c_order(array) for name, array in arrays.items()})
    return data


def read_npz(body: bytes) -> dict[str, Array]:
    """The arrays of an answer in .npz. Raises RequestError."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            return {name.removesuffix(_ENTRY): parse_npy(archive.read(name)) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise _bad("npz", first_line(error), type(error).__name__) from error


def read_safetensors(body: bytes) -> dict[str, Array]:
    """The arrays of an answer in .safetensors. Raises RequestError."""
    try:
        arrays: dict[str, Array] = load(body)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise _bad("safetensors", first_line(error), type(error).__name__) from error
    return arrays


def _bad(kind: str, reason: str, got: str) -> RequestError:
    return RequestError(
        f"the .{kind} body cannot be read: {reason}", expected=f"a .{kind} file of plain numbers", got=got
    )
