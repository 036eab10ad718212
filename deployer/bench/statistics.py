"""Figures from samples: percentiles, rates, and whether a warm-up has settled. Pure functions, no clock.

A percentile is the linear interpolation between closest ranks (Hyndman and Fan's type 7, numpy's `linear`): of n
sorted values, percentile p lies at rank p/100·(n−1), counted from 0, and between two ranks in proportion. A rate is a
count over the wall clock that passed, never 1/latency, which is wrong as soon as two requests overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

PERCENTS = (50, 90, 95, 99)


class Latency(msgspec.Struct, frozen=True):
    """Summary of latencies in milliseconds; every figure is None ("no data") where there were no samples.

    `notes` say which percentiles the number of samples is too small for.
    """

    samples: int
    mean_ms: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    notes: tuple[str, ...] = ()


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Percentile `percent` (0 to 100) of `values`, in any order, in their unit; None of no values.

    Linear interpolation between closest ranks. Raises ValueError for a `percent` outside 0 to 100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} asked for; 0 to 100 is expected")
    return _at_rank(sorted(values), percent) if values else None


def _at_rank(ordered: Sequence[float], percent: float) -> float:
    rank = percent / 100 * (len(ordered) - 1)
    below = ordered[math.floor(rank)]
    above = ordered[math.ceil(rank)]
    return below + (above - below) * (rank - math.floor(rank))


def samples_needed(percent: int) -> int:
    """The fewest samples of which one is expected beyond percentile `percent`: 100 for p99, 20 for p95."""
    return math.ceil(100 / (100 - percent))


def summarize(latencies_ms: Sequence[float]) -> Latency:
    """Mean, p50, p90, p95, p99 and maximum of latencies in milliseconds, in any order."""
    if not latencies_ms:
        return Latency(0, notes=("no data: no sample was taken",))
    ordered = sorted(latencies_ms)
    p50, p90, p95, p99 = (_at_rank(ordered, percent) for percent in PERCENTS)
    return Latency(
        samples=len(ordered),
        mean_ms=math.fsum(ordered) / len(ordered),
        p50_ms=p50,
        p90_ms=p90,
        p95_ms=p95,
        p99_ms=p99,
        max_ms=ordered[-1],
        notes=_notes(len(ordered)),
    )


def _notes(samples: int) -> tuple[str, ...]:
    weak = [percent for percent in PERCENTS if samples < samples_needed(percent)]
    if not weak:
        return ()
    names = ", ".join(f"p{percent} (needs {samples_needed(percent)})" for percent in weak)
    counted = "1 sample is" if samples == 1 else f"{samples} samples are"
    return (f"{counted} too few for {names}: no more than the maximum or its neighbour",)


def per_second(count: float, wall_s: float) -> float | None:
    """`count` things in `wall_s` seconds of wall clock, per second; None where no time passed."""
    return count / wall_s if wall_s > 0 else None


def is_steady(latencies_ms: Sequence[float], window: int, tolerance: float = 0.1) -> bool:
    """Whether a warm-up has settled: the medians of the last two windows differ by at most `tolerance` of the larger.

    `latencies_ms` stand in the order in which they were taken; fewer than two windows are not steady.
    """
    if len(latencies_ms) < 2 * window:
        return False
    before, last = median(latencies_ms[-2 * window : -window]), median(latencies_ms[-window:])
    return abs(before - last) <= tolerance * max(before, last)
