"""A served model measured over HTTP, in a closed loop: each of N clients sends its next request when its last is
answered, over one kept-alive connection each.

Latency is from handing the request to the client library to the last byte of the answer. Whether an answer is right is
decided after the row, so that checking takes no time from requests in flight.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from deployer.bench.load import Outcome, Route, Sender, closed_loop, open_sender, watch_lag
from deployer.bench.payloads import Checker, FirstAnswer, Traffic, describe, make_traffic
from deployer.bench.record import BenchReport, HttpRow, Warmup, command_line, environment
from deployer.bench.statistics import is_steady, per_second, percentile, summarize
from deployer.client import failure
from deployer.errors import ServerError, UsageError, first_line
from deployer.split import Split, check_versions

log = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = (1, 8, 32)
_WARMUP_ROUNDS, _WARMUP_S = 20, 2.0  # a warm-up that does not settle has had both
_UNCHECKED_LIMIT_BYTES = 64 << 20  # answers kept for checking after the row; beyond it they are checked at once
_BUSY_CLIENT = 0.7  # above this share of one core the client limits the figures
_LATE_CLIENT = 0.2  # of the median latency

T = TypeVar("T")


@dataclass(frozen=True)
class _Load:
    """How long a row is measured: `requests` of them, or for `duration_s`."""

    duration_s: float
    requests: int | None
    warmup_max_s: float


def bench_url(
    url: str,
    *,
    concurrency: Sequence[int] | None = None,
    duration_s: float = 5.0,
    requests: int | None = None,
    bundle: str | Path | None = None,
    input_path: str | Path | None = None,
    body: str | None = None,
    token_file: str | Path | None = None,
    timeout_s: float = 60.0,
    warmup_max_s: float = 10.0,
    split: str | None = None,
    seed: int = 0,
) -> BenchReport:
    """Measure the model that answers POST requests at `url`, a row for each concurrency.

    `duration_s`     seconds to measure each row; requests in flight at its end are waited for and counted
    `requests`       measure so many requests a row instead
    `bundle`         its samples are sent, and answers held to its reference
    `input_path`     what to send instead of the samples; without `bundle` the first answer is the reference
    `body`           `json` or `npy`
    `token_file`     a file that holds the bearer token
    `timeout_s`      seconds until a request counts as timed out
    `split`          `1.0=90,2.0=10`: send each request to a version drawn by `seed` with these weights, a row for each.
                     Answers are held to `bundle`, without it to the first answer of the same version
    `warmup_max_s`   a row's warm-up ends there, or before that once latencies are steady

    Raises UsageError or SampleError for bad input, a refused token or a request that the server calls bad, ServerError
    when a row's first request fails otherwise (no server, a status of 500 or more). Later failures and wrong answers
    are counted, and `passed` is False.
    """
    _check_url(url)
    traffic = make_traffic(bundle=bundle, input_path=input_path, body=body)
    headers = traffic.headers | _authorization(url, token_file)
    load = _Load(duration_s, requests, warmup_max_s)
    slots = tuple(dict.fromkeys(concurrency or DEFAULT_CONCURRENCY))
    route = _route(url, split, seed, headers)
    rows = _run(lambda: _measure_rows(route, headers, traffic, slots, load, timeout_s))
    given = {
        "concurrency": slots,
        "duration_s": duration_s if requests is None else None,
        "requests": requests,
        "bundle": _text(bundle),
        "input": _text(input_path),
        "body": traffic.body,
        "token_file": _text(token_file),
        "timeout_s": timeout_s,
        "split": split,
        "seed": seed if split is not None else None,
    }
    return BenchReport(
        target=url,
        rows=tuple(rows),
        environment=environment("aiohttp"),
        command=command_line(url, given),
        options=given | {"warmup_max_s": warmup_max_s},
        notes=tuple(_notes(rows, traffic)),
        passed=all(row.ok == row.requests for row in rows),
    )


def _route(url: str, split: str | None, seed: int, headers: Mapping[str, str]) -> Route:
    """Raises UsageError for a version that the server does not have, before anything is sent to any of them."""
    if split is None:
        return Route({"": url}, lambda: "")
    chosen = Split.parse(split)
    urls = chosen.route(url)
    check_versions(urls, headers.get("Authorization", "").removeprefix("Bearer ") or None)
    generator = random.Random(seed)  # noqa: S311 - it splits traffic
    return Route(urls, lambda: chosen.draw(generator))


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable &= parts.username is None  # a password would end up in the report; tokens come from --token-file
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"'{url}' is no URL to send requests to; http://HOST:PORT/predictions/NAME is expected")


def _authorization(url: str, token_file: str | Path | None) -> dict[str, str]:
    if token_file is None:
        return {}
    try:
        token = Path(token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token file '{token_file}' cannot be read: {first_line(error)}") from error
    if not token or len(token.split()) != 1 or not token.isascii():
        raise UsageError(f"token file '{token_file}' does not hold a token: one word is expected")
    return {"Authorization": f"Bearer {token}"}


def _run(task: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run to the end, also where an event loop already runs in this thread (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        inside_a_loop = False
    else:
        inside_a_loop = True
    if not inside_a_loop:
        return asyncio.run(task())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(task())).result()


async def _measure_rows(
    route: Route, headers: dict[str, str], traffic: Traffic, slots: Sequence[int], load: _Load, timeout_s: float
) -> list[HttpRow]:
    rows = []
    checkers: dict[str, Checker] = {}
    for concurrency in slots:
        log.info("measuring concurrency %d", concurrency)
        async with open_sender(route, headers, traffic, concurrency, timeout_s) as sender:
            for version, url in route.urls.items():
                first = await _first_request(sender, version, url, "Authorization" in headers)
                if version not in checkers:
                    checkers[version] = traffic.checker or FirstAnswer(first.body, traffic.body)
            rows += await _measure_row(sender, checkers, first, concurrency, load, traffic.items)
    return rows


async def _first_request(sender: Sender, version: str, url: str, with_token: bool) -> Outcome:
    """The row's first request, alone. Its failure ends the benchmark: nothing after it would be a measurement."""
    first = await sender.send_to(version)
    if not first.failure:
        return first
    if first.failure == "status" and first.status is not None:
        answer = httpx.Response(first.status, content=first.body)
        said = f"{url}, first request: {failure(answer, with_token=with_token)}"
        raise UsageError(said) if first.status < 500 else ServerError(said, status=first.status)
    raise ServerError(
        f"{url} did not answer the first request ({first.failure}, {first.detail}); "
        "is the server running? `deployer serve` starts one"
    )


