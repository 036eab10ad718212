"""Workers in pairs: one that is alone never waits for the frontend, and none that dies leaves a request unanswered.

TorchServe hands a worker a batch, waits for its answers, sends them to their clients one by one, and gathers and writes
the next batch only then: all that time the model stands still. Where several workers share the cores, one computes
while another waits. Where there is one alone, TorchServe is told of two: the second opens no model, passes its
connection to the first and ends with it. While that computes what came over one connection, TorchServe answers and
gathers for the other. What lies waiting in both when it is done is one run, where it is not more than a batch may hold.

When a connection closes, TorchServe answers the batch that it has sent over it with 500, and forgets in silence the
requests that it is just gathering for it: their clients would wait for ever. So the two of a pair hold each other's
connection too, which keeps it open when a worker is killed. The one that lives closes it when the frontend has sent a
batch over it, or nothing for longer than gathering takes.

Who is the first of a pair is settled by locks in the model's unpacked folder, which the kernel frees with the process
that held them:

    worker-0          held by the first of a pair
    worker-0.second   held by the other
    worker-0.socket   where they meet; for this user alone
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
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from deployer.errors import ServerError
from deployer.package.torchserve_codec import HungUpError, Reader, WireAnswer, WireBatch, encode_answers

log = logging.getLogger(__name__)

VERSION = "0.12.0"
#: connections of TorchServe to a worker that is alone
CONNECTIONS = 2

_POLL_S = 0.05
_NEXT_BATCH_S = 0.3  # beside the time for which it is gathered
_READY, _PASS, _KEEP = b"+", b"p", b"k"
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


def take_place(folder: Path, *, alone: bool, gathers_s: float) -> Computing | Passing:
    """The first place that is free among the workers of the model unpacked in `folder`, for whose batches the frontend
    gathers for `gathers_s` at most.

    Of one worker `alone`, the second process passes its connection on; it has its place when the one that computes is
    ready, and takes that one's where it ends meanwhile. Raises ServerError when both places are taken: TorchServe was
    told of more workers than the archive asks for.
    """
    for number in count():
        first = folder / f"worker-{number}"
        second = None
        while (lock := _try_lock(first)) is None:
            if second is None and (second := _try_lock(first.with_suffix(".second"))) is None:
                break
            if not alone:
                return Computing(first, second, gathers_s, first=False)
            if (control := _connect(first.with_suffix(".socket"))) is not None:
                return Passing(control, second, gathers_s)
            time.sleep(_POLL_S)
        if lock is not None:
            if second is not None:
                os.close(second)
            return Computing(first, lock, gathers_s)
        if alone:
            raise ServerError(f"this model has its {CONNECTIONS} connections; package it with --workers 2 for more")
    raise AssertionError("numbers do not end")


def serve_by(place: Computing | Passing) -> None:
    """Have TorchServe's worker, when it next waits for a message, hand its connection to `place` for good."""

    def retrieve_msg(connection: socket.socket) -> Any:
        place.serve(connection)
        sys.exit(0)  # as TorchServe does when the frontend hangs up

    sys.modules["__main__"].retrieve_msg = retrieve_msg  # type: ignore[attr-defined]


class Passing:
    """Passes its connection on and lives until the other side ends."""

    def __init__(self, control: socket.socket, lock: int, gathers_s: float) -> None:
        self._control, self._lock, self._gathers_s = control, lock, gathers_s

    def serve(self, connection: socket.socket) -> None:
        kept = _swap(self._control, _PASS, connection)
        _wait_for_end(self._control)
        _close_unheard([connection, *kept], self._gathers_s)


