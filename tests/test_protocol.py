"""Bodies: whatever is valid arrives bit by bit, whatever is not is refused by name, nothing raises anything else."""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deployer.errors import RequestError
from deployer.protocol import (
    JSON,
    NPY,
    choose_answer,
    decode_answer,
    decode_request,
    encode_answer,
    encode_error,
    encode_inputs,
    npy_bytes,
    parse_npy,
)
from deployer.protocol.json_text import parse_object
from deployer.spec import DTYPES, Array, Dim, ModelSpec, TensorSpec

DIMS = {"batch": Dim(1, 4, 8), "length": Dim(1, 4, 6)}


def spec_of(dtype: str = "float32", shape: tuple[int | str, ...] = ("batch", 3)) -> ModelSpec:
    dims = {name: dim for name, dim in DIMS.items() if name in shape}
    batch = "batch" if "batch" in shape else None
    return ModelSpec("m", (TensorSpec("x", dtype, shape),), (TensorSpec("y", dtype, shape),), dims, batch)


TWO = ModelSpec(
    "two",
    (TensorSpec("ids", "int64", ("batch", "length")), TensorSpec("flag", "bool", ("batch",))),
    (TensorSpec("a", "float32", ("batch",)), TensorSpec("b", "int64", ("batch", "length"))),
    DIMS,
    "batch",
)


def refusal(body: bytes, content_type: str = JSON, spec: ModelSpec | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode_request(body, content_type, spec or spec_of())
    return caught.value


def status_of(body: bytes, content_type: str, spec: ModelSpec) -> int:
    try:
        decode_request(body, content_type, spec)
    except RequestError as error:
        return error.http_status
    return 200


def npy(array: Array, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def arrays(dtype: str, *, finite: bool) -> st.SearchStrategy[Array]:
    elements: dict[str, Any] = {"allow_nan": False, "allow_infinity": False} if finite and dtype[0] == "f" else {}
    return hnp.arrays(dtype, st.tuples(st.integers(1, 8), st.just(3)), elements=elements or None)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_json_carries_every_value_of_every_dtype(dtype: str, data: st.DataObject) -> None:
    array = data.draw(arrays(dtype, finite=True))
    decoded = decode_request(encode_inputs({"x": array}), JSON, spec_of(dtype))
    assert decoded.arrays["x"].dtype == array.dtype
    assert decoded.arrays["x"].tobytes() == np.ascontiguousarray(array).tobytes() or np.array_equal(
        decoded.arrays["x"], array
    )  # JSON has one zero too few: -0.0 may stand for 0.0
    assert (decoded.one_item, decoded.sizes) == (False, {"batch": len(array)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F", ">"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_npy_carries_every_bit_in_any_memory_layout(dtype: str, order: str, data: st.DataObject) -> None:
    array = data.draw(arrays(dtype, finite=False))
    stored = array.astype(array.dtype.newbyteorder(">")) if order == ">" else np.asarray(array, order=order)
    decoded = decode_request(npy(stored), NPY, spec_of(dtype)).arrays["x"]
    assert decoded.dtype == array.dtype
    assert decoded.dtype.isnative
    assert decoded.tobytes() == array.tobytes()
    assert parse_npy(npy_bytes(array)).tobytes() == array.tobytes()


@given(body=st.binary(max_size=300) | st.binary(max_size=200).map(lambda tail: b"\x93NUMPY\x01\x00" + tail))
@settings(max_examples=250, deadline=None)
def test_no_body_raises_anything_but_a_refusal(body: bytes) -> None:
    for content_type in ("", JSON, NPY, "application/octet-stream"):
        for spec in (spec_of(), TWO):
            assert status_of(body, content_type, spec) in (200, 400, 415)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(value=VALUES)
@settings(max_examples=250, deadline=None)
def test_json_of_any_shape_is_an_array_of_the_spec_or_refused(value: Any) -> None:
    for dtype in ("float32", "int64", "bool", "uint8"):
        body = json.dumps({"inputs": {"x": value}}).encode()
        if (status := status_of(body, JSON, spec_of(dtype))) != 200:
            assert status == 400
            continue
        decoded = decode_request(body, JSON, spec_of(dtype))
        rows = [value] if decoded.one_item else value
        assert decoded.arrays["x"].dtype == dtype
        np.testing.assert_array_equal(decoded.arrays["x"], np.array(rows, dtype))
        assert all(type(item) in {"f": (int, float), "b": (bool,)}.get(np.dtype(dtype).kind, (int,))
                   for row in rows for item in row)  # fmt: skip


@given(header=st.binary(max_size=120), shape=st.lists(st.integers(0, 2**62), max_size=5))
@settings(max_examples=150, deadline=None)
def test_npy_headers_that_lie_are_refused_and_allocate_nothing(header: bytes, shape: list[int]) -> None:
    claims = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({', '.join(map(str, shape))},), }}".encode()
    for text in (header, claims):
        body = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(16)
        try:
            array = parse_npy(body)
        except RequestError:
            continue
        assert array.nbytes == 16 or 0 in array.shape


def test_forms_of_one_request_mean_the_same() -> None:
    forms = (b'{"inputs": {"x": [1, 2, 3]}}', b'{"inputs": [1, 2, 3]}', b'{"x": [1, 2, 3]}', b' {"x":[1.0,2e0,3]} ')
    for body in forms:
        decoded = decode_request(body, JSON, spec_of())
        assert decoded.one_item
        np.testing.assert_array_equal(decoded.arrays["x"], np.array([[1, 2, 3]], np.float32))
    assert not decode_request(b'{"x": [[1, 2, 3]]}', JSON, spec_of()).one_item


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"x": [1, 2, 3]}', ""),
        (b'{"x": [1, 2, 3]}', "Application/JSON ; charset=UTF-8"),
        (npy(np.array([1, 2, 3], np.float32)), ""),
        (npy(np.array([1, 2, 3], np.float32)), "application/octet-stream"),
        (bytearray(npy(np.array([1, 2, 3], np.float32))), NPY),
    ],
)
def test_the_kind_of_body_follows_from_content_type_and_first_bytes(body: bytes, content_type: str) -> None:
    np.testing.assert_array_equal(decode_request(body, content_type, spec_of()).arrays["x"], [[1, 2, 3]])