@dataclass
class _Tally:
    """What came back. Latencies wait under the answer's bytes until `settle` has held the answer to the reference."""

    checker: Checker
    latencies_ms: list[float] = field(default_factory=list)
    wrong: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    first_errors: dict[str, str] = field(default_factory=dict)
    _verdicts: dict[tuple[int, bytes], bool] = field(default_factory=dict)
    _waiting: dict[tuple[int, bytes], list[float]] = field(default_factory=dict)
    _waiting_bytes: int = 0

    def note(self, outcome: Outcome) -> None:
        if outcome.status is not None and outcome.failure in ("", "status"):
            self.statuses[str(outcome.status)] += 1
        if outcome.failure:
            self.failures[outcome.failure] += 1
            self.first_errors.setdefault(outcome.failure, outcome.detail)
            return
        key = (outcome.payload, outcome.body)
        if key not in self._waiting:
            self._waiting[key] = []
            self._waiting_bytes += len(outcome.body)
        self._waiting[key].append(outcome.latency_ms)
        if self._waiting_bytes > _UNCHECKED_LIMIT_BYTES:
            self.settle()

    def settle(self) -> None:
        """Check what waits: latencies of right answers count, wrong answers are counted apart."""
        for (payload, body), latencies_ms in self._waiting.items():
            if self.checker.is_right(payload, body):
                self.latencies_ms += latencies_ms
            else:
                self.wrong += len(latencies_ms)
                self.first_errors.setdefault("wrong", f"{describe(body) or 'an empty body'}")
        self._waiting = {}
        self._waiting_bytes = 0


