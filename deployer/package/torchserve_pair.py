"""One process that computes and two connections to TorchServe, so that it never waits for the frontend.

TorchServe hands a worker a batch, waits for its answers, sends them to their clients one by one, and gathers and writes
the next batch only then: all that time the model stands still. Where several workers share the cores, one computes
while another waits. Where there is one alone, TorchServe is told of two: the second opens no model, passes its
connection to the first and ends with it. While that computes what came over one connection, TorchServe answers and
gathers for the other. What lies waiting in both when it is done is one run, where it is not more than a batch may hold.

Who computes is settled by locks in the model's unpacked folder, which the kernel frees with the process that held them:

    worker          held by the process that computes
    worker.second   held by the one that passes its connection on
    worker.socket   where it does so; for this user alone

The one that computes takes the other along when it dies; a second one takes its own connection alone. The frontend sees
the connections close, answers what was under way with 500, and starts again what died.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deployer.errors import ServerError
from deployer.package.torchserve_codec import HungUpError, Reader, WireAnswer, WireBatch, encode_answers

log = logging.getLogger(__name__)

VERSION = "0.12.0"
#: connections of TorchServe to a worker that is alone
CONNECTIONS = 2

_POLL_S = 0.05
_NEXT_BATCH_S = 0.5
_READY = b"+"
_PEER = struct.Struct("3i")  # ucred: pid, uid, gid

Answer = Callable[[WireBatch], Sequence[WireAnswer]]


def is_worker() -> bool:
    """Whether this process is a worker of the TorchServe whose protocol is known here; another version is said."""
    import ts
    from ts.protocol import otf_message_handler

    if getattr(sys.modules["__main__"], "retrieve_msg", None) is not otf_message_handler.retrieve_msg:
        return False
    if ts.__version__ != VERSION:
        log.warning(
            "TorchServe %s is not %s, whose protocol is known: every worker opens the model, and is slower",
            ts.__version__,
            VERSION,
        )
        return False
    return True


def take_place(folder: Path) -> Computing | Passing:
    """A place in the pair of workers of the model unpacked in `folder`. One that passes its connection on has its place
    when the one that computes is ready; where that one ends meanwhile, the other takes its place.

    Raises ServerError when both are taken: TorchServe was told of more workers than the archive asks for.
    """
    first = folder / "worker"
    second = None
    while (lock := _try_lock(first)) is None:
        if second is None and (second := _try_lock(first.with_suffix(".second"))) is None:
            raise ServerError(f"this model has its {CONNECTIONS} connections; package it with --workers 2 for more")
        if (control := _connect(first.with_suffix(".socket"))) is not None:
            return Passing(control, second)
        time.sleep(_POLL_S)
    if second is not None:
        os.close(second)
    return Computing(first, lock)


def serve_by(place: Computing | Passing) -> None:
    """Have TorchServe's worker, when it next waits for a message, hand its connection to `place` for good."""

    def retrieve_msg(connection: socket.socket) -> Any:
        place.serve(connection)
        sys.exit(0)  # as TorchServe does when the frontend hangs up

    sys.modules["__main__"].retrieve_msg = retrieve_msg  # type: ignore[attr-defined]


class Passing:
    """Passes its connection on and lives until the other side ends."""

    def __init__(self, control: socket.socket, lock: int) -> None:
        self._control, self._lock = control, lock

    def serve(self, connection: socket.socket) -> None:
        socket.send_fds(self._control, [_READY], [connection.fileno()])
        with _silence():
            self._control.recv(1)