def test_the_batch_axis_may_stand_anywhere_or_nowhere() -> None:
    middle = spec_of("float32", (2, "batch", 1))
    one = decode_request(b'{"x": [[5], [6]]}', JSON, middle)
    assert (one.one_item, one.arrays["x"].shape) == (True, (2, 1, 1))
    fixed = spec_of("float32", (2,))
    whole = decode_request(b'{"x": [5, 6]}', JSON, fixed)
    assert (whole.one_item, whole.arrays["x"].shape) == (False, (2,))
    scalar = decode_request(b'{"x": 7}', JSON, spec_of("int64", ("batch",)))
    assert (scalar.one_item, scalar.arrays["x"].tolist()) == (True, [7])


def test_several_inputs_are_items_or_batches_together() -> None:
    one = decode_request(b'{"ids": [1, 2], "flag": true}', JSON, TWO)
    assert (one.one_item, one.sizes) == (True, {"batch": 1, "length": 2})
    mixed = refusal(b'{"ids": [[1, 2]], "flag": true}', spec=TWO)
    assert mixed.field == "flag"
    assert "one item" in str(mixed)
    unequal = refusal(b'{"ids": [[1, 2]], "flag": [true, false]}', spec=TWO)
    assert unequal.field == "flag"


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        (b'{"x": [1, 2', "", "no valid JSON"),
        (b"", "", "empty"),
        (b"[1, 2, 3]", "", "Expected `object`"),
        (b'{"x": [[1, 2, 3], [4]]}', "x", "ragged"),
        (b'{"x": [1, 2, NaN]}', "", "no valid JSON"),
        (b'{"x": [1, 2, 1e39]}', "x", "does not fit float32"),
        (b'{"x": [1, 2, 1e999]}', "x", "out of range"),
        (b'{"x": [1, 2, null]}', "x", "got `null`"),
        (b'{"x": [1, 2, "3"]}', "x", "got `str`"),
        (b'{"x": [true, 2, 3]}', "x", "got `bool`"),
        (b'{"x": [1, 2]}', "x", "size 2 on axis 1"),
        (b'{"x": [[[1, 2, 3]]]}', "x", "number of axes"),
        (b'{"z": [1, 2, 3]}', "z", "unknown input 'z'"),
        (b'{"inputs": [1, 2, 3], "parameters": {}}', "parameters", "unknown key 'parameters'"),
        (b'{"inputs": {}}', "x", "missing"),
        (b'{"x": [' + b"[1, 2, 3]," * 8 + b"[1, 2, 3]]}", "x", "allowed 1 to 8"),
        (b'{"x": []}', "x", "size 0"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "", "nested too deeply"),
        (b'{"x": ' + b"[" * 40 + b"1" + b"]" * 40 + b"}", "x", "nested too deeply"),
        (b"\x1f\x8b\x08\x00", "content-type", "gzip"),
    ],
)
def test_what_is_wrong_is_refused_by_name(body: bytes, field: str, said: str) -> None:
    error = refusal(body)
    assert error.field == field
    assert said in str(error)
    assert "\n" not in str(error)
    assert error.http_status == (415 if field == "content-type" else 400)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int64", "1.5"), ("int64", "1.0"), ("int64", "9223372036854775808"), ("uint8", "256"), ("uint8", "-1"),
     ("int8", "128"), ("bool", "1"), ("bool", '"true"'), ("int32", "true"), ("float16", "70000")],
)  # fmt: skip
def test_no_value_is_bent_to_its_dtype(dtype: str, value: str) -> None:
    assert refusal(f'{{"x": [{value}, {value}, {value}]}}'.encode(), spec=spec_of(dtype)).field == "x"


