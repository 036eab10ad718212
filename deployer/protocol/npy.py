"""The `.npy` format, read without numpy's own reader: no pickle, no evaluation, nothing allocated before its length
fits."""

from __future__ import annotations

import io
import math
import re
from functools import lru_cache
from typing import Any

import numpy as np

from deployer.errors import RequestError
from deployer.spec import Array

MAGIC = b"\x93NUMPY"

_HEADER_LIMIT_BYTES = 10_000
_RANK_LIMIT = 32
_ENTRY = re.compile(r"""\s*['"](\w+)['"]\s*:\s*('[^']*'|"[^"]*"|True|False|\([\d,\s]*\))\s*(?:,|$)""")
_DTYPE = re.compile(r"[<>|=]?[biuf]\d{1,2}")


def parse_npy(body: bytes | bytearray | memoryview) -> Array:
    """The array in a .npy file, in native byte order and C order; no pickle, no evaluation of the header.

    Raises RequestError when the header is not plain, the dtype is none of numbers and bools, or the data has not the
    length that the header claims. Nothing is allocated before that is checked.
    """
    header, start = _npy_header(body)
    dtype, fortran_order, shape = _npy_fields(header)
    count = math.prod(shape)
    present = len(body) - start
    if count * dtype.itemsize != present:
        raise _bad_npy(
            f"its header claims {dtype.name}{list(shape)}, {count * dtype.itemsize} bytes, and {present} bytes follow",
            f"{dtype.name}{list(shape)} with {present} bytes",
        )
    flat = np.frombuffer(body, dtype=dtype, offset=start, count=count)
    if dtype.kind == "b" and (flat.view(np.uint8) > 1).any():
        raise _bad_npy("its bools hold bytes other than 0 and 1", "bytes other than 0 and 1")
    array = flat.reshape(shape, order="F" if fortran_order else "C")
    if dtype.isnative and not fortran_order:
        return array
    return np.ascontiguousarray(array, dtype=dtype.newbyteorder("=")).reshape(shape)


def _npy_header(body: bytes | bytearray | memoryview) -> tuple[str, int]:
    """The header's text, and where the data starts."""
    prefix = bytes(body[:12])
    if not prefix.startswith(MAGIC) or len(prefix) < 10:
        raise _bad_npy("it is cut off or lacks the magic bytes", f"{len(body)} bytes")
    major = prefix[6]
    if major not in (1, 2, 3) or prefix[7] != 0:
        raise _bad_npy(f"its version is {prefix[6]}.{prefix[7]}", f"version {prefix[6]}.{prefix[7]}")
    width = 2 if major == 1 else 4
    length = int.from_bytes(prefix[8 : 8 + width], "little")
    start = 8 + width + length
    if length > _HEADER_LIMIT_BYTES or start > len(body):
        raise _bad_npy(f"its header claims {length} bytes", f"a header of {length} bytes in {len(body)}")
    return bytes(body[8 + width : start]).decode("latin-1"), start


@lru_cache(maxsize=256)
def _npy_fields(header: str) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    text = header.strip()
    fields: dict[str, str] = {}
    if text.startswith("{") and text.endswith("}"):
        inner, position = text[1:-1].strip(), 0
        while position < len(inner) and (entry := _ENTRY.match(inner, position)):
            fields[entry[1]] = entry[2]
            position = entry.end()
    if sorted(fields) != ["descr", "fortran_order", "shape"] or position != len(inner):
        raise _bad_npy("its header is not plain", "a header of another form, such as a structured dtype")
    descr = fields["descr"].strip("'\"")
    if not _DTYPE.fullmatch(descr):
        raise _bad_npy(f"its dtype '{descr}' is none of bool, int, uint, float (objects are never unpickled)", descr)
    try:
        dtype = np.dtype(descr)
    except TypeError as error:
        raise _bad_npy(f"its dtype '{descr}' does not exist", descr) from error
    sizes = fields["shape"].strip("()").replace(" ", "").rstrip(",")
    if sizes and not re.fullmatch(r"\d{1,18}(,\d{1,18})*", sizes):
        raise _bad_npy("its shape is no shape", fields["shape"][:60])
    shape = tuple(map(int, sizes.split(","))) if sizes else ()
    if len(shape) > _RANK_LIMIT:
        raise _bad_npy(f"it has {len(shape)} axes", f"{len(shape)} axes")
    return dtype, fields["fortran_order"] == "True", shape


def _bad_npy(reason: str, got: str) -> RequestError:
    return RequestError(f"the .npy body cannot be read: {reason}", expected="a .npy file of plain numbers", got=got)


def npy_bytes(array: Array) -> bytes:
    """`array` as the bytes of a .npy file."""
    return _file_header(array.dtype, array.shape) + array.tobytes()


@lru_cache(maxsize=256)
def _file_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    entries = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, entries)
    return buffer.getvalue()
