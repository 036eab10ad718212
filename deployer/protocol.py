"""Request and response bodies, with no knowledge of any server.

    {"inputs": {"image": [[…]]}}      JSON, inputs by name
    {"inputs": [[…]]}                 JSON, the sole input without its name
    {"image": [[…]]}                  JSON, the same without the wrapper
    application/x-npy                 the sole input as a .npy file, bit by bit

    {"model": "digits", "version": "1.0", "outputs": {"logits": […]}, "labels": {"logits": "7"}}
    application/x-npy                 the sole output as a .npy file, where Accept asks for it
    {"error": {"message": …, "field": …, "expected": …, "got": …}}

For a model whose every input and output has the batch axis, a request is one item (arrays without that axis, answered
without it) or a batch of items (arrays with it); the rank decides, for all inputs alike. For other models the arrays
are the model's own.

Nothing is bent to fit: 1.5 is no integer, 1 is no bool, 300 is no uint8, NaN is no JSON, a pickle is no array.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import GenericAlias
from typing import Annotated, Any

import msgspec
import numpy as np

from deployer.errors import RequestError, nearest
from deployer.spec import Array, Arrays, ModelSpec, TensorSpec

JSON = "application/json"
NPY = "application/x-npy"

_BINARY = "application/octet-stream"
_NPY_MAGIC = b"\x93NUMPY"
_GZIP_MAGIC = b"\x1f\x8b"
_NPY_HEADER_LIMIT_BYTES = 10_000
_RANK_LIMIT = 32
_NPY_ENTRY = re.compile(r"""\s*['"](\w+)['"]\s*:\s*('[^']*'|"[^"]*"|True|False|\([\d,\s]*\))\s*(?:,|$)""")
_SPACE = re.compile(rb"[ \t\r\n]*")
_KEY = re.compile(rb'[ \t\r\n]*"(?:[^"\\]|\\.)*"[ \t\r\n]*:[ \t\r\n]*')
_NPY_DTYPE = re.compile(r"[<>|=]?[biuf]\d{1,2}")

#: JSON's own check of a number, by dtype: what it lets through fits the dtype
_SCALARS: dict[str, Any] = {
    "bool": bool,
    **{
        name: Annotated[int, msgspec.Meta(ge=int(np.iinfo(name).min), le=int(np.iinfo(name).max))]
        for name in ("uint8", "int8", "int16", "int32", "int64")
    },
    **dict.fromkeys(("float16", "float32", "float64"), float),
}


@dataclass(frozen=True)
class Decoded:
    """A valid request: arrays that fit the spec, with the batch axis where the model has one.

    `sizes` is the size of each Dim; `one_item` says that the batch axis was added here and must leave again.
    """

    arrays: dict[str, Array]
    sizes: dict[str, int]
    one_item: bool


def decode_request(body: bytes | bytearray | memoryview, content_type: str, spec: ModelSpec) -> Decoded:
    """Parse and check one request. Raises RequestError (400, or 415 for a content type that is not understood)."""
    kind = _body_kind(bytes(body[: len(_NPY_MAGIC)]), content_type)
    if not body:
        raise RequestError("the body is empty", expected=", ".join(map(str, spec.inputs)), got="nothing")
    arrays = _sole(spec, parse_npy(body)) if kind == NPY else _decode_json(bytes(body), spec)
    one_item = _is_one_item(arrays, spec)
    if one_item:
        arrays = {name: np.expand_dims(array, _batch_axis(spec.input(name), spec)) for name, array in arrays.items()}
    try:
        return Decoded(arrays, spec.check_inputs(arrays), one_item)
    except RequestError as error:
        if not one_item:
            raise
        # The user sent no batch axis: what arrived is told as it arrived.
        array = arrays.get(error.field)
        note = " (one item, its batch axis of size 1 was added)" if array is not None else ""
        raise RequestError(
            f"{error}{note}", field=error.field, expected=error.expected, got=error.got, http_status=error.http_status
        ) from error


def _body_kind(start: bytes, content_type: str) -> str:
    """JSON or NPY, from the content type and, where that is silent, from the first bytes."""
    media, _, parameters = content_type.partition(";")
    media = media.strip().lower()
    if start.startswith(_GZIP_MAGIC):
        raise _unsupported("the body is gzip-compressed", "an uncompressed body", "gzip")
    is_npy = start.startswith(_NPY_MAGIC)
    if media in (NPY, _BINARY):
        if is_npy:
            return NPY
        raise RequestError(
            f"content type {media}, but the body is no .npy file: it starts with {start!r}",
            expected="a .npy file, which starts with \\x93NUMPY",
            got=repr(start),
        )
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", parameters, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise _unsupported(f"charset {charset[1]} is not supported", "utf-8", charset[1])
    if media in (JSON, "text/json"):
        return JSON
    if not media:
        return NPY if is_npy else JSON
    raise _unsupported(f"content type '{media}' is not supported", f"{JSON} or {NPY}", media)


def _unsupported(message: str, expected: str, got: str) -> RequestError:
    return RequestError(
        f"{message}; send {expected}", field="content-type", expected=expected, got=got, http_status=415
    )


# ---------------------------------------------------------------------------------------------------- one item or many


def _batch_axis(tensor: TensorSpec, spec: ModelSpec) -> int:
    axis = tensor.axis_of(spec.batch)
    if axis is None:
        raise ValueError(f"{tensor} has no batch axis")
    return axis


def _is_one_item(arrays: Arrays, spec: ModelSpec) -> bool:
    """True when every array lacks exactly the batch axis; wrong ranks are left to the spec's own check."""
    if not spec.stackable:
        return False
    known = {tensor.name: tensor for tensor in spec.inputs if tensor.name in arrays}
    lacking = {name: len(tensor.shape) - arrays[name].ndim for name, tensor in known.items()}
    if not known or any(count not in (0, 1) for count in lacking.values()):
        return False
    if len(set(lacking.values())) == 1:
        return 1 in lacking.values()
    batched = next(name for name, count in lacking.items() if count == 0)
    single = next(name for name, count in lacking.items() if count == 1)
    raise RequestError(
        f"input '{single}' is one item and '{batched}' a batch; send all inputs with the batch axis '{spec.batch}' "
        "or all without",
        field=single,
        expected=str(known[single]),
        got=f"{arrays[single].dtype.name}{list(arrays[single].shape)}",
    )


def _sole(spec: ModelSpec, array: Array) -> dict[str, Array]:
    if len(spec.inputs) != 1:
        names = ", ".join(tensor.name for tensor in spec.inputs)
        raise RequestError(
            f"a .npy body holds one array, this model has {len(spec.inputs)} inputs ({names}); send JSON",
            expected=names,
            got="one array",
        )
    return {spec.inputs[0].name: array}


# ---------------------------------------------------------------------------------------------------------------- JSON


def _decode_json(body: bytes, spec: ModelSpec) -> dict[str, Array]:
    """Named arrays from JSON; each value is decoded straight to its dtype, so that no number changes on the way."""
    names = [tensor.name for tensor in spec.inputs]
    raw = _inputs_of(_object(body, "the body"), names)
    for name in raw:
        if name not in names:
            raise RequestError(
                f"unknown input '{name}'{nearest(name, names)}", field=name, expected=", ".join(names), got=name
            )
    for tensor in spec.inputs:
        if tensor.name not in raw:
            raise RequestError(
                f"input '{tensor.name}' is missing; expected {tensor}",
                field=tensor.name,
                expected=str(tensor),
                got=", ".join(raw) or "nothing",
            )
    return {tensor.name: _json_array(bytes(raw[tensor.name]), tensor) for tensor in spec.inputs}


def _inputs_of(document: dict[str, msgspec.Raw], names: list[str]) -> dict[str, msgspec.Raw]:
    if "inputs" not in document:
        return document
    if extra := sorted(set(document) - {"inputs"}):
        raise RequestError(
            f"unknown key '{extra[0]}' beside 'inputs'; send {{\"inputs\": …}} alone",
            field=extra[0],
            expected="inputs",
            got=", ".join(sorted(document)),
        )
    value = document["inputs"]
    if bytes(value).lstrip().startswith(b"{"):
        return _object(bytes(value), "'inputs'")
    if len(names) > 1:
        raise RequestError(
            f"this model has {len(names)} inputs; send 'inputs' as an object with {', '.join(names)}",
            field="inputs",
            expected=f"an object with {', '.join(names)}",
            got="an array or a number",
        )
    return {names[0]: value}


def _object(data: bytes, what: str) -> dict[str, msgspec.Raw]:
    """The keys of a JSON object and their values, not decoded yet. Raises RequestError for a key that stands twice:
    JSON leaves open which of the two counts."""
    found: dict[str, msgspec.Raw] = _json(data, dict[str, msgspec.Raw], what)
    if not _stand_once(data, found):
        twice = _repeated_key(data)
        raise RequestError(
            f"the key '{twice}' stands twice in {what}; send it once", field=twice, expected="each key once", got=twice
        )
    return found


def _stand_once(data: bytes, found: dict[str, msgspec.Raw]) -> bool:
    """Whether valid JSON is an object of just these keys and values in this order. The parser keeps a repeated key at
    its first place with its last value, so that the text then goes on otherwise. Values are compared, not parsed."""
    place = _space_from(data, 0) + 1  # behind the brace
    for turn, value in enumerate(found.values()):
        key = _KEY.match(data, place + (turn > 0))  # behind the comma
        text = bytes(value)
        if key is None or not data.startswith(text, key.end()):
            return False
        place = _space_from(data, key.end() + len(text))
    return data.startswith(b"}", _space_from(data, place))


def _repeated_key(data: bytes) -> str:
    """The first key that stands twice in a JSON object, or "" where Python's own parser stops at its values."""
    try:
        pairs = json.loads(data, object_pairs_hook=list, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return ""
    return next((key for key, count in Counter(key for key, _ in pairs).items() if count > 1), "")


def _space_from(data: bytes, place: int) -> int:
    """The first place from `place` on that is no white space."""
    found = _SPACE.match(data, place)
    return found.end() if found else place


def _json(data: bytes, kind: Any, what: str, field: str = "", expected: str = "") -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise RequestError(
            f"{what} is nested too deeply", field=field, expected=expected or "a flat object", got="deep nesting"
        ) from None
    except msgspec.ValidationError as error:
        raise RequestError(f"{what}: {error}", field=field, expected=expected, got=str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{what} is no valid JSON: {error}", field=field, expected=expected or "JSON", got=str(error)
        ) from error


def _json_array(data: bytes, tensor: TensorSpec) -> Array:
    """One nested list as an array of the tensor's dtype. Its rank is the number of leading brackets."""
    rank = 0
    for byte in data:
        if byte == ord("["):
            rank += 1
        elif byte not in b" \t\r\n":
            break
    if rank > _RANK_LIMIT:
        raise _bad_array(tensor, "is nested too deeply", f"{rank} levels")
    kind: Any = _SCALARS[tensor.dtype]
    for _ in range(rank):
        kind = GenericAlias(list, (kind,))
    values = _json(data, kind, f"input '{tensor.name}'", tensor.name, str(tensor))
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=tensor.dtype)
    except ValueError as error:
        raise _bad_array(tensor, "is ragged: its lists differ in length", "ragged lists") from error
    if array.dtype.kind == "f" and not np.isfinite(array).all():  # JSON has no infinity: the number was too large
        raise _bad_array(tensor, f"holds a number that does not fit {tensor.dtype}", "a number out of range")
    return array


def _bad_array(tensor: TensorSpec, reason: str, got: str) -> RequestError:
    return RequestError(
        f"input '{tensor.name}' {reason}; expected {tensor}", field=tensor.name, expected=str(tensor), got=got
    )


# ---------------------------------------------------------------------------------------------------------------- .npy


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
    return np.ascontiguousarray(array, dtype=dtype.newbyteorder("=")).reshape(shape)


def _npy_header(body: bytes | bytearray | memoryview) -> tuple[str, int]:
    """The header's text, and where the data starts."""
    prefix = bytes(body[:12])
    if not prefix.startswith(_NPY_MAGIC) or len(prefix) < 10:
        raise _bad_npy("it is cut off or lacks the magic bytes", f"{len(body)} bytes")
    major = prefix[6]
    if major not in (1, 2, 3) or prefix[7] != 0:
        raise _bad_npy(f"its version is {prefix[6]}.{prefix[7]}", f"version {prefix[6]}.{prefix[7]}")
    width = 2 if major == 1 else 4
    length = int.from_bytes(prefix[8 : 8 + width], "little")
    start = 8 + width + length
    if length > _NPY_HEADER_LIMIT_BYTES or start > len(body):
        raise _bad_npy(f"its header claims {length} bytes", f"a header of {length} bytes in {len(body)}")
    return bytes(body[8 + width : start]).decode("latin-1"), start


def _npy_fields(header: str) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    text = header.strip()
    fields: dict[str, str] = {}
    if text.startswith("{") and text.endswith("}"):
        inner, position = text[1:-1].strip(), 0
        while position < len(inner) and (entry := _NPY_ENTRY.match(inner, position)):
            fields[entry[1]] = entry[2]
            position = entry.end()
    if sorted(fields) != ["descr", "fortran_order", "shape"] or position != len(inner):
        raise _bad_npy("its header is not plain", "a header of another form, such as a structured dtype")
    descr = fields["descr"].strip("'\"")
    if not _NPY_DTYPE.fullmatch(descr):
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
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------------------- answers


def choose_answer(accept: str, spec: ModelSpec) -> str:
    """JSON or NPY: what the Accept header prefers among the two; JSON when it does not care.

    Raises RequestError (406) when it allows neither, or .npy alone for a model of several outputs.
    """
    wanted = {JSON: _quality(accept, JSON), NPY: _quality(accept, NPY)}
    if wanted[NPY] > 0 and len(spec.outputs) != 1:
        names = ", ".join(tensor.name for tensor in spec.outputs)
        if wanted[JSON] > 0:
            return JSON
        raise RequestError(
            f"a .npy answer holds one array, this model has {len(spec.outputs)} outputs ({names}); accept {JSON}",
            field="accept",
            expected=JSON,
            got=accept,
            http_status=406,
        )
    if max(wanted.values()) <= 0:
        raise RequestError(
            f"Accept '{accept}' allows neither {JSON} nor {NPY}",
            field="accept",
            expected=f"{JSON} or {NPY}",
            got=accept,
            http_status=406,
        )
    return NPY if wanted[NPY] > wanted[JSON] else JSON


def _quality(accept: str, media: str) -> float:
    """The q that an Accept header gives a media type; its most specific range counts (RFC 9110, 12.5.1)."""
    ranges: dict[str, float] = {}
    for part in accept.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        q = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        if name:
            ranges[name] = float(q) if re.fullmatch(r"[01](\.\d{1,3})?", q) else 0.0
    if not ranges:
        return 1.0 if media == JSON else 0.5
    specific = [media, *([_BINARY] if media == NPY else []), f"{media.split('/')[0]}/*", "*/*"]
    return next((ranges[name] for name in specific if name in ranges), 0.0)


def encode_answer(outputs: Arrays, spec: ModelSpec, kind: str) -> bytes:
    """Named outputs as JSON or as a .npy file (then there is one). JSON is strict: NaN and infinities become null."""
    if kind == NPY:
        return npy_bytes(outputs[spec.outputs[0].name])
    document: dict[str, Any] = {
        "model": spec.name,
        "version": spec.version,
        "outputs": {tensor.name: outputs[tensor.name].tolist() for tensor in spec.outputs},
    }
    if labels := _labels(outputs, spec):
        document["labels"] = labels
    return msgspec.json.encode(document)  # writes NaN and infinities as null


def _labels(outputs: Arrays, spec: ModelSpec) -> dict[str, Any]:
    """For each float output whose last axis has one entry a label: the label of the largest; null beside a NaN."""
    if not spec.labels:
        return {}
    found: dict[str, Any] = {}
    for tensor in spec.outputs:
        array = outputs[tensor.name]
        if array.dtype.kind == "f" and tensor.shape[-1:] == (len(spec.labels),):
            largest = np.where(np.isnan(array).any(axis=-1), len(spec.labels), np.argmax(array, axis=-1))
            names = np.array([*spec.labels, None], dtype=object)
            found[tensor.name] = names[largest[np.newaxis]].tolist()[0]  # one item's index has no axis of its own
    return found


def encode_error(message: str, *, field: str = "", expected: str = "", got: str = "") -> bytes:
    """The body of every answer that is no result."""
    return msgspec.json.encode({"error": {"message": message, "field": field, "expected": expected, "got": got}})


def encode_inputs(arrays: Arrays) -> bytes:
    """Named arrays as a JSON request. Raises RequestError for NaN and infinities, which JSON cannot carry."""
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise RequestError(f"input '{name}' has dtype {array.dtype}; numbers and bools are expected", field=name)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise RequestError(f"input '{name}' holds NaN or infinity, which JSON cannot carry; send .npy", field=name)
    return msgspec.json.encode({"inputs": {name: array.tolist() for name, array in arrays.items()}})


def decode_answer(body: bytes, content_type: str) -> dict[str, Any]:
    """What a server answered: `{"outputs": {name: array}, …}`; for .npy the sole output has the name "".

    JSON arrays come as float64, int64 or bool, null as NaN. Raises RequestError when it is neither.
    """
    if content_type.partition(";")[0].strip().lower() == NPY or body.startswith(_NPY_MAGIC):
        return {"outputs": {"": parse_npy(body)}}
    document: dict[str, Any] = _json(body, dict[str, Any], "the answer")
    outputs = document.get("outputs")
    if not isinstance(outputs, Mapping):
        raise RequestError("the answer holds no outputs", field="outputs", got=", ".join(document))
    return {**document, "outputs": {name: _answer_array(name, value) for name, value in outputs.items()}}


def _answer_array(name: str, value: Any) -> Array:
    try:
        array = np.array(value)
        if array.dtype == object:  # null among numbers
            array = array.astype(np.float64)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"it holds {array.dtype}")
        return array
    except (ValueError, TypeError) as error:
        raise RequestError(f"output '{name}' of the answer is no array: {error}", field=name) from error
