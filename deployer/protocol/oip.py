"""The Open Inference Protocol, version 2, with its binary-tensor extension.

    {"id": "7", "inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}],
     "outputs": [{"name": "y", "parameters": {"binary_data": true}}], "parameters": {"binary_data_output": true}}

With the header `Inference-Header-Content-Length: N` the first N bytes are that document, and the data of inputs with
the parameter `binary_data_size` follow it, in the order of `inputs`, little-endian and row by row. Answers have the
same form. What of the protocol is not done here is refused by name: BYTES and BF16, shared memory, classification,
sequences. (kserve/open-inference-protocol, "Inference Protocol HTTP/REST"; triton-inference-server/server,
"Binary Tensor Data Extension".)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from deployer.errors import RequestError, nearest
from deployer.protocol.json_text import bad_array, check_names, nested_array, parse, parse_object
from deployer.spec import Array, Arrays, ModelSpec, TensorSpec, in_c_order

HEADER_LENGTH = "Inference-Header-Content-Length"

#: dtypes of a spec as the protocol names them
DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64",
    "float16": "FP16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip
_DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}

_BINARY_SIZE = "binary_data_size"
_BINARY_OUTPUT = "binary_data_output"
_BINARY = "binary_data"


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    parameters: dict[str, Any] = {}


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[_Output] = []


@dataclass(frozen=True)
class Ask:
    """How a request wants its answer: its id, and (name, as bytes?) of each output."""

    id: str
    outputs: tuple[tuple[str, bool], ...]


def header_length(text: str) -> int | None:
    """The value of HEADER_LENGTH, None where the header is absent (""). Raises RequestError."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise RequestError(
            f"{HEADER_LENGTH} '{text[:40]}' is no number of bytes",
            field=HEADER_LENGTH.lower(),
            expected="the length of the JSON part in bytes",
            got=text[:40],
        )
    return int(text)


def is_request(document: dict[str, msgspec.Raw]) -> bool:
    """Whether a JSON object is a request of this protocol: its `inputs` are a list of objects."""
    value = bytes(document.get("inputs", b""))[:64].split(None, 1)
    start = b"".join(value)
    return start[:1] == b"[" and start[1:].lstrip()[:1] == b"{"


def decode(
    body: bytes | bytearray | memoryview, spec: ModelSpec, header_bytes: int | None = None
) -> tuple[dict[str, Array], Ask]:
    """The arrays of a request, and how it wants its answer. `header_bytes` is what HEADER_LENGTH says.

    Raises RequestError naming the input, output or parameter at fault.
    """
    if header_bytes is not None and not 0 < header_bytes <= len(body):
        raise RequestError(
            f"{HEADER_LENGTH} is {header_bytes}, the body has {len(body)} bytes",
            field=HEADER_LENGTH.lower(),
            expected=f"1 to {len(body)}",
            got=str(header_bytes),
        )
    head = bytes(body[:header_bytes])
    parse_object(head, "the request")  # refuses a key that stands twice
    document: _Document = parse(head, _Document, "the request")
    rest = memoryview(body)[header_bytes:] if header_bytes is not None else memoryview(b"")
    _check_parameters(document.parameters, (_BINARY_OUTPUT,), "the request")
    names = [entry.name for entry in document.inputs]
    check_names(names, spec)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"input '{twice}' stands twice", field=twice, expected="each input once", got="two")
    arrays = {}
    for entry in document.inputs:
        arrays[entry.name], used_bytes = _array(entry, spec.input(entry.name), rest)
        rest = rest[used_bytes:]
    if len(rest):
        raise RequestError(
            f"{len(rest)} bytes follow the last binary input",
            field=_BINARY_SIZE,
            expected="as many bytes as the inputs' binary_data_size add up to",
            got=f"{len(rest)} more",
        )
    return arrays, Ask(document.id, _asked_outputs(document, spec))


def _array(entry: _Input, tensor: TensorSpec, rest: memoryview) -> tuple[Array, int]:
    """One input's array, and how many bytes of the binary part it took."""
    _check_parameters(entry.parameters, (_BINARY_SIZE,), f"input '{entry.name}'")
    wanted = DATATYPES[tensor.dtype]
    if entry.datatype != wanted:
        known = "" if entry.datatype in _DTYPES else f"{nearest(entry.datatype, _DTYPES)}"
        raise RequestError(
            f"input '{tensor.name}' has the datatype {entry.datatype} instead of {wanted}{known}",
            field=tensor.name,
            expected=wanted,
            got=entry.datatype,
        )
    if any(size < 0 for size in entry.shape):
        raise bad_array(tensor, "has a negative size in its shape", str(entry.shape))
    count = 1
    for size in entry.shape:
        count *= size
    size_bytes = entry.parameters.get(_BINARY_SIZE)
    if size_bytes is None:
        if not bytes(entry.data):
            raise bad_array(tensor, "has no data", "neither data nor binary_data_size")
        return _shaped(nested_array(bytes(entry.data), tensor), entry.shape, count, tensor), 0
    if bytes(entry.data):
        raise bad_array(tensor, "has both data and binary_data_size", "both")
    dtype = np.dtype(tensor.dtype).newbyteorder("<")
    if type(size_bytes) is not int or size_bytes != count * dtype.itemsize or size_bytes > len(rest):
        raise bad_array(
            tensor,
            f"has the shape {entry.shape}, which takes {count * dtype.itemsize} bytes, binary_data_size {size_bytes}, "
            f"and {len(rest)} bytes are left",
            f"{size_bytes} of {len(rest)} bytes",
        )
    flat = np.frombuffer(rest[:size_bytes], dtype=dtype)
    if dtype.kind == "b" and (flat.view(np.uint8) > 1).any():
        raise bad_array(tensor, "has bools in bytes other than 0 and 1", "other bytes")
    return _reshaped(flat, entry.shape, tensor).astype(dtype.newbyteorder("="), copy=False), size_bytes


