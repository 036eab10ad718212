"""Right, wrong and large requests in every form of body on a real server, while its workers are killed.

    scripts/soak                                        half an hour, a kill a minute
    scripts/soak --minutes 2 --kill-every-s 10

Two versions of the digits example: in ONNX with two workers, compiled by AOTInductor with a single one. Every request
must be answered: a right one as the artifact answers, a wrong one with its own 4xx, and with a 5xx only those that a
killed worker may have had: within the seconds after a kill that the frontend needs to notice. A connection that breaks
or stays silent for longer than --timeout-s is a lost request.

Memory of the frontend and of each worker is read every few seconds. Told are the slopes of straight lines through what
was read after a time to settle, 5 minutes or a third of the whole for the frontend (Theil 1950, Sen 1968: medians of
the slopes of all pairs). Ends with 1 at a lost or wrong answer, or where the frontend, or the workers in the median,
grow faster than --max-growth-mb-per-h.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import psutil

from deployer.bundle import Bundle
from deployer.checkpoint import load_checkpoint
from deployer.client import BODIES
from deployer.errors import DeployerError, RequestError
from deployer.export import export_all
from deployer.formats import Target
from deployer.machine import cpu_name, usable_cores
from deployer.package import package
from deployer.protocol import Encoded, decode_answer, encode_request, oip
from deployer.runtime import open_bundle
from deployer.serve.torchserve import Endpoint, Server
from deployer.spec import Array
from deployer.validate import TOLERANCES, compare

CHECKPOINT = Path("examples/digits/checkpoint")
FOLDER = Path("build/soak")
LARGE_ROWS = 64
SAMPLE_S = 5.0
SETTLE_S = 30.0  # of a worker
FRONTEND_SETTLE_S = 300.0  # Java's heap grows to the size that it likes
AFTER_KILL_S = 15.0  # a killed worker is noticed, and another opens its model
PAIRS_LIMIT = 400

JSON_HEADERS = {"Content-Type": "application/json"}
#: wrong requests: headers, body; each is answered with a status of 4xx
WRONG: list[tuple[dict[str, str], bytes]] = [
    (JSON_HEADERS, b""),
    (JSON_HEADERS, b'{"inputs": {"image": [[[0.0, 1.0'),
    (JSON_HEADERS, b'{"inputs": {"image": [[[1, 2], [3]]]}}'),
    (JSON_HEADERS, b'{"inputs": {"picture": 1}}'),
    (JSON_HEADERS, b'{"inputs": {"image": NaN}}'),
    (JSON_HEADERS, b"[" * 50_000),
    ({"Content-Type": "application/x-npy"}, b"\x93NUMPY\x01\x00\xff\xff"),
    ({"Content-Type": "application/x-npz"}, b"PK\x03\x04 no archive"),
    ({"Content-Type": "application/x-safetensors"}, b"\xff" * 64),
    ({"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "999999"}, b"{}"),
    ({"Content-Type": "application/pdf"}, b"%PDF"),
    ({"Content-Type": "application/json", "Accept": "text/html"}, b'{"inputs": {"image": [[[0.0]]]}}'),
    (JSON_HEADERS, b" " * 9_000_000),  # more than the model takes
]


@dataclass
class Tally:
    """What came of the requests."""

    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    lost: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    after_kills: int = 0
    kills: list[float] = field(default_factory=list)

    def may_fail(self, started_s: float, ended_s: float) -> bool:
        """Whether a request between these times may have been in a worker that was killed."""
        return any(started_s - AFTER_KILL_S <= kill_s <= ended_s for kill_s in self.kills)


KINDS = ("right", "large", "wrong")


class Client:
    """One connection's worth of load on one model."""

    def __init__(self, endpoint: Endpoint, images: Array, expected: Array, tally: Tally, seed: int) -> None:
        self._url, self._images, self._expected = endpoint.url, images, expected
        self._tally = tally
        self._random = random.Random(seed)  # noqa: S311 - the order of a load

    async def run(self, session: aiohttp.ClientSession, until_s: float) -> None:
        while time.monotonic() < until_s:
            kind = self._random.choices(KINDS, (80, 5, 15))[0]
            if kind == "wrong":
                headers, body = self._random.choice(WRONG)
                await self._send(session, kind, Encoded(body, headers["Content-Type"], headers), None)
                continue
            count = LARGE_ROWS if kind == "large" else 1
            start = self._random.randrange(len(self._images) - count + 1)
            rows = {"image": self._images[start : start + count]}
            request = encode_request(rows, BODIES[self._random.choice(sorted(BODIES))])
            await self._send(session, kind, request, self._expected[start : start + count])

    async def _send(self, session: aiohttp.ClientSession, kind: str, request: Encoded, expected: Array | None) -> None:
        headers = {"Content-Type": request.content_type, **request.headers}
        started_s = time.monotonic()
        try:
            async with session.post(self._url, data=request.body, headers=headers) as answer:
                body = await answer.read()
                status, content_type = answer.status, answer.headers.get("content-type", "")
                length = oip.header_length(answer.headers.get(oip.HEADER_LENGTH, ""))
        except (aiohttp.ClientError, TimeoutError) as error:
            self._tally.lost.append(f"{kind}: {type(error).__name__} after {time.monotonic() - started_s:.1f} s")
            return
        self._tally.statuses[kind][status] += 1
        if status >= 500:
            if self._tally.may_fail(started_s, time.monotonic()):
                self._tally.after_kills += 1
            else:
                self._tally.faults.append(f"{kind}: {status} without a kill: {body[:200]!r}")
        elif expected is None:
            if not 400 <= status < 500:
                self._tally.faults.append(f"{kind}: {status} for {request.body[:40]!r}")
        elif status != 200:
            self._tally.faults.append(f"{kind}: {status}: {body[:200]!r}")
        elif reason := judge(body, content_type, length, expected):
            self._tally.faults.append(f"{kind}: {reason}")


