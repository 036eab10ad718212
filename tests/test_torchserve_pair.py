"""Two connections to one process that computes: who passes, who computes, what is one run, and who ends with whom."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deployer.errors import ServerError
from deployer.package import torchserve_pair
from deployer.package.torchserve_codec import WireAnswer, WireBatch
from deployer.package.torchserve_pair import Computing, Passing, is_worker, take_place

LIMIT_S = 20


def sized(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


def message(*bodies: bytes) -> bytes:
    """As the frontend writes a batch; a request's id is its body, its answer the same in capitals."""
    end = struct.pack("!i", -1)
    return b"I" + b"".join(sized(body) + end + sized(b"body") + sized(b"") + sized(body) + end for body in bodies) + end


def echo(batch: WireBatch) -> list[WireAnswer]:
    return [WireAnswer(200, "text/plain", {}, bytes(request.parameters["body"]).upper()) for request in batch]


class Frontend:
    """One of TorchServe's connections, the worker's end of it in a thread."""

    def __init__(self, place: Computing | Passing) -> None:
        self.mine, theirs = socket.socketpair()
        self.mine.settimeout(LIMIT_S)
        self.thread = threading.Thread(target=self._serve, args=(place, theirs), daemon=True)
        self.thread.start()

    def _serve(self, place: Computing | Passing, connection: socket.socket) -> None:
        with connection:
            place.serve(connection)

    def send(self, *bodies: bytes) -> None:
        self.mine.sendall(message(*bodies))

    def receive(self) -> dict[bytes, bytes]:
        """id → body of the next message."""
        self._number(), self._data()
        answers = {}
        while (length := self._number()) != -1:
            request_id = self._exactly(length)
            _ = self._data(), self._number(), self._data()
            for _ in range(self._number()):
                _ = self._data(), self._data()
            answers[request_id] = self._data()
        return answers

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.mine.recv(count - len(data))
            assert piece, "the worker hung up"
            data += piece
        return data

    def _number(self) -> int:
        return int(struct.unpack("!i", self._exactly(4))[0])

    def _data(self) -> bytes:
        return self._exactly(self._number())

    def hung_up(self) -> bool:
        return self.mine.recv(1) == b""


def placed(folder: Path, *, alone: bool = True) -> Computing | Passing:
    return take_place(folder, alone=alone, gathers_s=0.002)


def computing(folder: Path, answer: Callable[[WireBatch], Sequence[WireAnswer]] = echo, most: int = 4) -> Computing:
    place = placed(folder)
    assert isinstance(place, Computing)
    place.ready(answer, most)
    return place


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Frontend, Frontend, list[int]]]:
    """The connection of a process that computes, the one passed to it, and the number of requests of each run.

    A request `wait` holds its run up.
    """
    sizes: list[int] = []

    def answer(batch: WireBatch) -> list[WireAnswer]:
        sizes.append(len(batch))
        if batch[0].parameters["body"] == b"wait":
            proceed.wait(LIMIT_S)
        return echo(batch)

    proceed = threading.Event()
    first = Frontend(computing(tmp_path, answer))
    first.proceed = proceed  # type: ignore[attr-defined]
    place = placed(tmp_path)
    assert isinstance(place, Passing)
    yield first, Frontend(place), sizes
    proceed.set()
    first.mine.close()


def test_the_second_process_passes_its_connection_and_a_third_is_refused(tmp_path: Path) -> None:
    places: list[Any] = [computing(tmp_path), placed(tmp_path)]
    assert [type(place) for place in places] == [Computing, Passing]
    with pytest.raises(ServerError, match="this model has its 2 connections"):
        placed(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"worker-0", "worker-0.second", "worker-0.socket"}
    assert (tmp_path / "worker-0.socket").stat().st_mode & 0o077 == 0


