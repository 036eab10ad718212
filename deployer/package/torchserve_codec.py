"""TorchServe's worker protocol read and written in few steps, in the place of TorchServe's own.

    message     b"I", requests, int32 -1
    request     id, headers, int32 -1, parameters, int32 -1
    header      name, value
    parameter   name, content type, value
    answer      int32 200, text, then for each request: id, content type, int32 status, phrase, int32 number of headers,
                their names and values, body; int32 -1

Every id, name, value and text is an int32 of its length, big-endian, and that many bytes. TorchServe 0.12 reads each of
them by two calls of the kernel, some 50 for a request, and makes three dictionaries of them, which takes longer than a
small model does. Here a message is read as it lies in the socket. The frontend sends a message when the one before is
answered, so reading ahead reads nothing of another.

The protocol was read off `ts/protocol/otf_message_handler.py` and `ts/service.py` of that version, which is the last:
the project is archived.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus

import msgspec

_BUFFER_BYTES = 1 << 20
_KEPT_BYTES = 1 << 24  # a buffer that one huge message made larger is given back
_INT = struct.Struct("!i")
_NEXT_BATCH_S = 0.5
_READ_INT = _INT.unpack_from
_END = _INT.pack(-1)
_PREDICT = ord("I")
_HEAD = _INT.pack(200) + _INT.pack(18) + b"Prediction success"


class WireRequest(msgspec.Struct, frozen=True):
    """A request as the frontend sends it: header names in small letters; a body, from HTTP or gRPC, is one parameter,
    a form's fields are one each."""

    id: bytes
    headers: Mapping[str, str]
    parameters: Mapping[str, bytearray]


class WireAnswer(msgspec.Struct, frozen=True):
    status: int
    content_type: str
    headers: Mapping[str, str]
    body: bytes


class HungUpError(Exception):
    """The other side has closed the connection."""


class WireBatch(list[WireRequest]):
    """The requests of one message."""


class Reader:
    """Reads whole messages from a stream socket. `recv_into` is the socket's."""

    def __init__(self, recv_into: Callable[[memoryview], int]) -> None:
        self._recv_into = recv_into
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    def batch(self) -> WireBatch:
        """The requests of the next message. Raises HungUpError when there is none any more."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > _KEPT_BYTES:
                self._buffer = bytearray(_BUFFER_BYTES)
                self._view = memoryview(self._buffer)
        self._need(1)
        command, self._start = self._buffer[self._start], self._start + 1
        if command != _PREDICT:
            raise ValueError(f"the frontend sent the command {chr(command)!r} to a worker that has its model")
        requests = WireBatch()
        while (request_id := self._next()) is not None:
            headers, parameters = {}, {}
            while (name := self._next()) is not None:
                headers[_header_name(name)] = self._value().decode()
            while (name := self._next()) is not None:
                self._value()  # its content type, which stands among the headers as well
                parameters[name.decode()] = bytearray(self._value())  # torch wants arrays that it may write to
            requests.append(WireRequest(request_id, headers, parameters))
        return requests

    def _next(self) -> bytes | None:
        """The bytes that follow their length; None at the end of a list. Called 20 times a request, so in few steps."""
        start = self._start
        if self._end - start < 4:
            self._need(4)
            start = self._start
        length = _READ_INT(self._buffer, start)[0]
        start += 4
        if length < 0:
            self._start = start
            return None
        stop = start + length
        if stop > self._end:
            self._start = start
            self._need(length)
            start, stop = self._start, self._start + length
        self._start = stop
        return bytes(self._view[start:stop])

    def _value(self) -> bytes:
        value = self._next()
        if value is None:
            raise ValueError("the frontend sent a name without a value")
        return value

    def _need(self, count: int) -> None:
        """Have `count` unread bytes in the buffer."""
        if self._start + count > len(self._buffer):
            unread = bytes(self._view[self._start : self._end])
            if count > len(self._buffer):
                self._view.release()
                self._buffer = bytearray(count + _BUFFER_BYTES)
                self._view = memoryview(self._buffer)
            self._view[: len(unread)] = unread
            self._start, self._end = 0, len(unread)
        while self._end - self._start < count:
            received = self._recv_into(self._view[self._end :])
            if received == 0:
                raise HungUpError
            self._end += received


@lru_cache(maxsize=1024)
def _header_name(data: bytes) -> str:
    return data.decode().lower()


def encode_answers(requests: Sequence[WireRequest], answers: Sequence[WireAnswer]) -> bytes:
    """The message that answers a batch: one answer a request, in order."""
    parts = [_HEAD]
    for request, answer in zip(requests, answers, strict=True):
        head = _answer_head(answer.content_type, answer.status, tuple(answer.headers.items()))
        parts += (_INT.pack(len(request.id)), request.id, head, _INT.pack(len(answer.body)), answer.body)
    parts.append(_END)
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _answer_head(content_type: str, status: int, headers: tuple[tuple[str, str], ...]) -> bytes:
    text = _text(content_type) + _INT.pack(status) + _text(HTTPStatus(status).phrase) + _INT.pack(len(headers))
    return text + b"".join(_text(name) + _text(value) for name, value in headers)


def _text(text: str) -> bytes:
    data = text.encode()
    return _INT.pack(len(data)) + data
