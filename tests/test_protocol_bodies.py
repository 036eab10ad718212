"""Archives and the Open Inference Protocol: every bit arrives, every lie is refused by name."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save

from deployer.errors import RequestError
from deployer.predictor import Predictor, Request, Response
from deployer.protocol import (
    JSON,
    KINDS,
    NPY,
    NPZ,
    NULLS,
    SAFETENSORS,
    decode_answer,
    decode_request,
    encode_request,
    npy_bytes,
    respond,
)
from deployer.protocol.oip import HEADER_LENGTH, Ask
from deployer.spec import DTYPES, Array, Arrays, Dim, ModelSpec, TensorSpec
from tests.test_protocol import TWO, spec_of

FORMS = (NPZ, SAFETENSORS, "oip-binary")


def bits(arrays: Arrays) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()}


def two(batch: int, length: int) -> dict[str, Array]:
    return {
        "ids": np.arange(batch * length, dtype=np.int64).reshape(batch, length) - 3,
        "flag": np.arange(batch) % 2 == 0,
    }


def decoded(arrays: Arrays, form: str, spec: ModelSpec) -> dict[str, Array]:
    sent = encode_request(arrays, form)
    length = sent.headers.get(HEADER_LENGTH)
    return decode_request(sent.body, sent.content_type, spec, int(length) if length else None).arrays


def refusal(body: bytes, content_type: str, spec: ModelSpec, header_bytes: int | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode_request(body, content_type, spec, header_bytes)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_binary_bodies_carry_every_bit_of_every_dtype(dtype: str, form: str, data: st.DataObject) -> None:
    array = data.draw(hnp.arrays(dtype, st.tuples(st.integers(1, 8), st.just(3))))
    assert bits(decoded({"x": array}, form, spec_of(dtype))) == bits({"x": array})


@pytest.mark.parametrize("form", [*FORMS, JSON, "oip"])
def test_several_inputs_arrive_by_name(form: str) -> None:
    sent = two(3, 4)
    assert bits(decoded(sent, form, TWO)) == bits(sent)
    backwards = dict(reversed(sent.items()))
    got = decoded(backwards, form, TWO)
    assert {name: array.tolist() for name, array in got.items()} == {name: a.tolist() for name, a in sent.items()}


def test_bytes_without_a_type_are_told_by_their_first_bytes() -> None:
    sent = two(2, 2)
    for form in (NPZ, SAFETENSORS):
        body = encode_request(sent, form).body
        for content_type in ("", "application/octet-stream"):
            assert bits(decode_request(body, content_type, TWO).arrays) == bits(sent)
    assert refusal(b"abcd", "application/octet-stream", TWO).http_status == 400
    assert refusal(encode_request(sent, NPZ).body, SAFETENSORS, TWO).http_status == 400


@given(body=st.binary(max_size=200), claimed=st.none() | st.integers(-5, 300), kind=st.sampled_from([*KINDS, ""]))
@settings(max_examples=300, deadline=None)
def test_no_bytes_raise_anything_but_a_refusal(body: bytes, claimed: int | None, kind: str) -> None:
    for prefix in (b"", b"PK\x03\x04", struct.pack("<Q", 20) + b"{"):
        try:
            decode_request(prefix + body, kind, TWO, claimed)
        except RequestError as error:
            assert error.http_status in (400, 413, 415)  # noqa: PT017 - hypothesis shows the body


@given(data=st.data(), form=st.sampled_from(FORMS))
@settings(max_examples=200, deadline=None)
def test_a_damaged_body_is_refused_or_is_a_legal_request(data: st.DataObject, form: str) -> None:
    sent = encode_request(two(2, 3), form)
    body = bytearray(sent.body)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    length = sent.headers.get(HEADER_LENGTH)
    try:
        TWO.check_inputs(decode_request(body, sent.content_type, TWO, int(length) if length else None).arrays)
    except RequestError as error:
        assert error.http_status in (400, 413, 415)  # noqa: PT017


# ------------------------------------------------------------------------------------------------------------ archives


def npz(entries: list[tuple[str, bytes]], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return buffer.getvalue()


def test_compressed_archives_are_taken_and_bombs_are_not_unpacked() -> None:
    array = np.ones((2, 3), np.float32)
    assert decode_request(npz([("x.npy", npy_bytes(array))]), NPZ, spec_of()).arrays["x"].tolist() == array.tolist()
    bomb = npz([("x.npy", npy_bytes(np.zeros((5_000_000, 3), np.float32)))])
    assert len(bomb) < 100_000
    error = refusal(bomb, NPZ, spec_of())
    assert (error.http_status, error.field) == (413, "x")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "'x' is missing"),
        ([("x.npy", npy_bytes(np.ones((1, 3), np.float32)))] * 2, "same name"),
        ([("x", npy_bytes(np.ones((1, 3), np.float32)))], "no .npy file"),
        ([("../x.npy", b"")], "unknown input '../x'"),
        ([("x.npy", b"abc")], ".npy body"),
        ([("x.npy", npy_bytes(np.ones((1, 3)))), ("y.npy", b"")], "unknown input 'y'"),
        ([("x.npy", npy_bytes(np.ones((1, 3))))], "dtype"),
    ],
)
def test_archives_that_do_not_fit_are_refused(entries: list[tuple[str, bytes]], said: str) -> None:
    body = npz(entries) or b"PK\x05\x06" + bytes(18)
    if not entries:
        body = b"PK\x03\x04" + body  # a zip must be known by its first bytes
    assert said in str(refusal(body, NPZ, spec_of()))


def test_an_archive_compressed_otherwise_is_refused() -> None:
    body = npz([("x.npy", npy_bytes(np.ones((1, 3), np.float32)))], zipfile.ZIP_BZIP2)
    assert "deflate" in str(refusal(body, NPZ, spec_of()))


def test_bools_of_other_bytes_are_refused() -> None:
    arrays = two(1, 2)
    body = save(arrays)
    assert body[-1:] in (b"\x00", b"\x01")
    place = body.rindex(np.asarray(arrays["flag"]).tobytes())
    assert "bools" in str(refusal(body[:place] + b"\x07" + body[place + 1 :], SAFETENSORS, TWO))


# ------------------------------------------------------------------------------------------------------------------ OIP


def oip(**changes: Any) -> dict[str, Any]:
    entry = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
    return {"inputs": [entry | changes]}


def test_data_may_be_flat_or_nested() -> None:
    for data in ([1, 2, 3], [[1, 2, 3]]):
        got = decode_request(json.dumps(oip(data=data)).encode(), JSON, spec_of())
        assert got.arrays["x"].tolist() == [[1, 2, 3]]
        assert got.ask == Ask("", (("y", False),))


@pytest.mark.parametrize(
    ("document", "field", "said"),
    [
        (oip(datatype="FP64"), "x", "FP64 instead of FP32"),
        (oip(datatype="BYTES"), "x", "BYTES instead of FP32"),
        (oip(datatype="FP3"), "x", "did you mean"),
        (oip(shape=[1, 4]), "x", "data of the shape [3]"),
        (oip(shape=[-1, 3]), "x", "negative"),
        (oip(data=[1, 2, None]), "x", "null"),
        (oip(name="z"), "z", "unknown input 'z'"),
        (oip(shape=[2**40, 2**40]), "x", "data of the shape"),
        (oip(shape=[0, 2**62, 2**62], data=[]), "x", "has a shape that no array can have"),
        (oip(shape=[0, 10**30], data=[]), "x", "has a shape that no array can have"),
        (oip(shape=[0] * 70, data=[]), "x", "has a shape that no array can have"),
        (oip(parameters={"shared_memory_region": "a"}), "shared_memory_region", "not supported"),
        (oip() | {"parameters": {"sequence_id": 1}}, "sequence_id", "not supported"),
        (oip() | {"outputs": [{"name": "z"}]}, "z", "unknown output 'z'"),
        (oip() | {"outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "classification", "not supported"),
        (oip() | {"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "binary_data", "true or false"),
        ({"inputs": oip()["inputs"] * 2}, "x", "stands twice"),
        ({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32"}]}, "x", "has no data"),
        ({"inputs": [{"name": "x"}]}, "", "shape"),
    ],
)
def test_what_is_wrong_with_an_oip_request_is_said_by_name(document: Any, field: str, said: str) -> None:
    error = refusal(json.dumps(document).encode(), JSON, spec_of())
    assert error.field == field
    assert said in str(error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda head, tail: (head, tail[:-1], len(head)), "11 bytes are left"),
        (lambda head, tail: (head, tail + b"\0", len(head)), "1 bytes follow"),
        (lambda head, tail: (head, tail, len(head) + 1), "no valid JSON"),
        (lambda head, tail: (head, tail, 10_000), "the body has"),
        (lambda head, tail: (head, tail, 0), "the body has"),
        (lambda head, tail: (head.replace(b"size\":12", b"size\":-1"), tail, None), "takes 12"),
        (lambda head, tail: (head.replace(b"size\":12", b"size\":\"12\""), tail, None), "takes 12"),
        (lambda head, tail: (head.replace(b"[1,3]", b"[1,2]"), tail, None), "takes 8 bytes"),
    ],
)  # fmt: skip
def test_lengths_that_lie_are_refused(change: Any, said: str) -> None:
    sent = encode_request({"x": np.ones((1, 3), np.float32)}, "oip-binary")
    length = int(sent.headers[HEADER_LENGTH])
    head, tail, claimed = change(sent.body[:length], sent.body[length:])
    error = refusal(head + tail, "application/octet-stream", spec_of(), len(head) if claimed is None else claimed)
    assert said in str(error)


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("kind", [NPY, NPZ, SAFETENSORS])
def test_binary_answers_are_bit_exact(kind: str) -> None:
    array = np.array([[np.nan, -0.0, np.inf]], np.float32)
    made = respond({"y": array}, spec_of(), kind)
    assert (made.content_type, made.headers) == (kind, {})
    [got] = decode_answer(made.body, kind)["outputs"].values()
    assert got.tobytes() == array.tobytes()


def test_nulls_are_counted_in_a_header() -> None:
    outputs = {"y": np.array([[np.nan, 1, np.inf]], np.float32)}
    made = respond(outputs, spec_of(), JSON)
    assert made.headers == {NULLS: "y=2"}
    made = respond(outputs, spec_of(), JSON, Ask("", (("y", False),)))
    assert made.headers == {NULLS: "y=2"}
    assert json.loads(made.body)["outputs"][0]["data"] == [None, 1.0, None]
    assert respond(outputs, spec_of(), JSON, Ask("", (("y", True),))).headers.keys() == {HEADER_LENGTH}


def test_an_oip_answer_has_the_id_the_outputs_and_the_form_asked_for() -> None:
    outputs = {"a": np.array([0.5], np.float32), "b": np.array([[7, 8]], np.int64)}
    made = respond(outputs, TWO, JSON, Ask("q1", (("b", True), ("a", False))))
    length = int(made.headers[HEADER_LENGTH])
    assert json.loads(made.body[:length]) == {
        "model_name": "two",
        "model_version": "1.0",
        "id": "q1",
        "outputs": [
            {"name": "b", "datatype": "INT64", "shape": [1, 2], "parameters": {"binary_data_size": 16}},
            {"name": "a", "datatype": "FP32", "shape": [1], "data": [0.5]},
        ],
    }
    assert made.body[length:] == struct.pack("<qq", 7, 8)
    answer = decode_answer(made.body, made.content_type, length)
    assert (answer["model"], answer["id"]) == ("two", "q1")
    assert bits(answer["outputs"]) == bits({name: outputs[name] for name in ("b", "a")})


def test_labels_stand_in_the_parameters_of_an_oip_answer() -> None:
    spec = ModelSpec(
        "m", (TensorSpec("x", "float32", ("batch", 2)),), (TensorSpec("y", "float32", ("batch", 2)),),
        {"batch": Dim()}, "batch", labels=("cat", "dog"),
    )  # fmt: skip
    made = respond({"y": np.array([[0, 1]], np.float32)}, spec, JSON, Ask("", (("y", False),)))
    assert decode_answer(made.body, JSON)["labels"] == {"y": ["dog"]}


class Doubler:
    """A runner in closed form: `two`'s outputs are the number of ids that count, and the ids doubled."""

    spec = TWO

    def __call__(self, arrays: Arrays) -> dict[str, Array]:
        ids = arrays["ids"]
        return {"a": ids.sum(1).astype(np.float32) * arrays["flag"], "b": ids * 2}

    def close(self) -> None:
        pass


