"""Requests of every kind with one thing wrong with them, or several, and batches that mix them with right ones.

`batches()` is a hypothesis strategy; `judge` answers a batch by a predictor and returns what must not be: exceptions,
5xx, answers that differ from those to the same requests alone. Used by the tests and by `scripts/fuzz`.
"""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from deployer.formats import Loaded
from deployer.predictor import Predictor, Request, Response
from deployer.protocol import JSON, NPY, NPZ, SAFETENSORS, encode_request
from deployer.protocol.media import BINARY
from deployer.protocol.oip import DATATYPES, HEADER_LENGTH
from deployer.runtime import Runner
from deployer.spec import Array, Arrays, Dim, ModelSpec, TensorSpec

Draw = Callable[..., Any]

LOOKUP = ModelSpec(
    "lookup", (TensorSpec("ids", "int64", ("batch", 3), low=0, high=9),),
    (TensorSpec("values", "float32", ("batch", 3)),), {"batch": Dim(1, 4, 8)}, "batch",
)  # fmt: skip
POOLED = ModelSpec(
    "pooled",
    (
        TensorSpec("x", "float32", ("batch", "length")),
        TensorSpec("mask", "bool", ("batch", "length")),
        TensorSpec("n", "int16", ("batch", 2)),
    ),
    (
        TensorSpec("each", "float32", ("batch", "length")),
        TensorSpec("count", "int64", ("batch",)),
        TensorSpec("scores", "float32", ("batch", 2)),
    ),
    {"batch": Dim(1, 4, 8), "length": Dim(1, 4, 6)},
    "batch",
    labels=("a", "b"),
    masks={"length": "mask"},
)


def look_up(arrays: Arrays) -> dict[str, Array]:
    return {"values": np.arange(10, dtype=np.float32)[arrays["ids"]]}


def pool(arrays: Arrays) -> dict[str, Array]:
    with np.errstate(over="ignore"):
        each = 2 * arrays["x"] * arrays["mask"]
    n = arrays["n"]
    return {"each": each, "count": arrays["mask"].sum(1) + n.astype(np.int64).sum(1), "scores": n.astype(np.float32)}


#: name → (spec, function of one row at a time, Dims that are padded)
MODELS: dict[str, tuple[ModelSpec, Callable[[Arrays], dict[str, Array]], tuple[str, ...]]] = {
    "lookup": (LOOKUP, look_up, ()),
    "pooled": (POOLED, pool, ("length",)),
}
FORMS = (JSON, NPY, NPZ, SAFETENSORS, "oip", "oip-binary")


def predictor_of(name: str) -> Predictor:
    spec, call, padded = MODELS[name]
    runner = Runner(spec, Loaded(call, "arithmetic"))
    return Predictor(runner, batch_independent=True, padded=padded, max_request_bytes=200_000)


# ------------------------------------------------------------------------------------------------------ right requests


@st.composite
def arrays_of(draw: Draw, spec: ModelSpec) -> dict[str, Array]:
    """One item or a batch of legal inputs."""
    sizes = {name: draw(st.integers(dim.min, dim.max)) for name, dim in spec.dims.items()}
    one_item = draw(st.booleans())
    seed = np.random.default_rng(draw(st.integers(0, 999)))
    made = {}
    for tensor in spec.inputs:
        shape = [sizes.get(size, size) if isinstance(size, str) else size for size in tensor.shape]
        values = seed.integers(int(tensor.low or 0), 10, shape)
        made[tensor.name] = (values[0] if one_item else values).astype(tensor.dtype)
    return made


@st.composite
def right_requests(draw: Draw, spec: ModelSpec) -> Request:
    form = draw(st.sampled_from([form for form in FORMS if form != NPY or len(spec.inputs) == 1]))
    sent = encode_request(draw(arrays_of(spec)), form)
    accepted = [JSON, "*/*", "", NPZ, SAFETENSORS] + ([NPY] if len(spec.outputs) == 1 else [])
    return Request(
        sent.body, sent.content_type, draw(st.sampled_from(accepted)), dict(sent.headers).get(HEADER_LENGTH, "")
    )


# ------------------------------------------------------------------------------------------------------ wrong requests

