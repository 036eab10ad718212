"""Measuring: a bundle in this process, or a served model over HTTP.

report = deployer.bench("build/digits-onnx-fp32", batch_sizes=[1, 8, 32])
report = deployer.bench("http://127.0.0.1:8080/predictions/digits", concurrency=[1, 8, 32], bundle="build/digits-…")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployer.bench.record import BenchReport, Environment, HttpRow, InProcessRow, Warmup
from deployer.bench.statistics import Latency
from deployer.errors import UsageError
from deployer.machine import usable_cores

__all__ = ["BenchReport", "Environment", "HttpRow", "InProcessRow", "Latency", "Warmup", "bench", "is_url"]

_MAX_CONCURRENCY = 4096
_THREADS_PER_CORE = 16  # more only wait for each other, thousands for ever


def is_url(target: str | Path) -> bool:
    """Whether `target` names a server and not a folder."""
    return isinstance(target, str) and "://" in target


def bench(
    target: str | Path,
    *,
    batch_sizes: Sequence[int] | None = None,
    threads: int | None = None,
    concurrency: Sequence[int] | None = None,
    requests: int | None = None,
    input_path: str | Path | None = None,
    bundle: str | Path | None = None,
    token_file: str | Path | None = None,
    body: str | None = None,
    timeout_s: float | None = None,
    duration_s: float | None = None,
    split: str | None = None,
    seed: int | None = None,
) -> BenchReport:
    """Measure `target`: a bundle's folder in this process, or a URL over HTTP.

    `duration_s` is seconds for each row (None: 2 for a bundle, 5 for a URL). `batch_sizes` and `threads` go with a
    bundle (see `inprocess.bench_bundle`), the others with a URL (see `over_http.bench_url`); an option that does not
    go with the kind of target raises UsageError. Over HTTP, failed requests and wrong answers make `passed` False; in
    process a wrong answer raises GateError.
    """
    of_bundle = {"batch_sizes": batch_sizes, "threads": threads}
    of_url = {
        "concurrency": concurrency, "requests": requests, "input_path": input_path, "bundle": bundle,
        "token_file": token_file, "body": body, "timeout_s": timeout_s, "split": split, "seed": seed,
    }  # fmt: skip
    over_http = is_url(target)
    _refuse_foreign("URL" if over_http else "bundle", of_bundle if over_http else of_url)
    _check_numbers(of_bundle | of_url | {"duration_s": duration_s})
    if requests is not None and duration_s is not None:
        raise UsageError("--requests and --duration-s both say when to stop; give one of them")
    given = _given((of_url if over_http else of_bundle) | {"duration_s": duration_s})
    # Imported here: a URL needs no torch, a bundle no HTTP client.
    if over_http:
        from deployer.bench.over_http import bench_url

        return bench_url(str(target), **given)
    from deployer.bench.inprocess import bench_bundle

    return bench_bundle(os.fspath(target), **given)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_path').replace('_', '-')}"


def _refuse_foreign(kind: str, foreign: dict[str, Any]) -> None:
    """Raises UsageError for the first option that does not go with this kind of target."""
    for name in _given(foreign):
        other = "bundle's folder" if kind == "URL" else "URL"
        raise UsageError(f"{_flag(name)} does not go with a {kind}; leave it out, or give a {other}")


def _check_numbers(options: dict[str, Any]) -> None:
    """Raises UsageError for counts below 1, empty lists and durations that are not positive."""
    for name, value in _given(options).items():
        if name in ("batch_sizes", "concurrency"):
            most = _MAX_CONCURRENCY if name == "concurrency" else None
            if not value or any(size < 1 or (most is not None and size > most) for size in value):
                limit = f"1 to {most}" if most is not None else "1 or more"
                raise UsageError(f"{_flag(name)} is {list(value)}; numbers of {limit} are expected")
        elif name == "threads" and not 1 <= value <= _THREADS_PER_CORE * usable_cores():
            most = _THREADS_PER_CORE * usable_cores()
            raise UsageError(f"--threads is {value}; 1 to {most} is expected on {usable_cores()} cores")
        elif name == "requests" and value < 1:
            raise UsageError(f"{_flag(name)} is {value}; 1 or more is expected")
        elif name in ("duration_s", "timeout_s") and not 0 < value < float("inf"):
            raise UsageError(f"{_flag(name)} is {value}; a positive number of seconds is expected")