def test_requests_of_every_form_share_one_run_and_get_their_own_answers() -> None:
    predictor = Predictor(Doubler(), batch_independent=True)  # type: ignore[arg-type]
    forms = [JSON, NPZ, SAFETENSORS, "oip", "oip-binary"]
    requests, expected = [], []
    for index, form in enumerate(forms):
        arrays = two(1, 3) | {"ids": np.full((1, 3), index, np.int64)}
        sent = encode_request(arrays, form)
        accept = form if form in (NPZ, SAFETENSORS) else ""
        requests.append(Request(sent.body, sent.content_type, accept, sent.headers.get(HEADER_LENGTH, "")))
        expected.append(Doubler()(arrays))
    bad = Request(b"PK\x03\x04", NPZ)
    lying = Request(requests[-1].body, "", "", "99999")
    responses = predictor.answer([bad, *requests, lying])
    assert [response.status for response in responses] == [400, 200, 200, 200, 200, 200, 400]
    assert all(response.run_requests == 5 for response in responses[1:-1])
    for response, outputs in zip(responses[1:-1], expected, strict=True):
        assert_answers(response, outputs)


def assert_answers(response: Response, outputs: Arrays) -> None:
    length = response.headers.get(HEADER_LENGTH)
    got = decode_answer(response.body, response.content_type, int(length) if length else None)["outputs"]
    assert {name: array.tolist() for name, array in got.items()} == {name: a.tolist() for name, a in outputs.items()}