async def _measure_row(
    sender: Sender, checkers: Mapping[str, Checker], first: Outcome, concurrency: int, load: _Load, items: int | None
) -> list[HttpRow]:
    """A row for each version."""
    warmup = await _warm_up(sender, first, concurrency, load)
    tallies = {version: _Tally(checker) for version, checker in checkers.items()}
    lags_ms: list[float] = []
    watch = asyncio.create_task(watch_lag(lags_ms))
    gc.collect()
    gc.freeze()  # what is here already is not scanned while the clock runs
    busy_from_s = time.thread_time()
    try:
        duration_s = load.duration_s if load.requests is None else None
        wall_s = await closed_loop(
            sender.send,
            lambda outcome: tallies[outcome.version].note(outcome),
            concurrency,
            requests=load.requests,
            duration_s=duration_s,
        )
    finally:
        gc.unfreeze()
        watch.cancel()
    busy_s = time.thread_time() - busy_from_s
    with suppress(asyncio.CancelledError):
        await watch
    rows = []
    for version, tally in tallies.items():
        tally.settle()
        rows.append(_row(version, tally, concurrency, wall_s, busy_s, lags_ms, sender.connections(), warmup, items))
    return rows


async def _warm_up(sender: Sender, first: Outcome, concurrency: int, load: _Load) -> Warmup:
    """After the first request rounds at full concurrency, until their latencies are steady or a limit is reached."""
    window = max(5, concurrency)
    latencies_ms: list[float] = []
    outcomes: list[Outcome] = []
    started = time.perf_counter()
    steady = False
    for turn in itertools.count():
        passed_s = time.perf_counter() - started
        if passed_s >= load.warmup_max_s or (turn >= _WARMUP_ROUNDS and passed_s >= _WARMUP_S):
            break
        await closed_loop(sender.send, outcomes.append, concurrency, requests=window)
        latencies_ms = [outcome.latency_ms for outcome in outcomes if not outcome.failure]
        steady = is_steady(latencies_ms, window)
        if steady:
            break
    wall_s = first.latency_ms / 1e3 + time.perf_counter() - started
    return Warmup(first.latency_ms, len(outcomes) + 1, len(outcomes) - len(latencies_ms), wall_s, steady)


def _row(
    version: str,
    tally: _Tally,
    concurrency: int,
    wall_s: float,
    busy_s: float,
    lags_ms: Sequence[float],
    connections: int,
    warmup: Warmup,
    items: int | None,
) -> HttpRow:
    ok = len(tally.latencies_ms)
    return HttpRow(
        concurrency=concurrency,
        requests=ok + tally.wrong + tally.failures.total(),
        ok=ok,
        wrong=tally.wrong,
        status_errors=tally.failures["status"],
        connection_errors=tally.failures["connection"],
        timeouts=tally.failures["timeout"],
        statuses=dict(sorted(tally.statuses.items())),
        first_errors=tally.first_errors,
        latency=summarize(tally.latencies_ms),
        requests_per_s=per_second(ok, wall_s),
        items_per_s=per_second(ok * items, wall_s) if items is not None else None,
        wall_s=wall_s,
        connections=connections,
        client_busy=min(1.0, busy_s / wall_s) if wall_s > 0 else 0.0,
        client_lag_p99_ms=percentile(lags_ms, 99),
        warmup=warmup,
        version=version,
    )


def _notes(rows: Sequence[HttpRow], traffic: Traffic) -> Iterator[str]:
    yield "machine and versions are the client's; what the server runs on is not known here"
    if traffic.items is None:
        yield "without --bundle: answers are compared with the first one, and items/s is unknown"
    for row in rows:
        for note in _row_notes(row):
            yield f"concurrency {row.concurrency}{f', version {row.version}' if row.version else ''}: {note}"


def _row_notes(row: HttpRow) -> Iterator[str]:
    yield from row.latency.notes
    for kind, text in row.first_errors.items():
        yield f"first {kind} {'answer' if kind == 'wrong' else 'error'}: {text}"
    if row.warmup.failed:
        yield f"{row.warmup.failed} of {row.warmup.runs} warm-up requests failed"
    if not row.warmup.steady:
        yield f"latencies had not settled after {row.warmup.runs} warm-up requests ({row.warmup.wall_s:.1f} s)"
    if row.connections > 2 * row.concurrency:
        yield f"{row.connections} connections were opened: the server closes them, and opening is part of the latency"
    lag_ms, p50_ms = row.client_lag_p99_ms, row.latency.p50_ms
    if row.client_busy >= _BUSY_CLIENT:
        yield f"the client's core was {row.client_busy:.0%} busy: the client limits these figures, not the server"
    elif lag_ms is not None and p50_ms is not None and lag_ms > max(1.0, _LATE_CLIENT * p50_ms):
        yield f"the client woke up to {lag_ms:.1f} ms late (p99): latencies hold that much of its own machine"
