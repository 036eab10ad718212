"""Is the INT8 artifact faster than the same format in fp32? Both measured side by side, in one process, in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

#: a round is a block of calls to one artifact and a block to the other, in an order that alternates
MIN_ROUNDS = 15
MAX_ROUNDS = 120
_BUDGET_S = 8.0
_BLOCK_S = 0.02
_MAX_CALLS = 50
_WARMUP_CALLS = 3
_RESAMPLES = 2000
_CONFIDENCE = 0.95
_SEED = 20_261_201


class Speed(msgspec.Struct, frozen=True):
    """Medians in ms of one run at `sizes`, and how many times faster INT8 is, with its 95 % interval.

    `not_measured` says why there are no figures.
    """

    sizes: dict[str, int] = {}
    fp32_ms: float | None = None
    int8_ms: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    not_measured: str = ""

    @property
    def faster(self) -> bool:
        """True where even the lower end of the interval is above 1; also where nothing could be measured."""
        return self.low is None or self.low > 1

    def __str__(self) -> str:
        if self.not_measured or self.ratio is None:
            return f"speed not measured: {self.not_measured}"
        at = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return (
            f"{self.int8_ms:.3g} ms in INT8, {self.fp32_ms:.3g} ms in fp32{f' at {at}' if at else ''}: "
            f"{self.ratio:.2f}× (95 % interval {self.low:.2f} to {self.high:.2f})"
        )


def ratio_interval(slow_ms: Sequence[float], fast_ms: Sequence[float]) -> tuple[float, float, float]:
    """(ratio, low, high): median(slow)/median(fast) over paired rounds, and its 95 % bootstrap interval.

    Rounds are drawn with their partner, so that a disturbance that hit both stays in both. Seeded: equal timings give
    an equal interval. Raises ValueError for lists of other lengths, none, or times that are not above zero.
    """
    slow, fast = np.asarray(slow_ms, np.float64), np.asarray(fast_ms, np.float64)
    if slow.shape != fast.shape or slow.ndim != 1 or not slow.size:
        raise ValueError(f"{slow.size} and {fast.size} timings; as many of each, and at least one, are expected")
    if not (np.isfinite(slow).all() and np.isfinite(fast).all() and (slow > 0).all() and (fast > 0).all()):
        raise ValueError("timings must be above zero and finite")
    draws = np.random.default_rng(_SEED).integers(0, slow.size, (_RESAMPLES, slow.size))
    ratios = np.median(slow[draws], axis=1) / np.median(fast[draws], axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.exp(np.quantile(np.log(ratios), [tail, 1 - tail]))  # in logs: a/b and b/a give mirrored intervals
    ratio = float(np.median(slow) / np.median(fast))
    return ratio, min(float(low), ratio), max(float(high), ratio)


def measure_speed(
    int8: Callable[[], object],
    fp32: Callable[[], object],
    sizes: Mapping[str, int],
    *,
    budget_s: float = _BUDGET_S,
    min_rounds: int = MIN_ROUNDS,
) -> Speed:
    """Run both in turns and compare. A block's first call is not timed: the other artifact's threads are still at rest
    or at work then, and caches hold its data. Between `min_rounds` and MAX_ROUNDS rounds, as `budget_s` allows."""
    for call in (fp32, int8):
        for _ in range(_WARMUP_CALLS):
            call()
    calls = {call: _calls_in_block(call) for call in (fp32, int8)}
    times: dict[Callable[[], object], list[float]] = {fp32: [], int8: []}
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        for turn in range(MAX_ROUNDS):
            for call in (fp32, int8) if turn % 2 else (int8, fp32):
                times[call].append(_block_ms(call, calls[call]))
            if turn + 1 >= min_rounds and time.perf_counter() - started >= budget_s:
                break
    finally:
        if was_on:
            gc.enable()
    ratio, low, high = ratio_interval(times[fp32], times[int8])
    medians = {call: float(np.median(values)) for call, values in times.items()}
    return Speed(dict(sizes), medians[fp32], medians[int8], ratio, low, high, len(times[int8]))


def _calls_in_block(call: Callable[[], object]) -> int:
    started = time.perf_counter()
    call()
    return int(np.clip(_BLOCK_S / max(time.perf_counter() - started, 1e-9), 1, _MAX_CALLS))


def _block_ms(call: Callable[[], object], count: int) -> float:
    """Median of `count` timed calls after one that is not timed."""
    call()
    taken = []
    for _ in range(count):
        before = time.perf_counter()
        call()
        taken.append((time.perf_counter() - before) * 1e3)
    return float(np.median(taken))
