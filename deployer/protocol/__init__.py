"""Request and response bodies, with no knowledge of any server.

    {"inputs": {"image": [[…]]}}      JSON, inputs by name
    {"inputs": [[…]]}                 JSON, the sole input without its name
    {"image": [[…]]}                  JSON, the same without the wrapper
    {"inputs": [{"name": …}, …]}      Open Inference Protocol, with its binary part or without (`oip`)
    application/x-npy                 the sole input as a .npy file, bit by bit
    application/x-npz                 named inputs as an .npz file, bit by bit
    application/x-safetensors         named inputs as a .safetensors file, bit by bit

    {"model": "digits", "version": "1.0", "outputs": {"logits": […]}, "labels": {"logits": "7"}}
    application/x-npy, x-npz, x-safetensors, where Accept asks for one of them
    the Open Inference Protocol's answer, where the request was one and Accept asks for nothing else
    {"error": {"message": …, "field": …, "expected": …, "got": …}}

For a model whose every input and output has the batch axis, a request is one item (arrays without that axis, answered
without it) or a batch of items (arrays with it); the rank decides, for all inputs alike. For other models the arrays
are the model's own.

Nothing is bent to fit: 1.5 is no integer, 1 is no bool, 300 is no uint8, NaN is no JSON, a pickle is no array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from deployer.errors import RequestError
from deployer.protocol import archives, json_text, oip
from deployer.protocol.media import BINARY, JSON, KINDS, NPY, NPZ, SAFETENSORS, body_kind, choose_answer
from deployer.protocol.npy import MAGIC, npy_bytes, parse_npy
from deployer.spec import Array, Arrays, ModelSpec, TensorSpec

__all__ = [
    "JSON",
    "KINDS",
    "NPY",
    "NPZ",
    "NULLS",
    "SAFETENSORS",
    "Decoded",
    "Encoded",
    "check_arrays",
    "choose_answer",
    "decode_answer",
    "decode_request",
    "encode_answer",
    "encode_error",
    "encode_inputs",
    "encode_request",
    "npy_bytes",
    "parse_npy",
    "respond",
]

#: a header of JSON answers: how many values of which outputs are null because JSON has no NaN and no infinity
NULLS = "X-Deployer-Nulls"


class Decoded(msgspec.Struct, frozen=True):
    """A valid request: arrays that fit the spec, with the batch axis where the model has one.

    `sizes` is the size of each Dim; `one_item` says that the batch axis was added here and must leave again; `ask` is
    how a request of the Open Inference Protocol wants its answer.
    """

    arrays: dict[str, Array]
    sizes: dict[str, int]
    one_item: bool
    ask: oip.Ask | None = None


class Encoded(msgspec.Struct, frozen=True):
    """A body with what must stand in the header beside it."""

    body: bytes
    content_type: str
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------ requests


def decode_request(
    body: bytes | bytearray | memoryview, content_type: str, spec: ModelSpec, header_bytes: int | None = None
) -> Decoded:
    """Parse and check one request. `header_bytes` is what the header `oip.HEADER_LENGTH` says, None without it.

    Raises RequestError (400, 413 for an archive that claims too much, 415 for a content type that is not understood).
    """
    if not body:
        body_kind(body, content_type)
        raise RequestError("the body is empty", expected=", ".join(map(str, spec.inputs)), got="nothing")
    arrays, ask = _arrays(body, content_type, spec, header_bytes)
    return check_arrays(arrays, spec, ask)


def check_arrays(arrays: dict[str, Array], spec: ModelSpec, ask: oip.Ask | None = None) -> Decoded:
    """Named arrays, one item or a batch, as a request. Raises RequestError (400)."""
    one_item = _is_one_item(arrays, spec)
    if one_item:
        arrays = {name: _with_axis(array, _batch_axis(spec.input(name), spec)) for name, array in arrays.items()}
    try:
        return Decoded(arrays, spec.check_inputs(arrays), one_item, ask)
    except RequestError as error:
        if not one_item:
            raise
        # The user sent no batch axis: what arrived is told as it arrived.
        array = arrays.get(error.field)
        note = " (one item, its batch axis of size 1 was added)" if array is not None else ""
        raise RequestError(
            f"{error}{note}", field=error.field, expected=error.expected, got=error.got, http_status=error.http_status
        ) from error


def _arrays(
    body: bytes | bytearray | memoryview, content_type: str, spec: ModelSpec, header_bytes: int | None
) -> tuple[dict[str, Array], oip.Ask | None]:
    if header_bytes is not None:
        return oip.decode(body, spec, header_bytes)
    kind = body_kind(body, content_type)
    if kind == NPY:
        return _sole(spec, parse_npy(body)), None
    if kind == NPZ:
        return archives.parse_npz(body, spec), None
    if kind == SAFETENSORS:
        return archives.parse_safetensors(body, spec), None
    document = json_text.parse_object(bytes(body), "the body")
    if oip.is_request(document):
        return oip.decode(body, spec)
    return json_text.named_arrays(document, spec), None


def _with_axis(array: Array, axis: int) -> Array:
    """`array` with a new axis of size 1, as np.expand_dims makes it, without the way there."""
    return array.reshape(*array.shape[:axis], 1, *array.shape[axis:])


def _batch_axis(tensor: TensorSpec, spec: ModelSpec) -> int:
    axis = tensor.axis_of(spec.batch)
    if axis is None:
        raise ValueError(f"{tensor} has no batch axis")
    return axis


def _is_one_item(arrays: Arrays, spec: ModelSpec) -> bool:
    """True when every array lacks exactly the batch axis; wrong ranks are left to the spec's own check."""
    if not spec.stackable:
        return False
    if len(arrays) == 1 == len(spec.inputs):  # nothing to disagree with
        array, tensor = next(iter(arrays.values())), spec.inputs[0]
        return tensor.name in arrays and array.ndim == len(tensor.shape) - 1
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
            f"a .npy body holds one array, this model has {len(spec.inputs)} inputs ({names}); send .npz or JSON",
            expected=names,
            got="one array",
        )
    return {spec.inputs[0].name: array}


