"""TorchServe's worker protocol: what our reader and writer make of it is what TorchServe's own make of it."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.package import torchserve_codec
from deployer.package.torchserve_codec import HungUpError, Reader, WireAnswer, WireRequest, encode_answers

NAMES = st.text("abcdefghijklmnopqrstuvwxyzABCXYZ-", min_size=1, max_size=20)
REQUESTS = st.lists(
    st.tuples(
        st.text("0123456789abcdef-", min_size=1, max_size=36),
        st.dictionaries(NAMES, st.text(max_size=40), max_size=8),
        st.dictionaries(st.sampled_from(["body", "data", "other"]), st.binary(max_size=4000), min_size=1),
    ),
    max_size=6,
)


def sized(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


def message(requests: Any) -> bytes:
    """As the frontend's encoder writes it, command included."""
    parts = [b"I"]
    for request_id, headers, parameters in requests:
        parts.append(sized(request_id.encode()))
        parts += [sized(name.encode()) + sized(value.encode()) for name, value in headers.items()]
        parts.append(struct.pack("!i", -1))
        parts += [
            sized(name.encode()) + sized(b"application/x-npy") + sized(value) for name, value in parameters.items()
        ]
        parts.append(struct.pack("!i", -1))
    return b"".join([*parts, struct.pack("!i", -1)])


class Pieces:
    """A connection that hands its bytes out in pieces of a few lengths, and then is at its end."""

    def __init__(self, data: bytes, lengths: list[int]) -> None:
        self.data, self.lengths, self.place, self.turn = data, lengths, 0, 0

    def recv(self, limit: int) -> bytes:
        length = min(limit, self.lengths[self.turn % len(self.lengths)], len(self.data) - self.place)
        self.turn += 1
        self.place += length
        return self.data[self.place - length : self.place]

    def recv_into(self, view: memoryview) -> int:
        piece = self.recv(len(view))
        view[: len(piece)] = piece
        return len(piece)


@given(REQUESTS, REQUESTS, st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_messages_are_read_as_torchserve_reads_them(first: Any, second: Any, lengths: list[int]) -> None:
    from ts.protocol.otf_message_handler import retrieve_msg

    messages = [message(first), message(second)]
    reader = Reader(lambda view: now.recv_into(view))
    for data in messages:  # the frontend sends the second when the first is answered
        now = Pieces(data, lengths)
        ours = reader.batch()
        command, theirs = retrieve_msg(Pieces(data, lengths))
        assert command == b"I"
        assert [request.id for request in ours] == [bytes(entry["requestId"]) for entry in theirs]
        for request, entry in zip(ours, theirs, strict=True):
            expected = {
                bytes(head["name"]).decode().lower(): bytes(head["value"]).decode() for head in entry["headers"]
            }
            assert request.headers == expected
            assert request.parameters == {part["name"]: part["value"] for part in entry["parameters"]}


def test_bodies_larger_than_the_buffer_are_read_whole_and_their_room_is_given_back() -> None:
    body = bytes(range(256)) * (80 << 10)  # 20 MiB
    now = Pieces(message([("1", {}, {"body": body})]), [65_536])
    reader = Reader(lambda view: now.recv_into(view))
    assert reader.batch()[0].parameters["body"] == body
    assert len(reader._buffer) > len(body)
    now = Pieces(message([("2", {}, {"body": b"x"})]), [7])
    assert reader.batch()[0].parameters["body"] == b"x"
    assert len(reader._buffer) == torchserve_codec._BUFFER_BYTES


@pytest.mark.parametrize("cut", [0, 1, 3, 9, 40])
def test_a_frontend_that_hangs_up_is_told_from_a_message(cut: int) -> None:
    now = Pieces(message([("1", {"a": "b"}, {"body": b"0123456789" * 3})])[:cut], [100])
    reader = Reader(lambda view: now.recv_into(view))
    with pytest.raises(HungUpError):
        reader.batch()


def test_a_command_that_is_no_request_is_refused() -> None:
    now = Pieces(b"L" + bytes(100), [100])
    with pytest.raises(ValueError, match="the command 'L'"):
        Reader(lambda view: now.recv_into(view)).batch()


ANSWERS = st.tuples(
    st.sampled_from([200, 400, 413, 500, 503]),
    st.sampled_from(["application/json", "application/x-npy"]),
    st.dictionaries(NAMES, st.text("abc 0123=,", max_size=12), max_size=3),
    st.binary(max_size=500),
)


@given(st.lists(ANSWERS, max_size=5))
def test_answers_are_written_as_torchserve_writes_them(entries: Any) -> None:
    from http import HTTPStatus

    from ts.context import Context, RequestProcessor
    from ts.protocol.otf_message_handler import create_predict_response

    context = Context("m", "/", {}, 1, None, "0.12.0")
    ids = {index: f"id-{index}" for index in range(len(entries))}
    context.request_ids = ids
    context.request_processor = [RequestProcessor({}) for _ in entries]
    answers = [WireAnswer(*entry) for entry in entries]
    for index, answer in enumerate(answers):
        context.set_response_status(answer.status, HTTPStatus(answer.status).phrase, idx=index)
        context.set_response_content_type(index, answer.content_type)
        for name, value in answer.headers.items():
            context.set_response_header(index, name, value)
    expected = create_predict_response(
        [answer.body for answer in answers], ids, "Prediction success", 200, context=context
    )
    requests = [WireRequest(text.encode(), {}, {}) for text in ids.values()]
    ours, theirs = (dissect(data) for data in (encode_answers(requests, answers), expected))
    assert ours == theirs


def dissect(data: bytes) -> list[Any]:
    """A message of answers in its parts; the order of headers, and whether the content type is among them, is free."""
    place = 0

    def number() -> int:
        nonlocal place
        place += 4
        return int(struct.unpack_from("!i", data, place - 4)[0])

    def text() -> bytes:
        nonlocal place
        length = number()
        place += length
        return bytes(data[place - length : place])

    parts: list[Any] = [number(), text()]
    while (length := number()) != -1:
        place += length
        request_id = bytes(data[place - length : place])
        content_type, status, phrase = text(), number(), text()
        headers = {text(): text() for _ in range(number())}
        headers.pop(b"content-type", None)
        parts.append((request_id, content_type, status, phrase, headers, text()))
    assert place == len(data)
    return parts