#: JSON texts that stand where a value is expected
VALUES = st.sampled_from(
    [
        b"null", b"true", b"{}", b"[]", b"[[]]", b'""', b'"1"', b"NaN", b"-Infinity", b"1e999", b"-1e999", b"1e-999",
        b"1.5", b"-0", b"-0.0", b"1" * 400, b"-" + b"9" * 25, b"9223372036854775807", b"9223372036854775808", b"01",
        b"0x1", b"+1", b"1_0", b"1e", b".5", b'"\\ud800"', b'"\\u0000"', b"[" * 40 + b"]" * 40, b"[" * 3000,
        b"[" * 3000 + b"]" * 3000, b'{"a":' * 1500 + b"1" + b"}" * 1500, b"[1,[2]]", b"[null]", b"[1,2,3,]", b"[1 2]",
        b"[1e400,1,2]", b"[1.0,2,3]", b"[[0,1,2],[3,4]]", b"[true,1,2]", b"[0,1,32768]", b"/*x*/1", b"\xff", b"'a'",
    ]
)  # fmt: skip
NAMES = st.sampled_from(
    [
        "ids",
        "x",
        "mask",
        "n",
        "idz",
        "",
        "inputs",
        "a\x00b",
        "x" * 5000,
        "\u202eids",
        "é",
        "__proto__",
        "../ids",
        "name",
    ]
)
TYPES = st.one_of(
    st.sampled_from(
        [
            JSON, NPY, NPZ, SAFETENSORS, BINARY, "", "text/json", "application/json; charset=utf-16",
            "application/json;charset=\"UTF-8\"", "APPLICATION/JSON", "application/x-www-form-urlencoded",
            "multipart/x", "application/json; charset=", ";", "/", "*/*", "application/json, text/html", "text/csv",
            "application/x-pickle",
        ]
    ),
    st.text(max_size=30),
)  # fmt: skip
ACCEPTS = st.one_of(
    st.sampled_from(["", "*/*", NPY, NPZ, "text/html", "application/json;q=0", "*/*;q=0", "a/b;q=nan", ",,,", ";q=1"]),
    st.text(max_size=30),
)
LENGTHS = st.one_of(
    st.sampled_from(["", "0", "1", "-1", "1e3", "99999999999", "999999999999", " 5", "5 ", "0x5", "٣", "²", "5,5"]),
    st.integers(0, 400).map(str),
)


@st.composite
def changed_bytes(draw: Draw, body: bytes) -> bytes:
    """Bytes flipped, cut, doubled or put in."""
    data = bytearray(body)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.integers(0, 4)):
            case 0 if data:
                data[place] = draw(st.integers(0, 255))
            case 1:
                del data[place:]
            case 2:
                del data[place : place + draw(st.integers(1, 9))]
            case 3:
                data[place:place] = draw(st.binary(min_size=1, max_size=9))
            case _:
                data += data[place:]
    return bytes(data)


@st.composite
def json_bodies(draw: Draw, spec: ModelSpec) -> bytes:
    """A JSON request with other values, names, wrappings, keys that stand twice."""
    entries = [(tensor.name, json.dumps(a.tolist()).encode()) for tensor, a in draw(_pairs(spec))]
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(entries) - 1))
        name, value = entries[place]
        match draw(st.integers(0, 4)):
            case 0 | 1:
                entries[place] = (name, draw(VALUES))
            case 2:
                entries[place] = (draw(NAMES), value)
            case 3:
                entries.append((name, draw(VALUES)))
            case _:
                entries.append((draw(NAMES), value))
    body = b"{" + b",".join(json.dumps(name).encode() + b":" + value for name, value in entries) + b"}"
    match draw(st.integers(0, 3)):
        case 0:
            return b'{"inputs":' + body + b"}"
        case 1:
            return b'{"inputs":' + body + b',"inputs":' + draw(VALUES) + b"}"
        case 2:
            return b'{"inputs":' + draw(VALUES) + b"}"
        case _:
            return body


def _pairs(spec: ModelSpec) -> st.SearchStrategy[list[tuple[TensorSpec, Array]]]:
    return arrays_of(spec).map(lambda arrays: [(tensor, arrays[tensor.name]) for tensor in spec.inputs])