class Computing:
    """Computes what comes over its own connection and over one that is passed to it."""

    def __init__(self, path: Path, lock: int, gathers_s: float, *, first: bool = True) -> None:
        """`path` is the pair's, `lock` the descriptor that holds the place in it."""
        self._path, self._lock, self._gathers_s, self._first = path, lock, gathers_s, first
        self._own: socket.socket | None = None
        self._connected = threading.Event()
        self._news: deque[tuple[str, socket.socket]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._answer: Answer | None = None
        self._most = 1
        self._readers: dict[int, tuple[socket.socket, Reader]] = {}
        self._running: Sequence[tuple[socket.socket, WireBatch]] = ()

    def ready(self, answer: Answer, most_requests: int) -> None:
        """From now on answer by `answer`, and meet the other of the pair. At most `most_requests` that came over both
        connections are one call."""
        self._answer, self._most = answer, most_requests
        if self._first:
            self._listener = _listen(self._path.with_suffix(".socket"))
        threading.Thread(target=self._accept if self._first else self._keep, name="pair", daemon=True).start()

    def _accept(self) -> None:
        """Meet the second, one at a time: its lock lets no third process come."""
        listener = self._listener
        while True:
            control, _ = listener.accept()
            with control, _silence():
                if (
                    _PEER.unpack(control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
                    != os.getuid()
                ):
                    continue
                control.sendall(_READY)
                said, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not descriptors:
                    continue
                theirs = socket.socket(fileno=descriptors[0])
                self._connected.wait()
                socket.send_fds(control, [_KEEP], [self._connection.fileno()])
                if said == _PASS:
                    self._tell("serve", theirs)
                _wait_for_end(control)
                if said == _PASS:
                    self._tell("retire", theirs)
                else:
                    _close_unheard([theirs], self._gathers_s)

    def _keep(self) -> None:
        """The second of a pair that both compute: meets whoever is the first, again when that one has been replaced."""
        self._connected.wait()
        while True:
            control = _connect(self._path.with_suffix(".socket"))
            if control is None:
                time.sleep(_POLL_S)
                continue
            with control:
                kept = _swap(control, _KEEP, self._connection)
                _wait_for_end(control)
            _close_unheard(kept, self._gathers_s)

    @property
    def _connection(self) -> socket.socket:
        assert self._own is not None  # noqa: S101 - asked for after `serve` has begun
        return self._own

    def _tell(self, what: str, connection: socket.socket) -> None:
        """Have the thread that serves take a connection in or give it up."""
        self._news.append((what, connection))
        self._waker.send(_READY)

    def serve(self, connection: socket.socket) -> None:
        self._own = connection
        self._connected.set()
        readers = self._readers = {connection.fileno(): (connection, Reader(connection.recv_into))}
        poll = select.poll()
        for descriptor in (connection.fileno(), self._woken.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            batches: list[tuple[socket.socket, WireBatch]] = []
            for descriptor, _ in poll.poll():
                if descriptor == self._woken.fileno():
                    self._woken.recv(1)
                    what, other = self._news.popleft()
                    if what == "serve":
                        readers[other.fileno()] = other, Reader(other.recv_into)
                        poll.register(other.fileno(), select.POLLIN)
                    elif readers.pop(other.fileno(), None) is not None:
                        poll.unregister(other.fileno())
                        threading.Thread(target=_close_unheard, args=([other], self._gathers_s), daemon=True).start()
                    continue
                if descriptor not in readers:  # retired in this very round
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
        until = time.monotonic() + self._gathers_s + _NEXT_BATCH_S
        while quiet and (left_s := until - time.monotonic()) > 0:
            quiet -= set(select.select(list(quiet), [], [], left_s)[0])

    def _send(self, batches: Sequence[tuple[socket.socket, WireBatch]], answers: Sequence[WireAnswer]) -> None:
        start = 0
        for peer, batch in batches:
            with _silence():
                peer.sendall(encode_answers(batch, answers[start : start + len(batch)]))
            start += len(batch)


def _swap(control: socket.socket, word: bytes, connection: socket.socket) -> list[socket.socket]:
    """Hand a connection over and get the other's; nothing where the other has ended meanwhile."""
    with _silence():
        socket.send_fds(control, [word], [connection.fileno()])
        return [socket.socket(fileno=descriptor) for descriptor in socket.recv_fds(control, 1, 1)[1]]
    return []


def _wait_for_end(control: socket.socket) -> None:
    """Until the process at the other end has ended in whatever way."""
    with _silence():
        control.recv(1)


def _close_unheard(connections: Sequence[socket.socket], gathers_s: float) -> None:
    """Close connections that nobody reads any more, each when the frontend is waiting for an answer over it, or when it
    has sent nothing for longer than it gathers: what it gathers at that moment it would forget."""
    left = list(connections)
    until = time.monotonic() + gathers_s + _NEXT_BATCH_S
    while left:
        ready = select.select(left, [], [], max(0.0, until - time.monotonic()))[0]
        for connection in ready or left:
            with _silence():
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        left = [connection for connection in left if ready and connection not in ready]


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
