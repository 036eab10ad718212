"""Requests split among versions: shares by arithmetic, wrong versions refused before anything is sent to any."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from deployer.bench import HttpRow, bench
from deployer.cli import cli
from deployer.errors import ServerError, UsageError
from deployer.split import Split, check_versions


def within_binomial(count: int, draws: int, share: float) -> bool:
    """Five standard deviations: fails once in 1.7 million right draws."""
    return abs(count - draws * share) <= 5 * math.sqrt(draws * share * (1 - share))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("text", ["1.0=90,2.0=10", "a=1,b=1,c=2", "x=0.001,y=0.999"])
def test_shares_are_those_of_the_weights(text: str, seed: int) -> None:
    split = Split.parse(text)
    generator = random.Random(seed)
    drawn = Counter(split.draw(generator) for _ in range(20_000))
    assert math.isclose(sum(split.shares.values()), 1)
    for version, share in split.shares.items():
        assert within_binomial(drawn[version], 20_000, share)


def test_a_seed_draws_the_same_again() -> None:
    split = Split.parse("1.0=50,2.0=50")
    one, other, third = (random.Random(seed) for seed in (7, 7, 8))
    drawn = [split.draw(one) for _ in range(50)]
    assert [split.draw(other) for _ in range(50)] == drawn != [split.draw(third) for _ in range(50)]


@pytest.mark.parametrize(
    "text", ["", "1.0", "1.0=", "=5", "1.0=0", "1.0=-1", "1.0=nan", "1.0=inf", "1.0=a", "1=1,,2=1"]
)
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="VERSION=WEIGHT"):
        Split.parse(text)


def test_a_version_twice_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the version 1\.0 twice"):
        Split.parse("1.0=1,1.0=2")


def test_urls_of_versions() -> None:
    split = Split.parse("1.0=1,2 b=1")
    assert split.route("http://h:1/predictions/m/") == {
        "1.0": "http://h:1/predictions/m/1.0", "2 b": "http://h:1/predictions/m/2%20b",
    }  # fmt: skip
    for url in ("http://h/predictions/m/1.0", "http://h/v2/models/m/infer", "http://h/", "http://[::1"):
        with pytest.raises(UsageError):
            split.route(url)


class Versions(ThreadingHTTPServer):
    """Has the versions 1.0 and 2.0 and answers each with its own number; counts what was posted."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: Counter[str] = Counter()
        self.options_status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/predictions/m"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: Versions

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def do_OPTIONS(self) -> None:
        known = self.path in ("/predictions/m/1.0", "/predictions/m/2.0")
        self._reply(self.server.options_status if known else 404, b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        version = self.path.rpartition("/")[2]
        self.server.posted[version] += 1
        self._reply(200, b'{"outputs": {"y": [%s]}}' % version.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Versions]:
    server = Versions()
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_benchmark_has_a_row_for_each_version(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"x": [1]}')
    with serving() as server:
        report = bench(
            server.url, input_path=tmp_path / "x.json", concurrency=[4], requests=600, split="1.0=75,2.0=25", seed=3
        )
        posted = server.posted
    rows = [row for row in report.rows if isinstance(row, HttpRow)]
    assert [(row.version, row.concurrency, row.wrong) for row in rows] == [("1.0", 4, 0), ("2.0", 4, 0)]
    assert report.passed  # each version's answers are held to its own first one
    assert sum(row.requests for row in rows) == 600
    for row, share in zip(rows, (0.75, 0.25), strict=True):
        assert within_binomial(row.requests, 600, share)
        assert row.ok == row.requests == row.latency.samples <= posted[row.version]
    assert "--split 1.0=75,2.0=25 --seed 3" in report.command


def test_a_wrong_version_is_refused_before_any_load(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"x": [1]}')
    with serving() as server:
        with pytest.raises(UsageError, match=r"no version 3\.0 of this model"):
            bench(server.url, input_path=tmp_path / "x.json", requests=9, split="1.0=99,3.0=1")
        arguments = ["predict", server.url, "--input", str(tmp_path / "x.json"), "--split", "1.0=99,3.0=1"]
        with pytest.raises(UsageError, match=r"no version 3\.0"):
            cli.main(arguments, standalone_mode=False)
        server.options_status = 401
        with pytest.raises(ServerError, match="--token-file"):
            check_versions(Split.parse("1.0=1").route(server.url), None)
        assert not server.posted
    with pytest.raises(ServerError, match="nothing answers"):
        check_versions(Split.parse("1.0=1").route(server.url), None)


def test_predict_draws_a_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text('{"x": [1]}')
    with serving() as server:
        for seed in range(8):
            arguments = ["--input", str(tmp_path / "x.json"), "--split", "1.0=50,2.0=50", "--seed", str(seed)]
            cli.main(["predict", server.url, *arguments], standalone_mode=False)
        drawn = Counter(Split.parse("1.0=50,2.0=50").draw(random.Random(seed)) for seed in range(8))
        assert server.posted == drawn
        assert len(drawn) == 2
