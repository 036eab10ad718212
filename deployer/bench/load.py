"""The load generator: one request, and the closed loop that sends them.

What one request costs is in `Sender`, when requests are sent in `closed_loop`; what is counted is the caller's. Another
arrival pattern is another function beside `closed_loop`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from deployer.bench.payloads import Traffic, describe
from deployer.errors import first_line

_LAG_PERIOD_S = 0.01


@dataclass(frozen=True)
class Outcome:
    """One request; `failure` is "" for a 2xx answer, else `status`, `connection` or `timeout`."""

    payload: int
    latency_ms: float
    ended_s: float
    failure: str = ""
    status: int | None = None
    body: bytes = b""
    detail: str = ""
    #: the version that it was sent to, "" where none is named
    version: str = ""


@dataclass(frozen=True)
class Route:
    """Where requests go: a URL for each version, and whose turn it is. Of one URL the version is ""."""

    urls: Mapping[str, str]
    draw: Callable[[], str]


class Sender:
    """Sends one request at a time for whoever asks, over connections that are kept alive and counted."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        route: Route,
        bodies: Sequence[bytes],
        connections: Callable[[], int],
    ) -> None:
        self._session = session
        self._route = route
        self._bodies = bodies
        self._turns = itertools.count()
        #: how many connections were opened until now
        self.connections = connections

    async def send(self) -> Outcome:
        """The next payload in turn, to the version whose turn it is; every failure is an outcome,
        none is raised."""
        return await self.send_to(self._route.draw())

    async def send_to(self, version: str) -> Outcome:
        """The next payload in turn, to this version."""
        payload = next(self._turns) % len(self._bodies)
        status, body, failure, detail = None, b"", "", ""
        started = time.perf_counter()
        try:
            async with self._session.post(
                self._route.urls[version], data=self._bodies[payload], allow_redirects=False
            ) as answer:
                status = answer.status
                body = await answer.read()
        except TimeoutError:
            failure, detail = "timeout", "no complete answer in time"
        except (aiohttp.ClientError, OSError) as error:
            failure, detail = "connection", f"{type(error).__name__}: {first_line(error)}"
        ended = time.perf_counter()
        if not failure and status is not None and not 200 <= status < 300:
            failure, detail = "status", f"{status}: {describe(body)}"
        return Outcome(payload, (ended - started) * 1e3, ended, failure, status, body, detail, version)


@asynccontextmanager
async def open_sender(
    route: Route, headers: dict[str, str], traffic: Traffic, concurrency: int, timeout_s: float
) -> AsyncIterator[Sender]:
    """One session for one row, with a connection for each client."""
    connections = 0

    async def count(*_: Any) -> None:
        nonlocal connections
        connections += 1

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(count)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=concurrency, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        trace_configs=[trace],
    ) as session:
        yield Sender(session, route, traffic.bodies, lambda: connections)


async def closed_loop(
    send: Callable[[], Awaitable[Outcome]],
    note: Callable[[Outcome], None],
    concurrency: int,
    *,
    requests: int | None = None,
    duration_s: float | None = None,
) -> float:
    """`concurrency` clients, each with one request in flight; until `requests` are sent or `duration_s` has passed.

    Returns the wall clock in seconds from the first request sent to the last answer; requests in flight when the time
    is over are waited for.
    """
    sent = itertools.count()
    started = time.perf_counter()
    last = started

    async def client() -> None:
        nonlocal last
        while requests is None or next(sent) < requests:
            outcome = await send()
            note(outcome)
            last = max(last, outcome.ended_s)
            if duration_s is not None and outcome.ended_s - started >= duration_s:
                return

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return last - started


async def watch_lag(lags_ms: list[float]) -> None:
    """How late the event loop wakes a sleeper: the delay that the client itself adds to an answer."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_LAG_PERIOD_S)
        lags_ms.append(max(0.0, (time.perf_counter() - before - _LAG_PERIOD_S) * 1e3))
