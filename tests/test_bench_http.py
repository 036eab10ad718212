"""The closed loop against a scripted server: every count exact, every rate held to arithmetic."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from deployer.bench import BenchReport, HttpRow, Warmup, bench
from deployer.bench.over_http import _row_notes, bench_url
from deployer.bench.payloads import FirstAnswer, describe, make_traffic
from deployer.bench.statistics import summarize
from deployer.cli import cli
from deployer.client import predict
from deployer.errors import SampleError, ServerError, UsageError
from deployer.protocol import decode_request, encode_answer, npy_bytes
from deployer.runtime import open_bundle
from deployer.spec import Array

RIGHT = b'{"outputs": {"y": [0.25, 0.5]}}'
NEARLY = b'{"outputs": {"y": [0.250001, 0.5]}}'
WRONG = b'{"outputs": {"y": [0.5, 0.25]}}'


@dataclass(frozen=True)
class Reply:
    """`drop` closes the connection: before a word of the answer, or `half` way through its body."""

    body: bytes = RIGHT
    status: int = 200
    delay_s: float = 0.0
    drop: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


Behaviour = Callable[[int, "Request"], Reply]


@dataclass(frozen=True)
class Request:
    headers: Mapping[str, str]
    body: bytes


class Server(ThreadingHTTPServer):
    """Answers POST number n (from 0, in order of arrival) as `behave(n, request)` says; counts connections."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behave: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave = behave
        self.lock = threading.Lock()
        self.posts = 0
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/predictions/model"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that gave up waiting is part of the script


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: Server

    def setup(self) -> None:
        with self.server.lock:
            self.server.connections += 1
        super().setup()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            turn = self.server.posts
            self.server.posts += 1
        reply = self.server.behave(turn, Request(dict(self.headers), body))
        time.sleep(reply.delay_s)
        if reply.drop == "before":
            self.close_connection = True
            return
        self.send_response(reply.status)
        self.send_header("Content-Length", str(len(reply.body)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body[: len(reply.body) // 2] if reply.drop == "half" else reply.body)
        if reply.drop == "half":
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(behave: Behaviour) -> Iterator[Server]:
    with Server(behave) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    path = tmp_path / "request.json"
    path.write_text('{"inputs": {"x": [1.0]}}')
    return path


def only_row(report: BenchReport) -> HttpRow:
    assert len(report.rows) == 1
    row = report.rows[0]
    assert isinstance(row, HttpRow)
    failed = row.wrong + row.status_errors + row.connection_errors + row.timeouts
    assert row.requests == row.ok + failed
    assert row.ok == row.latency.samples
    assert report.passed == (failed == 0)
    return row


# -------------------------------------------------------------------------------------------------- rates and warm-up


def test_warmup_concurrency_and_connections(request_file: Path) -> None:
    """4 clients, 50 ms an answer, the first takes 1 s: 25 rounds of 50 ms are 80 requests/s at most."""
    with serving(lambda turn, _: Reply(delay_s=1.0 if turn == 0 else 0.05)) as server:
        row = only_row(bench_url(server.url, concurrency=[4], requests=100, input_path=request_file))
        assert server.connections == row.connections == 4
        assert server.posts == 100 + row.warmup.runs
    assert row.requests == row.ok == 100
    assert row.warmup.first_ms >= 1000
    assert row.latency.max_ms is not None
    assert row.latency.max_ms < 1000
    assert row.latency.p50_ms is not None
    assert 50 <= row.latency.p50_ms <= 75
    assert row.requests_per_s is not None
    assert 45 <= row.requests_per_s <= 80


def test_littles_law(request_file: Path) -> None:
    """Requests in flight = rate × mean latency: at most the number of clients, and near it when they only wait."""
    with serving(lambda turn, _: Reply(delay_s=0.02)) as server:
        report = bench_url(server.url, concurrency=[1, 6], duration_s=0.6, input_path=request_file)
    for row in report.rows:
        assert isinstance(row, HttpRow)
        assert row.requests_per_s is not None
        assert row.latency.mean_ms is not None
        in_flight = row.requests_per_s * row.latency.mean_ms / 1e3
        assert 0.6 * row.concurrency <= in_flight <= row.concurrency * 1.0001
        assert row.requests_per_s == pytest.approx(row.ok / row.wall_s)
        assert row.requests_per_s <= row.concurrency / 0.02
        assert row.wall_s >= 0.6
        assert 0 <= row.client_busy <= 1


def test_warmup_is_in_no_figure(request_file: Path) -> None:
    with serving(lambda turn, _: Reply(delay_s=0.3 if turn == 0 else 0.0)) as server:
        row = only_row(
            bench_url(server.url, concurrency=[1], requests=30, input_path=request_file, warmup_max_s=1e-9)
        )  # fmt: skip
        assert server.posts == 31
    assert row.warmup.runs == 1
    assert not row.warmup.steady
    assert row.warmup.first_ms >= 300
    assert row.latency.max_ms is not None
    assert row.latency.max_ms < 300


def test_failures_in_the_warmup_are_reported_apart(request_file: Path) -> None:
    behave: Behaviour = lambda turn, _: Reply(status=503 if turn in (1, 2, 3) else 200)  # noqa: E731
    with serving(behave) as server:
        report = bench_url(server.url, concurrency=[1], requests=10, input_path=request_file)
    row = only_row(report)
    assert (row.ok, row.warmup.failed) == (10, 3)
    assert any(f"3 of {row.warmup.runs} warm-up requests failed" in note for note in report.notes)


def test_a_server_that_closes_connections_is_told(request_file: Path) -> None:
    with serving(lambda turn, _: Reply(headers={"Connection": "close"})) as server:
        report = bench_url(server.url, concurrency=[1], requests=20, input_path=request_file, warmup_max_s=1e-9)
        row = only_row(report)
        assert row.connections == server.connections == 21
    assert any("21 connections were opened" in note for note in report.notes)


@pytest.mark.parametrize(
    ("busy", "lag_ms", "said"),
    [(0.9, 0.1, "client's core was 90% busy"), (0.2, 5.0, "woke up to 5.0 ms late"), (0.2, 0.5, "")],
)
def test_a_saturated_client_is_told(busy: float, lag_ms: float, said: str) -> None:
    row = HttpRow(
        concurrency=1, requests=200, ok=200, wrong=0, status_errors=0, connection_errors=0, timeouts=0,
        statuses={"200": 200}, first_errors={}, latency=summarize([3.0] * 200), requests_per_s=300.0, items_per_s=None,
        wall_s=0.6, connections=1, client_busy=busy, client_lag_p99_ms=lag_ms,
        warmup=Warmup(first_ms=3.0, runs=11, failed=0, wall_s=0.1, steady=True),
    )  # fmt: skip
    notes = list(_row_notes(row))
    assert len(notes) == bool(said)
    assert said in "".join(notes)


# ------------------------------------------------------------------------------------------------------------- counts


def test_each_kind_of_failure_has_its_own_column(request_file: Path) -> None:
    script = {
        **dict.fromkeys(range(1, 11), Reply(status=500, body=b"out of memory\ntrace")),
        **dict.fromkeys(range(11, 14), Reply(status=429)),
        **dict.fromkeys(range(14, 19), Reply(drop="before")),
        **dict.fromkeys(range(19, 21), Reply(drop="half")),
        **dict.fromkeys(range(21, 24), Reply(delay_s=1.5)),
        **dict.fromkeys(range(24, 28), Reply(WRONG)),
        **dict.fromkeys(range(28, 30), Reply(NEARLY)),
        30: Reply(status=302, headers={"Location": "/elsewhere"}),
    }
    with serving(lambda turn, _: script.get(turn, Reply())) as server:
        report = bench_url(
            server.url, concurrency=[1], requests=60, input_path=request_file, timeout_s=0.7, warmup_max_s=1e-9
        )
    row = only_row(report)
    assert (row.status_errors, row.connection_errors, row.timeouts, row.wrong) == (14, 7, 3, 4)
    assert (row.requests, row.ok) == (60, 32)
    assert row.statuses == {"200": 36, "302": 1, "429": 3, "500": 10}
    assert row.first_errors["status"] == "500: out of memory trace"
    assert set(row.first_errors) == {"status", "connection", "timeout", "wrong"}
    assert row.latency.max_ms is not None
    assert row.latency.max_ms < 700  # what timed out is in no latency
    assert row.requests_per_s == pytest.approx(32 / row.wall_s)
    assert row.wall_s >= 3 * 0.7
    assert not report.passed


def test_counts_add_up_at_high_concurrency(request_file: Path) -> None:
    """Every seventh request fails, whoever sends it; the server's own count is the truth."""
    sent = {503: 0}

    def behave(turn: int, _: Request) -> Reply:
        if turn % 7 != 3:
            return Reply(delay_s=0.002)
        with server.lock:
            sent[503] += 1
        return Reply(status=503)

    with serving(behave) as server:
        row = only_row(bench_url(server.url, concurrency=[32], requests=500, input_path=request_file))
        assert server.posts == 500 + row.warmup.runs
    assert row.status_errors + row.warmup.failed == sent[503]
    assert row.requests == 500
    assert row.connections <= 32


def test_nothing_right_is_no_data(request_file: Path) -> None:
    with serving(lambda turn, _: Reply(status=200 if turn == 0 else 500)) as server:
        row = only_row(bench_url(server.url, concurrency=[2], requests=8, input_path=request_file))
    assert (row.ok, row.status_errors) == (0, 8)
    assert row.latency.p50_ms is None
    assert row.requests_per_s == 0


# -------------------------------------------------------------------------------------------------- the first request


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (Reply(status=401, body=b"no token"), UsageError, "none was sent.*give --token-file"),
        (Reply(status=404, body=b"no model"), UsageError, "404: no model; check the model's name"),
        (Reply(status=500, body=b"broken"), ServerError, "answered 500: broken"),
        (Reply(drop="before"), ServerError, "is the server running"),
    ],
)
def test_a_failed_first_request_ends_it(request_file: Path, reply: Reply, error: type[Exception], message: str) -> None:
    with serving(lambda turn, _: reply) as server, pytest.raises(error, match=message):
        bench_url(server.url, concurrency=[1], requests=1, input_path=request_file)


def test_no_server(request_file: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(ServerError, match="is the server running") as benched:
            bench_url(url, input_path=request_file)
        with pytest.raises(ServerError) as predicted:
            predict(url, request_file)
    assert benched.value.exit_code == predicted.value.exit_code == 2


def test_token_and_headers(request_file: Path, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    seen: list[Request] = []

    def behave(turn: int, request: Request) -> Reply:
        seen.append(request)
        return Reply()

    with serving(behave) as server:
        report = bench_url(server.url, concurrency=[1], requests=3, input_path=request_file, token_file=token_file)
    assert {request.headers["Authorization"] for request in seen} == {"Bearer s3cret"}
    assert {request.headers["Content-Type"] for request in seen} == {"application/json"}
    assert {request.body for request in seen} == {request_file.read_bytes()}
    assert b"s3cret" not in msgspec.json.encode(report)


# ----------------------------------------------------------------------------------------- answers against a reference


@contextmanager
def model_server(bundle: Path, change: Callable[[int, Array], Array] = lambda turn, array: array) -> Iterator[Server]:
    """Serves a bundle by deployer's own protocol; `change` may falsify the logits."""
    lock = threading.Lock()
    with open_bundle(bundle, threads=1) as run:

        def behave(turn: int, request: Request) -> Reply:
            kind = request.headers["Content-Type"]
            decoded = decode_request(request.body, kind, run.spec)
            with lock:
                outputs = {name: change(turn, array) for name, array in run(decoded.arrays).items()}
            if decoded.one_item:
                outputs = {name: array[0] for name, array in outputs.items()}
            return Reply(encode_answer(outputs, run.spec, kind))

        with serving(behave) as server:
            yield server


@pytest.mark.parametrize("body", ["json", "npy"])
def test_samples_of_a_bundle_are_sent_and_checked(digits_bundles: Mapping[str, Path], body: str) -> None:
    with model_server(digits_bundles["onnx"]) as server:
        report = bench(server.url, concurrency=[4], requests=100, bundle=digits_bundles["torchscript"], body=body)
    row = only_row(report)
    assert row.ok == 100
    assert row.items_per_s == row.requests_per_s
    assert report.environment.engine is None  # what ran on the server is not known here
    assert report.environment.device is None


def test_anothers_answer_is_wrong(digits_bundles: Mapping[str, Path]) -> None:
    """Turns 5, 15, 25, … get the logits rolled by one class: as plausible as the right ones, and counted."""
    change = lambda turn, array: np.roll(array, 1, axis=-1) if turn % 10 == 5 else array  # noqa: E731
    with model_server(digits_bundles["onnx"], change) as server:
        report = bench_url(
            server.url, concurrency=[1], requests=60, bundle=digits_bundles["onnx"], warmup_max_s=1e-9
        )  # fmt: skip
    row = only_row(report)
    assert (row.ok, row.wrong) == (54, 6)


def test_input_with_a_bundle_is_held_to_what_the_bundle_answers(
    digits_bundles: Mapping[str, Path], digits_images: Array, tmp_path: Path
) -> None:
    np.save(tmp_path / "batch.npy", digits_images[:5])
    (tmp_path / "one.json").write_text(json.dumps({"inputs": digits_images[3].tolist()}))
    for file, items in (("batch.npy", 5), ("one.json", 1)):
        for change, wrong in ((lambda turn, array: array, 0), (lambda turn, array: array + 1, 20)):
            with model_server(digits_bundles["onnx"], change) as server:
                row = only_row(
                    bench_url(
                        server.url, concurrency=[2], requests=20, bundle=digits_bundles["onnx"],
                        input_path=tmp_path / file,
                    )
                )  # fmt: skip
            assert row.wrong == wrong
            assert row.items_per_s == pytest.approx((row.requests_per_s or 0) * items)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (RIGHT, True),
        (b'{"outputs":{"y":[0.25,0.5]}}', True),
        (NEARLY, True),
        (WRONG, False),
        (b'{"outputs": {"y": [0.25]}}', False),
        (b'{"outputs": {"z": [0.25, 0.5]}}', False),
        (b'{"outputs": {"y": [0.25, "0.5"]}}', False),
        (b'{"outputs": {"y": [0.25, null]}}', False),
        (b'{"outputs": {"y": [[0.25], [0.5]]}}', False),
        (b"not json", False),
        (b"", False),
    ],
)
def test_first_answer(answer: bytes, right: bool) -> None:
    assert FirstAnswer(RIGHT, "json").is_right(0, answer) is right


@pytest.mark.parametrize(
    ("first", "answer", "right"),
    [
        (b'{"id": 100000, "ok": true}', b'{"id": 100001, "ok": true}', False),
        (b'{"id": 100000, "ok": true}', b'{"ok": true, "id": 100000}', True),
        (b'{"id": 1, "ok": true}', b'{"id": 1, "ok": 1.0}', False),
        (b"[1.0, 2]", b"[1, 2.0]", True),
        (b"<html>", b"<html>", True),
        (b"<html>", b"<html> ", False),
    ],
)
def test_first_answer_of_other_kinds(first: bytes, answer: bytes, right: bool) -> None:
    assert FirstAnswer(first, "json").is_right(0, answer) is right


def test_first_answer_in_npy() -> None:
    first = np.array([1.0, np.nan, np.inf], np.float32)
    checker = FirstAnswer(npy_bytes(first), "npy")
    assert checker.is_right(0, npy_bytes(first + np.float32(1e-6)))
    assert not checker.is_right(0, npy_bytes(np.array([1.0, np.nan, 3.0], np.float32)))
    assert not checker.is_right(0, npy_bytes(np.array([1.0, 2.0, np.inf], np.float32)))
    assert not checker.is_right(0, npy_bytes(first.astype(np.float64)))
    assert not checker.is_right(0, b"\x93NUMPY")


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert describe(b"\n \x1b[2Jgone\nnext") == "\ufffd[2Jgone next"


# ---------------------------------------------------------------------------------------------------- options, command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "does not say what to send"),
        ({"batch_sizes": [1]}, "--batch-sizes does not go with a URL"),
        ({"threads": 2}, "--threads does not go with a URL"),
        ({"concurrency": [0]}, "--concurrency is"),
        ({"concurrency": [100_000]}, "1 to 4096"),
        ({"requests": 0}, "--requests is 0"),
        ({"requests": 5, "duration_s": 1.0}, "give one of them"),
        ({"timeout_s": -1.0}, "--timeout-s is -1"),
        ({"body": "xml"}, "--body xml is unknown"),
        ({"token_file": "absent"}, "token file 'absent' cannot be read"),
    ],
)
def test_bad_options_are_refused(request_file: Path, options: dict[str, Any], message: str) -> None:
    inputs = {"input_path": request_file} if options else {}
    with pytest.raises(UsageError, match=message):
        bench("http://127.0.0.1:9/predictions/model", **inputs, **options)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "http://", "http://127.0.0.1:x/", "http://user:word@127.0.0.1/"])