# ------------------------------------------------------------------------------------------------------------- answers


def respond(outputs: Arrays, spec: ModelSpec, kind: str, ask: oip.Ask | None = None) -> Encoded:
    """Named outputs as a body of `kind`, one of KINDS; JSON in the form of the request that it answers."""
    if kind != JSON:
        return Encoded(encode_answer(outputs, spec, kind), kind)
    headers = _nulls(outputs, [tensor.name for tensor in spec.outputs] if ask is None else _as_text(ask))
    if ask is None:
        return Encoded(encode_answer(outputs, spec, JSON), JSON, headers)
    body, header_bytes = oip.encode(outputs, spec, ask, _labels(outputs, spec))
    if header_bytes is None:
        return Encoded(body, JSON, headers)
    return Encoded(body, BINARY, headers | {oip.HEADER_LENGTH: str(header_bytes)})


def _as_text(ask: oip.Ask) -> list[str]:
    return [name for name, as_bytes in ask.outputs if not as_bytes]


def _nulls(outputs: Arrays, names: list[str]) -> dict[str, str]:
    counts = {
        name: int(np.count_nonzero(~np.isfinite(outputs[name]))) for name in names if outputs[name].dtype.kind == "f"
    }
    text = ", ".join(f"{name}={count}" for name, count in counts.items() if count)
    return {NULLS: text} if text else {}


def encode_answer(outputs: Arrays, spec: ModelSpec, kind: str) -> bytes:
    """Named outputs as a body of `kind` (.npy carries the sole one). JSON is strict: NaN and infinities become null."""
    if kind == NPY:
        return npy_bytes(outputs[spec.outputs[0].name])
    ordered = {tensor.name: outputs[tensor.name] for tensor in spec.outputs}
    if kind == NPZ:
        return archives.npz_bytes(ordered)
    if kind == SAFETENSORS:
        return archives.safetensors_bytes(ordered)
    document: dict[str, Any] = {
        "model": spec.name,
        "version": spec.version,
        "outputs": {name: array.tolist() for name, array in ordered.items()},
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


# -------------------------------------------------------------------------------------------------- the client's side


def encode_inputs(arrays: Arrays) -> bytes:
    """Named arrays as a JSON request. Raises RequestError for NaN and infinities, which JSON cannot carry."""
    json_text.check_carried(arrays)
    return msgspec.json.encode({"inputs": {name: array.tolist() for name, array in arrays.items()}})


def encode_request(arrays: Arrays, kind: str) -> Encoded:
    """Named arrays as a request of `kind`: one of KINDS, "oip" or "oip-binary". Raises RequestError for what it does
    not carry."""
    if kind in ("oip", "oip-binary"):
        if kind == "oip":
            json_text.check_carried(arrays)
        body, header_bytes = oip.encode_request(arrays, binary=kind == "oip-binary")
        if header_bytes is None:
            return Encoded(body, JSON)
        return Encoded(body, BINARY, {oip.HEADER_LENGTH: str(header_bytes)})
    if kind == NPY:
        if len(arrays) != 1:
            raise RequestError(f"a .npy body carries one input, not {len(arrays)} ({', '.join(arrays)})")
        return Encoded(npy_bytes(next(iter(arrays.values()))), NPY)
    if kind == NPZ:
        return Encoded(archives.npz_bytes(arrays), NPZ)
    if kind == SAFETENSORS:
        return Encoded(archives.safetensors_bytes(arrays), SAFETENSORS)
    return Encoded(encode_inputs(arrays), JSON)


def decode_answer(body: bytes, content_type: str, header_bytes: int | None = None) -> dict[str, Any]:
    """What a server answered: `{"outputs": {name: array}, …}`; for .npy the sole output has the name "".

    JSON arrays come as float64, int64 or bool, null as NaN; the other kinds bit by bit. `header_bytes` is what the
    answer's header `oip.HEADER_LENGTH` says. Raises RequestError when it is none of these.
    """
    if header_bytes is not None:
        return oip.decode_answer(body, header_bytes)
    media = content_type.partition(";")[0].strip().lower()
    if media == NPY or body.startswith(MAGIC):
        return {"outputs": {"": parse_npy(body)}}
    if media == NPZ:
        return {"outputs": archives.read_npz(body)}
    if media == SAFETENSORS:
        return {"outputs": archives.read_safetensors(body)}
    document: dict[str, Any] = json_text.parse(body, dict[str, Any], "the answer")
    outputs = document.get("outputs")
    if isinstance(outputs, list):
        return oip.decode_answer(body, None)
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