def test_the_largest_integers_arrive_exactly() -> None:
    values = [2**63 - 1, -(2**63), 2**53 + 1]
    decoded = decode_request(json.dumps({"x": values}).encode(), JSON, spec_of("int64"))
    assert decoded.arrays["x"].tolist() == [values]


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        raise AssertionError("unpickled")


@pytest.mark.parametrize(
    "body",
    [
        npy(np.array([1, None], dtype=object), allow_pickle=True),
        npy(np.zeros(3, [("a", "<f4")])),
        npy(np.array(["a", "b", "c"])),
        npy(np.zeros(3, "c8")),
        npy(np.arange(3.0, dtype=np.float32))[:-1],
        npy(np.arange(3.0, dtype=np.float32)) + b"\0",
        npy(np.arange(3.0, dtype=np.float32)).replace(b"(3,)", b"(-3,)"),
        npy(np.arange(3.0, dtype=np.float32)).replace(b"<f4", b"<f3"),
        npy(np.zeros(3, bool))[:-1] + b"\x02",
        b"\x93NUMPY\x01\x00\x76\x00" + b"(" * 118,
        b"\x93NUMPY\x09\x00\x76\x00" + b" " * 118,
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        b"\x93NUMPY",
        pickle.dumps([1, 2, 3]),
        b'{"x": [1, 2, 3]}',
    ],
)
def test_npy_bodies_that_are_none_are_refused(body: bytes) -> None:
    assert refusal(body, NPY).http_status == 400


def test_npy_dtype_must_match_exactly() -> None:
    error = refusal(npy(np.arange(3.0)), NPY)
    assert (error.field, error.expected, error.got) == ("x", "x: float32[batch, 3]", "float64[1, 3]")


def test_npy_does_not_carry_several_inputs() -> None:
    assert "2 inputs (ids, flag)" in str(refusal(npy(np.arange(3)), NPY, TWO))


@pytest.mark.parametrize("content_type", ["text/html", "application/x-www-form-urlencoded", "multipart/form-data; a=b",
                                          "application/json; charset=utf-16"])  # fmt: skip
def test_other_content_types_are_refused_with_415(content_type: str) -> None:
    assert refusal(b'{"x": [1, 2, 3]}', content_type).http_status == 415


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", JSON), ("*/*", JSON), ("application/*", JSON), (JSON, JSON), (NPY, NPY), ("application/octet-stream", NPY),
        (f"{NPY}, */*;q=0.1", NPY), (f"{JSON};q=0.2, {NPY};q=0.9", NPY), (f"text/html, {JSON};q=0.9", JSON),
        (f"{NPY};q=0, */*", JSON), ("APPLICATION/JSON", JSON),
    ],
)  # fmt: skip
def test_the_accept_header_chooses(accept: str, kind: str) -> None:
    assert choose_answer(accept, spec_of()) == kind


