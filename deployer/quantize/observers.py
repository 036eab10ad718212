"""From recorded activations to the range that INT8 covers: a tensor's statistics, and the observers that read them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deployer.spec import Array

BINS = 2048
_LEVELS = 255
_PERCENTILE = 99.99
_ENTROPY_LEVELS = 128
_SMALLEST_SHARE = 0.05  # of the full range: no observer clips more


class Spread:
    """What calibration saw of one activation, gathered in two passes: `see` every array first, then `count` every one.

    `low` and `high` are its ends, 0 always between them; `vectors` is how many vectors of channels (along `axis`) there
    were, `largest` and `mean` are each channel's largest absolute value and mean; `counts` is a histogram of BINS equal
    bins of what is not exactly 0 (a zero costs nothing in any range).
    """

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.low = self.high = 0.0
        self.largest: Array = np.zeros(1, np.float32)
        self.counts: Array = np.zeros(BINS, np.int64)
        self._sum: Array = np.zeros(1)
        self.vectors = 0

    def see(self, array: Array) -> None:
        array = np.atleast_1d(array)
        rows = np.moveaxis(array, self.axis, -1).reshape(-1, array.shape[self.axis])
        self.low, self.high = min(self.low, float(rows.min())), max(self.high, float(rows.max()))
        self.largest = np.maximum(self.largest, np.abs(rows).max(0))
        self._sum = self._sum + rows.sum(0, dtype=np.float64)
        self.vectors += len(rows)

    def count(self, array: Array) -> None:
        if self.low < self.high:
            self.counts += np.histogram(array[array != 0], BINS, (self.low, self.high))[0]

    @property
    def mean(self) -> Array:
        return self._sum / max(self.vectors, 1)

    @property
    def centres(self) -> Array:
        edges = np.linspace(self.low, self.high, BINS + 1)
        return (edges[1:] + edges[:-1]) / 2


def limits(spread: Spread, observer: str, *, symmetric: bool = False) -> tuple[float, float]:
    """(lowest, highest) value that INT8 covers, as `observer` (one of config.OBSERVERS) chooses; 0 lies between them.

    With `symmetric` the two are of one size.
    """
    low, high = _OBSERVERS[observer](spread, symmetric) if spread.counts.any() else (spread.low, spread.high)
    size = max(-low, high)
    return (-size, size) if symmetric else (low, high)


def _min_max(spread: Spread, symmetric: bool) -> tuple[float, float]:
    return spread.low, spread.high


def _percentile(spread: Spread, symmetric: bool) -> tuple[float, float]:
    """The ends between which 99.99 % of the values lie, as much cut off on either side."""
    share = np.cumsum(spread.counts) / spread.counts.sum()
    tail = (1 - _PERCENTILE / 100) / 2
    edges = np.linspace(spread.low, spread.high, BINS + 1)
    low = edges[int(np.searchsorted(share, tail, "right"))]
    high = edges[min(int(np.searchsorted(share, 1 - tail)) + 1, BINS)]
    return min(float(low), 0.0), max(float(high), 0.0)


def _mse(spread: Spread, symmetric: bool) -> tuple[float, float]:
    """The range with the smallest mean squared error, one end drawn in after the other (Nagel et al. 2021, "A White
    Paper on Neural Network Quantization", section 3.1): a step s gives s²/12 inside, what is cut off its distance."""
    values, counts = spread.centres, spread.counts

    def error(low: float, high: float) -> float:
        beyond = values - np.clip(values, low, high)
        inside = counts[beyond == 0].sum() * ((high - low) / _LEVELS) ** 2 / 12
        return float(inside + (counts * beyond**2).sum())

    shares = np.linspace(_SMALLEST_SHARE, 1, 96)
    low, high = spread.low, spread.high
    if symmetric:
        size = min(shares * max(-low, high), key=lambda size: error(-size, size))
        return -float(size), float(size)
    for _ in range(2):
        high = float(min(shares * spread.high, key=lambda end: error(low, end)))
        low = float(min(shares * spread.low, key=lambda end: error(end, high)))
    return low, high


def _entropy(spread: Spread, symmetric: bool) -> tuple[float, float]:
    """The threshold that loses the least information: the Kullback-Leibler divergence of the values cut off there from
    their 128 levels (Migacz 2017, 8-bit Inference with TensorRT), over absolute values."""
    size = max(-spread.low, spread.high)
    folded = np.histogram(np.abs(spread.centres), BINS, (0, size), weights=spread.counts)[0]
    best, least = BINS, np.inf
    for end in range(_ENTROPY_LEVELS, BINS + 1, BINS // 128):
        inside = folded[:end]
        wanted = inside.copy()
        wanted[-1] += folded[end:].sum()
        level = np.arange(end) * _ENTROPY_LEVELS // end
        filled = (inside > 0).astype(float)
        sums = np.bincount(level, inside, _ENTROPY_LEVELS)
        places = np.bincount(level, filled, _ENTROPY_LEVELS)
        got = filled * (sums / np.maximum(places, 1))[level]
        if (divergence := _divergence(wanted, got)) < least:
            best, least = end, divergence
    threshold = size * max(best / BINS, _SMALLEST_SHARE)
    return max(spread.low, -threshold), min(spread.high, threshold)


def _divergence(wanted: Array, got: Array) -> float:
    if not got.any():
        return float(np.inf)
    p, q = wanted / wanted.sum(), got / got.sum()
    there = p > 0
    return float((p[there] * np.log(p[there] / np.maximum(q[there], 1e-12))).sum())


_OBSERVERS: dict[str, Callable[[Spread, bool], tuple[float, float]]] = {
    "min-max": _min_max,
    "percentile": _percentile,
    "mse": _mse,
    "entropy": _entropy,
}