class Computing:
    """Computes what comes over its own connection and over those that are passed to it."""

    def __init__(self, path: Path | None = None, lock: int = -1) -> None:
        """`path` is that of the lock of a pair, None for a worker among several."""
        self._path, self._lock = path, lock
        self._passed: list[socket.socket] = []
        self._woken, self._waker = socket.socketpair()
        self._answer: Answer | None = None
        self._most = 1
        self._readers: dict[int, tuple[socket.socket, Reader]] = {}
        self._running: Sequence[tuple[socket.socket, WireBatch]] = ()

    def ready(self, answer: Answer, most_requests: int) -> None:
        """From now on answer by `answer`, and in a pair take the other's connection. At most `most_requests` that came
        over both are one call."""
        self._answer, self._most = answer, most_requests
        if self._path is None:
            return
        listener = _listen(self._path.with_suffix(".socket"))
        threading.Thread(target=self._accept, args=(listener,), name="connections", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        """One at a time: its lock lets no third process come."""
        while True:
            control, _ = listener.accept()
            with control, _silence():
                if (
                    _PEER.unpack(control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
                    != os.getuid()
                ):
                    continue
                control.sendall(_READY)
                _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not descriptors:
                    continue
                passed = socket.socket(fileno=descriptors[0])
                self._passed.append(passed)
                self._waker.send(_READY)
                control.recv(1)  # until that process ends
                passed.shutdown(socket.SHUT_RDWR)  # the frontend sees it only when nobody holds the connection

    def serve(self, connection: socket.socket) -> None:
        readers = self._readers = {connection.fileno(): (connection, Reader(connection.recv_into))}
        poll = select.poll()
        for descriptor in (connection.fileno(), self._woken.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            batches: list[tuple[socket.socket, WireBatch]] = []
            for descriptor, _ in poll.poll():
                if descriptor == self._woken.fileno():
                    self._woken.recv(1)
                    passed = self._passed.pop(0)
                    readers[passed.fileno()] = passed, Reader(passed.recv_into)
                    poll.register(passed.fileno(), select.POLLIN)
                    continue
                peer, reader = readers[descriptor]
                try:
                    batches.append((peer, reader.batch()))
                except (HungUpError, ConnectionError):
                    if peer is connection:
                        return
                    poll.unregister(descriptor)
                    del readers[descriptor]
                    peer.close()
            together = sum(len(batch) for _, batch in batches) <= self._most
            for run in [batches] if together and batches else [[entry] for entry in batches]:
                self._run(run)

    def _run(self, batches: Sequence[tuple[socket.socket, WireBatch]]) -> None:
        """Answer what came over some connections in one go. A connection that has closed meanwhile has been answered by
        the frontend."""
        assert self._answer is not None  # noqa: S101 - `ready` comes before `serve`
        self._running = batches
        self._send(batches, self._answer(WireBatch(request for _, batch in batches for request in batch)))

    def send_last(self, answers: Sequence[WireAnswer]) -> None:
        """Answer the batches of the run that is under way from another thread, in the place of the one that has them in
        hand and will never answer; the worker ends after that.

        Requests that the frontend is gathering for a worker when that ends get no answer, those that it has sent get a
        500. So the next batch is waited for on each connection, for a moment.
        """
        running = self._running
        self._send(running, answers)
        quiet = {peer for peer, _ in self._readers.values()}
        until = time.monotonic() + _NEXT_BATCH_S
        while quiet and (left_s := until - time.monotonic()) > 0:
            quiet -= set(select.select(list(quiet), [], [], left_s)[0])

    def _send(self, batches: Sequence[tuple[socket.socket, WireBatch]], answers: Sequence[WireAnswer]) -> None:
        start = 0
        for peer, batch in batches:
            with _silence():
                peer.sendall(encode_answers(batch, answers[start : start + len(batch)]))
            start += len(batch)


class _silence:
    """Of a peer that is gone: the poll says the same, and says it of the right connection."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: Any) -> bool:
        return isinstance(value, OSError)


def _try_lock(path: Path) -> int | None:
    """A locked descriptor, or None where another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _short(path: Path) -> tuple[int, str]:
    """A path to a socket's place that is short enough for one, and the descriptor that it goes through."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    return folder, f"/proc/self/fd/{folder}/{path.name}"


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of a process that has ended
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder, address = _short(path)
    try:
        listener.bind(address)
    finally:
        os.close(folder)
    path.chmod(0o600)
    listener.listen(1)
    return listener


def _connect(path: Path) -> socket.socket | None:
    """A connection to the process that computes, None until it is ready."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder, address = _short(path)
    try:
        control.connect(address)
        if control.recv(1) == _READY:
            return control
    except OSError:
        pass
    finally:
        os.close(folder)
    control.close()
    return None