def judge(body: bytes, content_type: str, header_bytes: int | None, expected: Array) -> str:
    """What is wrong with an answer of status 200, or nothing."""
    try:
        outputs = decode_answer(body, content_type, header_bytes)["outputs"]
    except RequestError as error:
        return f"an answer that cannot be read: {error}"
    got = np.asarray(next(iter(outputs.values())), np.float32).reshape(-1, expected.shape[1])
    return compare("soak", "logits", got, expected, TOLERANCES["fp32"], noise=0.0).reason


class Memory:
    """Resident memory by process over time."""

    def __init__(self, frontend: int) -> None:
        self._frontend = frontend
        self._read: dict[int, list[tuple[float, float]]] = {}

    def sample(self) -> None:
        now_s = time.monotonic()
        with_children = [psutil.Process(self._frontend)]
        with_children += with_children[0].children(recursive=True)
        for process in with_children:
            try:
                self._read.setdefault(process.pid, []).append((now_s, process.memory_info().rss / 2**20))
            except psutil.Error:
                continue

    def slopes_mb_per_h(self) -> tuple[float, list[float], float]:
        """(the frontend's, one for each worker that lived long enough, the frontend's memory at the end in MB)."""
        own = self._read[self._frontend]
        lived_s = own[-1][0] - own[0][0]
        frontend = robust_slope(own, min(FRONTEND_SETTLE_S, lived_s / 3)) or 0.0
        slopes = [robust_slope(values, SETTLE_S) for pid, values in self._read.items() if pid != self._frontend]
        return frontend, [slope for slope in slopes if slope is not None], own[-1][1]


