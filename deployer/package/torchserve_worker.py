"""What a worker of TorchServe sees to besides its answers: that others know it is at work, that no request waits too
long, and that none waits for ever.

Busy      workers hold a lock while they answer; who stops the server waits for it.
Overload  the frontend refuses what its queue has no room for, in words that name something else and with no hint when
          to come back. Before that, where the queue holds more work than a request may wait for, the worker answers
          503 with Retry-After to its oldest requests, until the rest fits.
Hanging   the frontend kills a worker that is late and says "Worker died." Before that the worker itself answers 504
          that names model and limit, and ends, so that another takes its place.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deployer.predictor import Predictor, Request, Response
from deployer.protocol import encode_error

log = logging.getLogger(__name__)

#: set for the workers of a server that `deployer serve` started: its folder, its management API
FOLDER_VARIABLE = "DEPLOYER_INSTANCE"
MANAGEMENT_VARIABLE = "DEPLOYER_MANAGEMENT_URL"
BUSY_FOLDER = "busy"

LOOK_PERIOD_S = 0.25
_LOOK_TIMEOUT_S = 2.0
_NEW_RUN = 0.2  # the weight of the newest run in the mean


@dataclass(frozen=True)
class Limits:
    """`batch_size` requests share a run at most; `workers` share the queue. A request is answered within
    `response_timeout_s` of its run's begin, and its run begins about `max_queue_wait_s` after it came at the latest."""

    batch_size: int
    workers: int
    response_timeout_s: float
    max_queue_wait_s: float


class Busy:
    """A file whose lock is held while a batch is answered, and whose time is that of the last batch's begin. The kernel
    frees the lock if the worker dies."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def begin(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        os.utime(self._descriptor)

    def end(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class Overload:
    """How long the last in the queue would wait: the requests that wait, as the server says, times what a run takes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting = 0.0
        self._run_s = 0.0

    def saw(self, waiting: int) -> None:
        """The server says how many requests wait."""
        self._waiting = waiting

    def ran(self, seconds: float) -> None:
        """A batch was answered in `seconds`."""
        self._run_s += (seconds - self._run_s) * (_NEW_RUN if self._run_s else 1.0)

    @property
    def wait_s(self) -> float:
        runs = math.ceil(self._waiting / self._limits.batch_size)
        return runs * self._run_s / self._limits.workers

    def refuse(self, count: int) -> int:
        """For a batch of `count`: the seconds after which to come back, or 0 where it is to be answered."""
        over_s = self.wait_s - self._limits.max_queue_wait_s
        if over_s <= 0:
            return 0
        # Until the server is asked again the other workers are taken to refuse as many.
        self._waiting = max(0.0, self._waiting - count * self._limits.workers)
        return max(1, math.ceil(over_s))


class Guard:
    """Answers through a predictor, within limits. One thread at a time."""

    def __init__(self, predictor: Predictor, limits: Limits, environment: Mapping[str, str]) -> None:
        self._predictor = predictor
        self._limits = limits
        self._label = f"{predictor.spec.name} {predictor.spec.version}"
        self._overload = Overload(limits)
        self._asked = threading.Event()
        self._lock = threading.Lock()
        self._began_s: float | None = None
        self._late: Callable[[], None] | None = None
        folder = environment.get(FOLDER_VARIABLE)
        self._busy: Busy | None = None
        if folder:
            name = f"{predictor.spec.name}-{predictor.spec.version}"
            self._busy = Busy(Path(folder) / BUSY_FOLDER / name)
            pending = _Pending(Path(folder), environment[MANAGEMENT_VARIABLE], predictor)
            threading.Thread(target=self._look, args=(pending,), name="queue", daemon=True).start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def answer(
        self, requests: Sequence[Request], send: Callable[[list[Response]], None] | None = None
    ) -> list[Response]:
        """One response a request. `send` sends the answers of a batch that hangs from another thread; without it the
        frontend's own timeout is the only one."""
        if retry_s := self._overload.refuse(len(requests)):
            self._asked.set()
            return [self._refusal(retry_s)] * len(requests)
        if self._busy is not None:
            self._busy.begin()
        self._begin(len(requests), send)
        started_s = time.perf_counter()
        try:
            return self._predictor.answer(requests)
        finally:
            self._overload.ran(time.perf_counter() - started_s)
            self._end()
            if self._busy is not None:
                self._busy.end()
            self._asked.set()

    def _refusal(self, retry_s: int) -> Response:
        self._predictor.meters.error(503)
        message = (
            f"{self._label} has more requests waiting than it answers in {self._limits.max_queue_wait_s:g} s; "
            f"try again in {retry_s} s, and send less at once or add workers"
        )
        return Response(503, encode_error(message), headers={"Retry-After": str(retry_s)})

    # -------------------------------------------------------------------------------------------------------- the queue

    def _look(self, pending: Callable[[], int]) -> None:
        """Ask the server how many requests wait, now and then, and only while there are any."""
        while True:
            self._asked.wait()
            self._asked.clear()
            try:
                self._overload.saw(pending())
            except (OSError, ValueError, KeyError, IndexError) as error:
                self._overload.saw(0)
                log.warning("the server does not say how many requests wait: %s: %s", type(error).__name__, error)
            time.sleep(LOOK_PERIOD_S)

    # ----------------------------------------------------------------------------------------------------- the watchdog

    def _begin(self, count: int, send: Callable[[list[Response]], None] | None) -> None:
        self._late = (lambda: send([self._timeout()] * count)) if send is not None else None
        self._began_s = time.monotonic()

    def _end(self) -> None:
        with self._lock:  # held for good once the watchdog has answered: nothing may be sent after it
            self._began_s = None

    def _watch(self) -> None:
        limit_s = self._limits.response_timeout_s
        while True:
            time.sleep(min(1.0, limit_s / 20))
            with self._lock:
                began_s, late = self._began_s, self._late
                if began_s is None or late is None or time.monotonic() - began_s <= limit_s:
                    continue
                try:
                    late()
                    sys.stderr.write(f"{self._label} did not answer within {limit_s:g} s; this worker ends\n")
                    sys.stderr.flush()
                finally:
                    os._exit(1)

    def _timeout(self) -> Response:
        message = (
            f"{self._label} did not answer within {self._limits.response_timeout_s:g} s, its worker is started anew; "
            "send less at once, or package it with a larger --response-timeout-s if it is meant to take longer"
        )
        return Response(504, encode_error(message))


class _Pending:
    """Asks the management API how many requests wait for this version."""

    def __init__(self, folder: Path, url: str, predictor: Predictor) -> None:
        self._url = f"{url}/models/{predictor.spec.name}/{predictor.spec.version}"
        self._keys = folder / "key_file.json"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy may see the key

    def __call__(self) -> int:
        key = msgspec.json.decode(self._keys.read_bytes())["management"]["key"]
        request = urllib.request.Request(self._url, headers={"Authorization": f"Bearer {key}"})  # noqa: S310 - our URL
        with self._opener.open(request, timeout=_LOOK_TIMEOUT_S) as response:
            described = msgspec.json.decode(response.read())
        return int(described[0]["jobQueueStatus"]["pendingRequests"])