@st.composite
def oip_bodies(draw: Draw, spec: ModelSpec) -> tuple[bytes, str]:
    """An Open Inference request that lies about shapes, datatypes, sizes, names or parameters, with its header."""
    entries: list[dict[str, Any]] = []
    tail = b""
    binary = draw(st.booleans())
    for tensor, array in draw(_pairs(spec)):
        entry: dict[str, Any] = {
            "name": tensor.name, "shape": list(array.shape), "datatype": DATATYPES[tensor.dtype],
        }  # fmt: skip
        if binary:
            entry["parameters"] = {"binary_data_size": array.nbytes}
            tail += array.tobytes()
        else:
            entry["data"] = array.ravel().tolist()
        entries.append(entry)
    document: dict[str, Any] = {"inputs": entries, "parameters": {"binary_data_output": binary}}
    lies: dict[str, st.SearchStrategy[Any]] = {
        "shape": st.one_of(
            st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**62, 2**64, 10**30]), max_size=5),
            st.sampled_from([None, [1.5], ["3"], 3, [[3]], [1] * 40, [0] * 70, [True]]),
        ),
        "datatype": st.sampled_from(["INT32", "FP16", "BYTES", "BF16", "", "int64", "FP128", None, 7, "FP64", "BOOL"]),
        "name": NAMES,
        "data": st.sampled_from([None, [], {}, "x", [[[1]]], [1.5], [1] * 9000, [10**40], [[1, 2], [3]]]),
        "parameters": st.sampled_from(
            [{"binary_data_size": size} for size in (-1, 0, 1, 7, 8, 2**40, 10**30, 1.5, "8", True, None, [8])]
            + [{"shared_memory_region": "x"}, [], None, {"binary_data_size": 24, "x": 1}]
        ),
    }
    for _ in range(draw(st.integers(0, 2))):
        entry = draw(st.sampled_from(entries))
        key = draw(st.sampled_from(list(lies)))
        entry[key] = draw(lies[key])
    if draw(st.integers(0, 4)) == 0:
        key = draw(st.sampled_from(["outputs", "parameters", "id", "extra"]))
        document[key] = draw(
            st.sampled_from(
                [None, [], {}, [{"name": "nothing"}], [{"name": "values", "parameters": {"classification": 1}}], "7", 7,
                 [{"name": "values"}, {"name": "values"}], {"binary_data_output": 1}, {"sequence_id": 1}, "\ud800"]
            )
        )  # fmt: skip
    if draw(st.integers(0, 9)) == 0:
        entries.append(dict(entries[0]))
    head = json.dumps(document).encode()
    match draw(st.integers(0, 4)):
        case 0:
            return head + draw(changed_bytes(tail)), str(len(head))
        case 1:
            return head + tail, draw(LENGTHS)
        case 2:
            return head + tail + draw(st.binary(max_size=9)), str(len(head) + draw(st.integers(-3, 3)))
        case _:
            return head + tail, str(len(head)) if binary else ""