def robust_slope(values: list[tuple[float, float]], settle_s: float) -> float | None:
    """MB/h through (seconds, MB) after a time to settle; None where too little is left of a process's life."""
    settled = [(at_s, mb) for at_s, mb in values if at_s - values[0][0] >= settle_s]
    settled = settled[:: max(1, len(settled) // PAIRS_LIMIT)]
    if len(settled) < 4:
        return None
    return statistics.median((b - a) / (t - s) for (s, a), (t, b) in combinations(settled, 2)) * 3600


async def load(server: Server, bundle: Bundle, options: argparse.Namespace, tally: Tally, memory: Memory) -> None:
    images = np.concatenate([bundle.samples()[0]["image"]] * 4)[: 2 * LARGE_ROWS]
    with open_bundle(bundle, threads=1) as run:
        expected = run({"image": images[:LARGE_ROWS]})["logits"]
        expected = np.concatenate([expected, run({"image": images[LARGE_ROWS:]})["logits"]])
    until_s = time.monotonic() + options.minutes * 60
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    headers = {"Authorization": f"Bearer {server.token}"}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        clients = [
            Client(server.endpoints[turn % len(server.endpoints)], images, expected, tally, turn)
            for turn in range(options.clients)
        ]
        watching = asyncio.create_task(watch(memory, tally, until_s))
        killing = asyncio.create_task(kill(server, options.kill_every_s, tally, until_s))
        await asyncio.gather(*(client.run(session, until_s) for client in clients))
        await asyncio.gather(watching, killing)


async def watch(memory: Memory, tally: Tally, until_s: float) -> None:
    while time.monotonic() < until_s:
        memory.sample()
        answered = sum(sum(counts.values()) for counts in tally.statuses.values())
        said = f"{answered} answered, {len(tally.lost)} lost, {len(tally.faults)} faults, {len(tally.kills)} kills"
        print(f"\r{said}", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(SAMPLE_S)


async def kill(server: Server, every_s: float, tally: Tally, until_s: float) -> None:
    """One worker's process after the other, in a random order; none in the last moments, which are for recovering."""
    order = random.Random(0)  # noqa: S311
    while time.monotonic() + every_s + AFTER_KILL_S < until_s:
        await asyncio.sleep(every_s)
        endpoint = order.choice(server.endpoints)
        described = await asyncio.to_thread(server.describe, endpoint.name, endpoint.version) or {}
        ready = [worker["pid"] for worker in described.get("workers", []) if worker["status"] == "READY"]
        if ready:
            tally.kills.append(time.monotonic())
            os.kill(order.choice(ready), signal.SIGKILL)


def archives() -> tuple[Bundle, list[Path]]:
    """The digits example: 1.0 in ONNX with two workers, 2.0 compiled by AOTInductor with one."""
    if not CHECKPOINT.is_dir():
        subprocess.run([sys.executable, "examples/digits/train.py", str(CHECKPOINT)], check=True)
    checkpoint = load_checkpoint(CHECKPOINT)
    mars, bundles = [], []
    for version, form, workers in (("1.0", "onnx", 2), ("2.0", "aoti", 1)):
        versioned = dataclasses.replace(checkpoint, spec=msgspec.structs.replace(checkpoint.spec, version=version))
        [outcome] = export_all(versioned, [Target(form)], FOLDER / version, reuse=True)
        if outcome.error is not None or outcome.bundle is None:
            sys.exit(f"error: {outcome.error}")
        bundles.append(outcome.bundle)
        mars.append(package(outcome.bundle, output=FOLDER / "store" / version, workers=workers))
    return bundles[0], mars


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every-s", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=30.0)
    parser.add_argument("--max-growth-mb-per-h", type=float, default=60.0)
    options = parser.parse_args()
    tally = Tally()
    bundle, mars = archives()
    with Server(mars, port=0, management_port=0, metrics_port=0) as server:
        memory = Memory(server.pid)
        started_s = time.monotonic()
        asyncio.run(load(server, bundle, options, tally, memory))
        took_s = time.monotonic() - started_s
    tell(tally, memory, took_s)
    frontend, workers, _ = memory.slopes_mb_per_h()
    grows = max(frontend, statistics.median(workers) if workers else 0.0) > options.max_growth_mb_per_h
    sys.exit(1 if tally.lost or tally.faults or grows else 0)


def tell(tally: Tally, memory: Memory, took_s: float) -> None:
    print(f"\r{took_s / 60:.1f} min, {len(tally.kills)} workers killed; {cpu_name()}, {usable_cores()} cores")
    for kind, counts in tally.statuses.items():
        told = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
        print(f"{kind:6} {sum(counts.values()):8} answered  ({told})")
    print(f"{len(tally.lost)} lost, {len(tally.faults)} wrong, {tally.after_kills} answered with 5xx after a kill")
    frontend, workers, last_mb = memory.slopes_mb_per_h()
    told = (
        f"{statistics.median(workers):+.1f} MB/h in the median of {len(workers)}"
        if workers
        else "none lived long enough"
    )
    print(f"memory: frontend {frontend:+.1f} MB/h, {last_mb:.0f} MB at the end; workers {told}")
    for fault in (*tally.lost, *tally.faults)[:10]:
        print(fault, file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except DeployerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