@pytest.mark.parametrize(("accept", "spec"), [("text/html", spec_of()), (f"{JSON};q=0", spec_of()), (NPY, TWO)])
def test_what_cannot_be_accepted_is_406(accept: str, spec: ModelSpec) -> None:
    with pytest.raises(RequestError) as caught:
        choose_answer(accept, spec)
    assert caught.value.http_status == 406
    if spec is TWO:
        assert "a, b" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"inputs": {"x": [[1, 2, 3]]}, "inputs": {"x": [[4, 5, 6]]}}', "inputs"),
        (b'{"inputs": {"x": [1, 2, 3], "x": [1, 2, 3]}}', "x"),
        (b'{"x": [1, 2, 3], "\\u0078": [4, 5, 6]}', "x"),
        (b'{"x": [1, 2, 3], "y": 1, "x": [4, 5, 6]}', "x"),
        (b'{"x": ' + b"9" * 5000 + b', "x": [4, 5, 6]}', "x"),
        (b'{"x": ' + b"[" * 900 + b"]" * 900 + b', "x": [4, 5, 6]}', "x"),
    ],
)
def test_a_key_that_stands_twice_is_refused_by_name(body: bytes, key: str) -> None:
    error = refusal(body)
    assert error.http_status == 400
    assert error.field == key
    assert f"the key '{key}' stands twice" in str(error)


@given(
    document=st.dictionaries(
        st.text(), st.recursive(st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists)
    ),
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
    repeated=st.integers(0, 9),
)
@settings(deadline=None)
def test_keys_that_stand_once_are_no_repetition(
    document: dict[str, Any], indent: int | None, ascii_only: bool, repeated: int
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    assert {key: msgspec.json.decode(value) for key, value in parse_object(text.encode(), "it").items()} == document
    if repeated < len(document):
        key = list(document)[repeated]
        again = f"{text.rstrip()[:-1]}, {json.dumps(key)}: 1}}".encode()
        with pytest.raises(RequestError, match="stands twice in it"):
            parse_object(again, "it")


def test_json_is_preferred_where_npy_cannot_carry_the_outputs() -> None:
    assert choose_answer(f"{NPY}, {JSON};q=0.1", TWO) == JSON


def test_answers_are_strict_json_and_name_what_answered() -> None:
    outputs = {"y": np.array([[1.5, np.nan, np.inf]], np.float32)}
    body = encode_answer(outputs, spec_of(), JSON)
    assert json.loads(body, parse_constant=pytest.fail) == {
        "model": "m", "version": "1.0", "outputs": {"y": [[1.5, None, None]]}
    }  # fmt: skip
    np.testing.assert_array_equal(decode_answer(body, JSON)["outputs"]["y"], [[1.5, np.nan, np.nan]])


@given(array=arrays("float32", finite=True))
@settings(max_examples=50, deadline=None)
def test_float32_answers_survive_json(array: Array) -> None:
    body = encode_answer({"y": array}, spec_of(), JSON)
    np.testing.assert_array_equal(decode_answer(body, JSON)["outputs"]["y"].astype(np.float32), array)


def test_labels_name_the_largest_entry() -> None:
    spec = ModelSpec(
        "m", (TensorSpec("x", "float32", ("batch", 3)),), (TensorSpec("y", "float32", ("batch", 3)),),
        {"batch": Dim()}, "batch", labels=("cat", "dog", "bird"),
    )  # fmt: skip
    many = np.array([[0, 2, 1], [9, 0, 0], [np.nan, 0, 1]], np.float32)
    assert msgspec.json.decode(encode_answer({"y": many}, spec, JSON))["labels"] == {"y": ["dog", "cat", None]}
    assert msgspec.json.decode(encode_answer({"y": many[0]}, spec, JSON))["labels"] == {"y": "dog"}


def test_npy_answers_are_bit_exact() -> None:
    array = np.array([[np.nan, -0.0, np.inf]], np.float32)
    body = encode_answer({"y": array}, spec_of(), NPY)
    assert np.load(io.BytesIO(body), allow_pickle=False).tobytes() == array.tobytes()
    assert decode_answer(body, NPY)["outputs"][""].tobytes() == array.tobytes()


def test_errors_have_one_form() -> None:
    assert json.loads(encode_error("no", field="x", expected="a", got="b")) == {
        "error": {"message": "no", "field": "x", "expected": "a", "got": "b"}
    }


@pytest.mark.parametrize("array", [np.array([np.nan]), np.array([np.inf]), np.array(["a"]), np.array([None])])
def test_what_json_cannot_carry_is_not_sent(array: Array) -> None:
    with pytest.raises(RequestError, match="'x'"):
        encode_inputs({"x": array})


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"outputs": 1}', b'{"outputs": {"y": [[1], [1, 2]]}}',
                                  b'{"outputs": {"y": "a"}}', b"\xff"])  # fmt: skip
def test_answers_that_are_none_are_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        decode_answer(body, JSON)