@st.composite
def npy_files(draw: Draw) -> bytes:
    """A .npy file whose header claims something else than follows."""
    descr = draw(st.sampled_from(
        ["<i8", ">i8", "<i4", "<f4", ">f4", "|b1", "<i2", "|O", "<f16", "<c8", "|V8", "<U3", "<M8[s]", "<i3", "i99",
         "|S2", "<f2", "=i8", "<u8"]
    ))  # fmt: skip
    shape = draw(st.sampled_from(
        ["(3,)", "(2, 3)", "()", "(0, 3)", "(-1,)", "(1000000000000,)", "(999999999999999999, 999999999999999999)",
         "(3", "3", "(3,,)", "(1,)" * 3, f"({'1,' * 40})", "(1.5,)", "(None,)", "(0,999999999999999999)"]
    ))  # fmt: skip
    order = draw(st.sampled_from(["True", "False", "1", "None"]))
    header = draw(st.sampled_from(
        ["{{'descr': '{d}', 'fortran_order': {o}, 'shape': {s}, }}", "{{'descr': '{d}', 'shape': {s}}}", "{{}}", "{d}",
         "{{'descr': [('a', '{d}')], 'fortran_order': {o}, 'shape': {s}}}", "__import__('os').getpid()",
         "{{'descr': '{d}', 'fortran_order': {o}, 'shape': {s}, 'shape': (3,)}}", "{{'descr': '{d}',"]
    )).format(d=descr, o=order, s=shape).encode()  # fmt: skip
    version = draw(st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x00\x00", b"\x09\x01"]))
    length = len(header) + draw(st.sampled_from([0, 0, 0, 1, -1, 60000]))
    packed = struct.pack("<H" if version[0] == 1 else "<I", max(length, 0))
    data = draw(st.sampled_from([b"", b"\x01" * 24, bytes(24), bytes(12), b"\xff" * 48, bytes(6)]))
    return b"\x93NUMPY" + version + packed + header + data


@st.composite
def npz_files(draw: Draw, spec: ModelSpec) -> bytes:
    """An archive with other names, entries twice, compressed otherwise, claims of other sizes."""
    buffer = io.BytesIO()
    names = [tensor.name for tensor in spec.inputs]
    with zipfile.ZipFile(buffer, "w") as archive:
        for _ in range(draw(st.integers(0, 4))):
            name = draw(st.one_of(st.sampled_from(names), NAMES))
            ending = draw(st.sampled_from([".npy", ".npy", "", ".npz", "/"]))
            info = zipfile.ZipInfo((name + ending).replace("\x00", ""))
            kinds = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
            info.compress_type = draw(st.sampled_from(kinds))
            data = draw(st.one_of(npy_files(), st.just(bytes(100_000)), st.binary(max_size=30)))
            with warnings.catch_warnings(action="ignore"):  # a name that stands twice is what is wanted
                archive.writestr(info, data)
    body = bytearray(buffer.getvalue())
    for mark, place in ((b"PK\x01\x02", 24), (b"PK\x01\x02", 8), (b"PK\x03\x04", 6), (b"PK\x05\x06", 8)):
        start = body.find(mark)
        if start >= 0 and draw(st.integers(0, 3)) == 0:  # sizes, flags (encrypted), counts
            value = draw(st.sampled_from([0, 1, 9, 0xFFFF]))
            body[start + place : start + place + 2] = struct.pack("<H", value)
    return bytes(body)


@st.composite
def safetensors_files(draw: Draw, spec: ModelSpec) -> bytes:
    """A header whose offsets, dtypes, shapes or length lie."""
    header: dict[str, Any] = {}
    start = 0
    for tensor, array in draw(_pairs(spec)):
        kinds = {"int64": "I64", "float32": "F32", "bool": "BOOL", "int16": "I16"}
        header[tensor.name] = {
            "dtype": kinds[tensor.dtype], "shape": list(array.shape), "data_offsets": [start, start + array.nbytes],
        }  # fmt: skip
        start += array.nbytes
    entry = draw(st.sampled_from(list(header.values())))
    match draw(st.integers(0, 5)):
        case 0:
            entry["dtype"] = draw(
                st.sampled_from(["BF16", "F8_E4M3", "U64", "I32", "F64", "", None, "C64", "F4", "U8"])
            )
        case 1:
            entry["shape"] = draw(
                st.sampled_from([[2**62, 2**62], [-1], [], [0], [1.5], None, [3, 1], [2**64], [1] * 80, "3"])
            )
        case 2:
            entry["data_offsets"] = draw(st.sampled_from([[0, 0], [8, 0], [0, 2**63], [-8, 0], [0], None, [0, 8, 16]]))
        case 3:
            header[draw(NAMES)] = dict(entry)
        case 4:
            header["__metadata__"] = draw(st.sampled_from([{}, {"a": "b"}, {"a": 1}, None, []]))
    text = json.dumps(header).encode()
    length = len(text) + draw(st.sampled_from([0, 0, 0, 1, -1, 10**6, 2**60, 2**63]))
    fill = draw(st.sampled_from([b"\x00", b"\x01", b"\x02", b"\xff"]))
    return struct.pack("<Q", max(length, 0) % 2**64) + text + fill * (start + draw(st.sampled_from([0, 0, 0, 1, -1])))


@st.composite
def texts(draw: Draw, spec: ModelSpec) -> bytes:
    """Right JSON in another encoding, or what is none."""
    right = encode_request(draw(arrays_of(spec)), JSON).body.decode()
    coding = draw(st.sampled_from(["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-7", "cp037"]))
    return draw(
        st.one_of(
            st.just(right.encode(coding)),
            st.binary(max_size=60),
            st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
            st.sampled_from(
                [b"", b"\x00", b"\x1f\x8b\x08\x00", b"\x80\x04N.", b" " * 200_001, b"{" * 5000, b'"', b"0"]
            ),
        )
    )


@st.composite
def wrong_requests(draw: Draw, spec: ModelSpec) -> Request:
    """Something is wrong with it; now and then it is right all the same."""
    right = draw(right_requests(spec))
    match draw(st.integers(0, 8)):
        case 0:
            made = replace(right, body=draw(changed_bytes(bytes(right.body))))
        case 1:
            made = Request(draw(json_bodies(spec)), JSON)
        case 2:
            body, length = draw(oip_bodies(spec))
            made = Request(body, draw(st.sampled_from([JSON, BINARY, ""])), "", length)
        case 3:
            made = Request(draw(npy_files()), draw(st.sampled_from([NPY, BINARY, ""])))
        case 4:
            made = Request(draw(npz_files(spec)), draw(st.sampled_from([NPZ, BINARY, ""])))
        case 5:
            made = Request(draw(safetensors_files(spec)), draw(st.sampled_from([SAFETENSORS, BINARY, ""])))
        case 6:
            made = Request(draw(texts(spec)), draw(st.sampled_from([JSON, "", BINARY, NPY, NPZ, SAFETENSORS])))
        case 7:
            made = replace(right, content_type=draw(TYPES), header_length=draw(st.one_of(st.just(""), LENGTHS)))
        case _:
            made = replace(right, accept=draw(ACCEPTS))
    return replace(made, accept=draw(ACCEPTS)) if draw(st.integers(0, 9)) == 0 else made


@st.composite
def batches(draw: Draw, spec: ModelSpec, most: int = 12) -> list[tuple[bool, Request]]:
    """(is it right?, request), in any order; two of three are wrong."""
    kinds = draw(st.lists(st.integers(0, 2), min_size=1, max_size=most))
    return [(kind == 0, draw(right_requests(spec) if kind == 0 else wrong_requests(spec))) for kind in kinds]


# -------------------------------------------------------------------------------------------------------------- judge


@dataclass
class Count:
    """What came of the requests of all batches so far: `wrong` ones were refused, `harmless` ones were changed and are
    legal all the same, `right` ones were not touched."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    harmless: int = 0
    right: int = 0
    shared: int = 0
    faults: list[str] = field(default_factory=list)


def judge(predictor: Predictor, batch: Sequence[tuple[bool, Request]], count: Count) -> list[str]:
    """Answer a batch and return what must not be, counting the rest."""
    requests = [request for _, request in batch]
    found = []
    try:
        together = predictor.answer(requests)
        alone = [predictor.answer([request])[0] for request in requests]
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        count.wrong += sum(not right for right, _ in batch)
        found = [f"{type(error).__name__} out of answer: {error}: {requests}"]
        count.faults += found
        return found
    for (right, request), own, lone in zip(batch, together, alone, strict=True):
        count.statuses[own.status] += 1
        count.right += right
        count.wrong += not right and own.status != 200
        count.harmless += not right and own.status == 200
        count.shared += own.run_requests > 1
        if own.status >= 500 or lone.status >= 500:
            found.append(f"{own.status} for {request}: {own.body[:300]!r}")
        if right and own.status != 200:
            found.append(f"a right request got {own.status}: {request}: {own.body[:300]!r}")
        if seen(own) != seen(lone):
            found.append(f"together {seen(own)} and alone {seen(lone)}: {request}")
    count.faults += found
    return found


def seen(response: Response) -> tuple[int, bytes, str, dict[str, str]]:
    """All of an answer but how many shared its run, and but the words of a refusal: of several things wrong with one
    body, the parser of safetensors names any."""
    body = response.body if response.status == 200 else b""
    return response.status, body, response.content_type, dict(response.headers)
