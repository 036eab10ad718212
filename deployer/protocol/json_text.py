"""JSON: inputs by name, each value decoded straight to its dtype, so that no number changes on the way."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from types import GenericAlias
from typing import Annotated, Any

import msgspec
import numpy as np

from deployer.errors import RequestError, nearest
from deployer.spec import Array, Arrays, ModelSpec, TensorSpec

_RANK_LIMIT = 32
_SPACE = re.compile(rb"[ \t\r\n]*")
_KEY = re.compile(rb'[ \t\r\n]*"(?:[^"\\]|\\.)*"[ \t\r\n]*:[ \t\r\n]*')

#: JSON's own check of a number, by dtype: what it lets through fits the dtype
_SCALARS: dict[str, Any] = {
    "bool": bool,
    **{
        name: Annotated[int, msgspec.Meta(ge=int(np.iinfo(name).min), le=int(np.iinfo(name).max))]
        for name in ("uint8", "int8", "int16", "int32", "int64")
    },
    **dict.fromkeys(("float16", "float32", "float64"), float),
}


def parse(data: bytes, kind: Any, what: str, field: str = "", expected: str = "") -> Any:
    """`data` as JSON of the type `kind`. Raises RequestError that calls it `what`."""
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


def parse_object(data: bytes, what: str) -> dict[str, msgspec.Raw]:
    """The keys of a JSON object and their values, not decoded yet. Raises RequestError for a key that stands twice:
    JSON leaves open which of the two counts."""
    found: dict[str, msgspec.Raw] = parse(data, dict[str, msgspec.Raw], what)
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


def check_names(given: Sequence[str], spec: ModelSpec) -> None:
    """Raises RequestError naming an input that is unknown or missing."""
    names = [tensor.name for tensor in spec.inputs]
    for name in given:
        if name not in names:
            raise RequestError(
                f"unknown input '{name}'{nearest(name, names)}", field=name, expected=", ".join(names), got=name
            )
    for tensor in spec.inputs:
        if tensor.name not in given:
            raise RequestError(
                f"input '{tensor.name}' is missing; expected {tensor}",
                field=tensor.name,
                expected=str(tensor),
                got=", ".join(given) or "nothing",
            )


def named_arrays(document: dict[str, msgspec.Raw], spec: ModelSpec) -> dict[str, Array]:
    """The arrays of `{"inputs": …}`, or of the object without that wrapper."""
    raw = _inputs_of(document, [tensor.name for tensor in spec.inputs])
    check_names(list(raw), spec)
    return {tensor.name: nested_array(bytes(raw[tensor.name]), tensor) for tensor in spec.inputs}


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
        return parse_object(bytes(value), "'inputs'")
    if len(names) > 1:
        raise RequestError(
            f"this model has {len(names)} inputs; send 'inputs' as an object with {', '.join(names)}",
            field="inputs",
            expected=f"an object with {', '.join(names)}",
            got="an array or a number",
        )
    return {names[0]: value}


def nested_array(data: bytes, tensor: TensorSpec) -> Array:
    """One nested list as an array of the tensor's dtype. Its rank is the number of leading brackets."""
    rank = 0
    for byte in data:
        if byte == ord("["):
            rank += 1
        elif byte not in b" \t\r\n":
            break
    if rank > _RANK_LIMIT:
        raise bad_array(tensor, "is nested too deeply", f"{rank} levels")
    kind: Any = _SCALARS[tensor.dtype]
    for _ in range(rank):
        kind = GenericAlias(list, (kind,))
    values = parse(data, kind, f"input '{tensor.name}'", tensor.name, str(tensor))
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=tensor.dtype)
    except ValueError as error:
        raise bad_array(tensor, "is ragged: its lists differ in length", "ragged lists") from error
    if array.dtype.kind == "f" and not np.isfinite(array).all():  # JSON has no infinity: the number was too large
        raise bad_array(tensor, f"holds a number that does not fit {tensor.dtype}", "a number out of range")
    return array


def bad_array(tensor: TensorSpec, reason: str, got: str) -> RequestError:
    return RequestError(
        f"input '{tensor.name}' {reason}; expected {tensor}", field=tensor.name, expected=str(tensor), got=got
    )


def check_carried(arrays: Arrays) -> None:
    """Raises RequestError for what JSON cannot carry: NaN, infinities, and what is no number."""
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise RequestError(f"input '{name}' has dtype {array.dtype}; numbers and bools are expected", field=name)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise RequestError(f"input '{name}' holds NaN or infinity, which JSON cannot carry; send .npy", field=name)