def _shaped(array: Array, shape: Sequence[int], count: int, tensor: TensorSpec) -> Array:
    """Data may come flat or nested as its shape says."""
    if list(array.shape) == list(shape):
        return array
    if array.ndim == 1 and array.size == count:
        return _reshaped(array, shape, tensor)
    raise bad_array(tensor, f"has the shape {list(shape)} and data of the shape {list(array.shape)}", "other data")


def _reshaped(array: Array, shape: Sequence[int], tensor: TensorSpec) -> Array:
    """An empty array may claim any sizes beside its 0, those that no array can have among them."""
    try:
        return array.reshape(shape)
    except (ValueError, OverflowError) as error:
        raise bad_array(tensor, f"has a shape that no array can have ({error})", str(list(shape))[:200]) from error


def _check_parameters(parameters: dict[str, Any], known: Sequence[str], where: str) -> None:
    for name in parameters:
        if name not in known:
            raise RequestError(
                f"{where} has the parameter '{name}', which is not supported; supported: {', '.join(known) or 'none'}",
                field=name,
                expected=", ".join(known) or "no parameters",
                got=name,
            )


def _asked_outputs(document: _Document, spec: ModelSpec) -> tuple[tuple[str, bool], ...]:
    names = [tensor.name for tensor in spec.outputs]
    usual = _flag(document.parameters, _BINARY_OUTPUT, default=False)
    if not document.outputs:
        return tuple((name, usual) for name in names)
    for entry in document.outputs:
        if entry.name not in names:
            raise RequestError(
                f"unknown output '{entry.name}'{nearest(entry.name, names)}",
                field=entry.name,
                expected=", ".join(names),
                got=entry.name,
            )
        _check_parameters(entry.parameters, (_BINARY,), f"output '{entry.name}'")
    return tuple((entry.name, _flag(entry.parameters, _BINARY, default=usual)) for entry in document.outputs)


def _flag(parameters: dict[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(
            f"the parameter '{name}' is {value!r}; true or false is expected",
            field=name,
            expected="true or false",
            got=repr(value),
        )
    return value


def encode(outputs: Arrays, spec: ModelSpec, ask: Ask, labels: dict[str, Any]) -> tuple[bytes, int | None]:
    """An answer, and the length of its JSON part where bytes follow it (None where none do)."""
    entries: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, as_bytes in ask.outputs:
        array = outputs[name]
        entry: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape)}
        if as_bytes:
            data = in_c_order(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
            entry["parameters"] = {_BINARY_SIZE: len(data)}
            tail.append(data)
        else:
            entry["data"] = array.ravel().tolist()
        entries.append(entry)
    document: dict[str, Any] = {"model_name": spec.name, "model_version": spec.version}
    if ask.id:
        document["id"] = ask.id
    if labels:
        document["parameters"] = {"labels": msgspec.json.encode(labels).decode()}  # parameters hold no objects
    head = msgspec.json.encode(document | {"outputs": entries})
    return (b"".join([head, *tail]), len(head) if tail else None)


def encode_request(arrays: Arrays, *, binary: bool) -> tuple[bytes, int | None]:
    """A request of named arrays, and the length of its JSON part where bytes follow it; answers come likewise."""
    entries: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, array in arrays.items():
        entry: dict[str, Any] = {"name": name, "shape": list(array.shape), "datatype": DATATYPES[array.dtype.name]}
        if binary:
            data = in_c_order(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
            entry["parameters"] = {_BINARY_SIZE: len(data)}
            tail.append(data)
        else:
            entry["data"] = array.ravel().tolist()
        entries.append(entry)
    document: dict[str, Any] = {"inputs": entries}
    if binary:
        document["parameters"] = {_BINARY_OUTPUT: True}
    head = msgspec.json.encode(document)
    return (b"".join([head, *tail]), len(head) if binary else None)


class _Answered(msgspec.Struct):
    """One output of an answer; `shape` and the rest as in a request."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: Any = None


class _Answer(msgspec.Struct):
    outputs: list[_Answered]
    model_name: str = ""
    model_version: str = ""
    id: str = ""
    parameters: dict[str, Any] = {}


def decode_answer(body: bytes, header_bytes: int | None) -> dict[str, Any]:
    """What a server answered, in the form of `protocol.decode_answer`; null is NaN. Raises RequestError."""
    answer: _Answer = parse(body[:header_bytes], _Answer, "the answer")
    rest = body[header_bytes:] if header_bytes is not None else b""
    outputs: dict[str, Array] = {}
    for entry in answer.outputs:
        if entry.datatype not in _DTYPES:
            raise RequestError(f"output '{entry.name}' has the datatype {entry.datatype}", field=entry.name)
        dtype = np.dtype(_DTYPES[entry.datatype])
        size_bytes = entry.parameters.get(_BINARY_SIZE)
        try:
            if size_bytes is not None:
                flat = np.frombuffer(rest[:size_bytes], dtype.newbyteorder("<")).astype(dtype)
                rest = rest[size_bytes:]
            else:
                flat = np.array(entry.data, dtype=dtype)
            outputs[entry.name] = flat.reshape(entry.shape)
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestError(f"output '{entry.name}' of the answer is no array: {error}", field=entry.name) from error
    document: dict[str, Any] = {"model": answer.model_name, "version": answer.model_version, "outputs": outputs}
    if answer.id:
        document["id"] = answer.id
    if isinstance(labels := answer.parameters.get("labels"), str):
        document["labels"] = parse(labels.encode(), dict[str, Any], "the labels")
    return document