def test_no_url(request_file: Path, url: str) -> None:
    with pytest.raises(UsageError, match="is no URL"):
        bench(url, input_path=request_file)


def test_bad_inputs_are_refused(digits_bundles: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    np.save(tmp_path / "a.npy", np.zeros((2, 1, 9, 9), np.float32))
    with pytest.raises(SampleError, match="is no valid JSON"):
        make_traffic(bundle=None, input_path=tmp_path / "broken.json", body=None)
    with pytest.raises(SampleError, match="no input file"):
        make_traffic(bundle=None, input_path=tmp_path / "absent.json", body=None)
    with pytest.raises(UsageError, match="does not say the input's name"):
        make_traffic(bundle=None, input_path=tmp_path / "a.npy", body="json")
    with pytest.raises(UsageError, match="which --body npy contradicts"):
        make_traffic(bundle=None, input_path=tmp_path / "broken.json", body="npy")
    with pytest.raises(SampleError, match=r"does not fit .*instead of 8"):
        make_traffic(bundle=digits_bundles["onnx"], input_path=tmp_path / "a.npy", body=None)


def test_inside_a_running_event_loop(request_file: Path) -> None:
    async def notebook() -> BenchReport:
        return bench(server.url, concurrency=[1], requests=3, input_path=request_file)

    with serving(lambda turn, _: Reply()) as server:
        assert only_row(asyncio.run(notebook())).ok == 3


def _command(*words: str) -> int:
    result: int = cli.main(["bench", *words], standalone_mode=False)
    return result


def test_command_prints_a_table_and_json(request_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--input", str(request_file), "--concurrency", "2", "--requests", "20")
    with serving(lambda turn, _: Reply()) as server:
        assert _command(server.url, *words) == 0
        table = capsys.readouterr().out
        assert _command(server.url, *words, "--json") == 0
        report = msgspec.json.decode(capsys.readouterr().out, type=BenchReport)
    assert "requests/s" in table
    assert "20 samples are too few for p99 (needs 100)" in table
    assert only_row(report).ok == 20
    assert report.command in table


def test_command_ends_with_1_when_answers_were_wrong(request_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda turn, _: Reply(RIGHT if turn == 0 else WRONG)) as server:
        words = ("--input", str(request_file), "--concurrency", "1", "--requests", "5", "--json")
        assert _command(server.url, *words) == 1
    report = msgspec.json.decode(capsys.readouterr().out, type=BenchReport)
    assert only_row(report).wrong == 5


def test_token_of_the_environment_is_for_urls_alone(
    digits_bundles: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEPLOYER_TOKEN_FILE", str(tmp_path / "absent"))
    assert _command(str(digits_bundles["onnx"]), "--batch-sizes", "1", "--duration-s", "0.01") == 0
    with pytest.raises(UsageError, match="token file"):
        _command("http://127.0.0.1:9/", "--bundle", str(digits_bundles["onnx"]))