def test_a_place_is_had_when_the_one_that_computes_is_ready_or_gone(tmp_path: Path) -> None:
    found: list[Any] = []
    first = placed(tmp_path)
    waiting = threading.Thread(target=lambda: found.append(placed(tmp_path)), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert not found
    assert isinstance(first, Computing)
    os.close(first._lock)  # its process ends before it was ready
    waiting.join(LIMIT_S)
    assert isinstance(found[0], Computing)


def test_answers_go_back_over_the_connection_that_asked(pair: tuple[Frontend, Frontend, list[int]]) -> None:
    first, second, _ = pair
    for turn in range(20):
        first.send(b"a%d" % turn)
        second.send(b"b%d" % turn, b"c%d" % turn)
        assert second.receive() == {b"b%d" % turn: b"B%d" % turn, b"c%d" % turn: b"C%d" % turn}
        assert first.receive() == {b"a%d" % turn: b"A%d" % turn}


def test_what_waits_in_both_is_one_run_up_to_a_batch(pair: tuple[Frontend, Frontend, list[int]]) -> None:
    first, second, sizes = pair
    first.send(b"wait")
    second.send(b"x", b"y")
    threading.Timer(0.3, first.proceed.set).start()  # type: ignore[attr-defined]
    first.receive()
    first.send(b"z")
    assert second.receive() == {b"x": b"X", b"y": b"Y"}
    first.receive()
    assert sum(sizes) == 4
    assert max(sizes) <= 4
    first.proceed.clear()  # type: ignore[attr-defined]
    sizes.clear()
    first.send(b"1", b"2", b"3")
    first.receive()
    second.send(b"4", b"5")
    second.receive()
    assert sizes == [3, 2]


def test_the_frontends_end_of_a_passed_connection_ends_that_one_alone(
    pair: tuple[Frontend, Frontend, list[int]],
) -> None:
    first, second, _ = pair
    second.send(b"x")
    second.receive()
    second.mine.close()
    for _ in range(3):
        first.send(b"a")
        assert first.receive() == {b"a": b"A"}


class Process:
    """The second of a pair as another process would be it: what it holds is closed by the kernel when it is killed."""

    def __init__(self, folder: Path, word: bytes) -> None:
        place: Any = placed(folder, alone=word == b"p")
        if word == b"k":
            control = None
            while control is None:
                control = torchserve_pair._connect(folder / "worker-0.socket")
            place._control = control
        self.place, (self.mine, self.theirs) = place, socket.socketpair()
        self.mine.settimeout(LIMIT_S)
        self.kept = torchserve_pair._swap(place._control, word, self.theirs)

    def kill(self) -> None:
        for held in (self.theirs, *self.kept, self.place._control):
            held.close()
        os.close(self.place._lock)


@pytest.mark.parametrize("word", [b"p", b"k"])
@pytest.mark.parametrize("then", ["gathers", "is quiet"])
def test_the_connection_of_a_killed_second_closes_when_nothing_is_forgotten(
    tmp_path: Path, word: bytes, then: str
) -> None:
    """The frontend forgets what it is gathering when a connection closes; what it has sent it answers with 500."""
    first = Frontend(computing(tmp_path))
    second = Process(tmp_path, word)
    if word == b"p":
        second.mine.sendall(message(b"x"))
        while not second.mine.recv(4096).endswith(b"X" + struct.pack("!i", -1)):
            pass
    second.kill()
    if then == "gathers":
        second.mine.settimeout(0.1)
        with pytest.raises(TimeoutError):
            second.mine.recv(1)
        second.mine.settimeout(LIMIT_S)
        second.mine.sendall(message(b"y"))
    assert closed(second.mine)
    first.send(b"a")
    assert first.receive() == {b"a": b"A"}
    assert type(placed(tmp_path, alone=word == b"p")) is (Passing if word == b"p" else Computing)


def closed(connection: socket.socket) -> bool:
    """Without an answer; what was sent and never read makes it a reset."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_connections_of_a_killed_first_close_when_nothing_is_forgotten(tmp_path: Path) -> None:
    """By the one that passes its own; the first is a process of its own here, which can be killed."""
    program = (
        "import socket, sys\n"
        "from pathlib import Path\n"
        "from deployer.package.torchserve_pair import take_place\n"
        "place = take_place(Path(sys.argv[1]), alone=True, gathers_s=0.002)\n"
        "place.ready(lambda batch: [], 4)\n"
        "place.serve(socket.socket(fileno=int(sys.argv[2])))\n"
    )
    mine, theirs = socket.socketpair()
    mine.settimeout(LIMIT_S)
    command = [sys.executable, "-c", program, str(tmp_path), str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        try:
            while not (tmp_path / "worker-0.socket").exists():
                time.sleep(0.05)
            second = Frontend(placed(tmp_path))
            time.sleep(0.3)  # the connections are exchanged
        finally:
            process.kill()
        for connection in (mine, second.mine):
            connection.settimeout(0.1)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(LIMIT_S)
        mine.sendall(message(b"x"))
        assert closed(mine)
        assert closed(second.mine)  # it has been quiet
        second.thread.join(LIMIT_S)
        assert not second.thread.is_alive()


def test_several_workers_compute_each_in_pairs(tmp_path: Path) -> None:
    places: list[Any] = [placed(tmp_path, alone=False) for _ in range(5)]
    assert [(type(place), place._path.name, place._first) for place in places] == [
        (Computing, f"worker-{number}", first)
        for number, first in ((0, True), (0, False), (1, True), (1, False), (2, True))
    ]


def test_the_end_of_the_frontend_ends_both(tmp_path: Path) -> None:
    """The process that computes ends, and the kernel closes what it holds."""
    place = computing(tmp_path)
    first = Frontend(place)
    first.mine.close()
    first.thread.join(LIMIT_S)
    assert not first.thread.is_alive()


def test_this_process_is_no_worker() -> None:
    assert is_worker() is False


def test_another_version_keeps_its_own_protocol(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    import ts
    from ts.protocol import otf_message_handler

    worker = sys.modules["__main__"]
    monkeypatch.setattr(worker, "retrieve_msg", otf_message_handler.retrieve_msg, raising=False)
    assert is_worker() is True
    monkeypatch.setattr(ts, "__version__", "0.13.0")
    assert is_worker() is False
    assert "TorchServe 0.13.0 is not 0.12.0" in caplog.text
