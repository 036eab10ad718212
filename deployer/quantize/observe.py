"""From calibration data to ranges: what tensors inside a program hold, and which part of it int8 should cover."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from deployer.errors import ExportError
from deployer.spec import Array

BINS = 2048
#: of all values, the part that `percentile` covers
COVERED = 0.9999


@dataclass(frozen=True)
class Statistics:
    """What one tensor held over the calibration data: its ends, a histogram between them, and per channel the mean
    and the largest magnitude."""

    low: float
    high: float
    counts: Array
    channel_mean: Tensor
    channel_peak: Tensor


def observe(
    program: fx.GraphModule, axes: Mapping[str, int], batches: Iterable[tuple[Tensor, ...]]
) -> dict[str, Statistics]:
    """Run `program` twice over `batches`: the values of the nodes named in `axes` (name → channel axis).

    Raises ExportError when one is not finite: a range would mean nothing.
    """
    inputs = list(batches)
    ends = _Ends(program, axes)
    histograms = None
    with torch.no_grad():
        for tensors in inputs:
            ends.run(*tensors)
        histograms = _Histograms(program, {name: (ends.low[name], ends.high[name]) for name in axes})
        for tensors in inputs:
            histograms.run(*tensors)
    return {
        name: Statistics(
            ends.low[name],
            ends.high[name],
            histograms.counts[name],
            (ends.total[name] / ends.rows[name]).float(),
            ends.peak[name],
        )
        for name in axes
    }


class _Ends(fx.Interpreter):
    def __init__(self, program: fx.GraphModule, axes: Mapping[str, int]) -> None:
        super().__init__(program)
        self._axes = axes
        self.low = dict.fromkeys(axes, 0.0)  # zero is in every range: padding and ReLU make it
        self.high = dict.fromkeys(axes, 0.0)
        self.rows = dict.fromkeys(axes, 0)
        self.total: dict[str, Tensor] = {}
        self.peak: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if n.name in self._axes:
            assert isinstance(value, Tensor)  # noqa: S101 - inputs of layers are
            self._record(n.name, value.detach())
        return value

    def _record(self, name: str, value: Tensor) -> None:
        rows = value.movedim(self._axes[name], -1).flatten(0, -2) if value.ndim > 1 else value[None]
        low, high = torch.aminmax(value)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise ExportError(f"the value '{name}' inside the model is not finite on calibration data")
        self.low[name] = min(self.low[name], float(low))
        self.high[name] = max(self.high[name], float(high))
        self.rows[name] += len(rows)
        total, peak = rows.sum(0, dtype=torch.float64), rows.abs().amax(0)
        self.total[name] = self.total[name] + total if name in self.total else total
        self.peak[name] = torch.maximum(self.peak[name], peak) if name in self.peak else peak


class _Histograms(fx.Interpreter):
    def __init__(self, program: fx.GraphModule, ends: Mapping[str, tuple[float, float]]) -> None:
        super().__init__(program)
        self._ends = ends
        self.counts = {name: np.zeros(BINS) for name in ends}

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        low, high = self._ends.get(n.name, (0.0, 0.0))
        if low < high and isinstance(value, Tensor):
            self.counts[n.name] += torch.histc(value.detach().float(), BINS, low, high).double().numpy()
        return value


@dataclass(frozen=True)
class Grid:
    """The 256 values that an activation may take: (q - zero_point)·scale, q from `low` to `high`."""

    scale: float
    zero_point: int
    low: int
    high: int


def grid(seen: Statistics, observer: str, *, symmetric: bool) -> Grid:
    """The grid that an observer (one of OBSERVERS) chooses. The tensor must have held something other than zeros."""
    low, high = _RANGES[observer](seen, symmetric)
    return _grid(low, high, symmetric)


def _grid(low: float, high: float, symmetric: bool) -> Grid:
    if symmetric:
        return Grid(max(-low, high) / 127, 0, -128, 127)
    scale = (high - low) / 255
    return Grid(scale, round(-low / scale), 0, 255)


def _min_max(seen: Statistics, symmetric: bool) -> tuple[float, float]:
    return seen.low, seen.high


def _percentile(seen: Statistics, symmetric: bool) -> tuple[float, float]:
    """Nearly all values, the rarest magnitudes cut off."""
    edges = np.linspace(seen.low, seen.high, BINS + 1)
    reach = np.maximum(np.abs(edges[:-1]), np.abs(edges[1:]))
    order = np.argsort(reach)
    part = np.cumsum(seen.counts[order]) / seen.counts.sum()
    limit = float(reach[order][min(int(np.searchsorted(part, COVERED)), BINS - 1)])
    return max(seen.low, -limit), min(seen.high, limit)


def _mse(seen: Statistics, symmetric: bool) -> tuple[float, float]:
    """The range with the least squared error of rounding and clipping together."""
    centres, counts = _bins(seen)
    best, least = (seen.low, seen.high), np.inf
    for high in np.geomspace(0.02, 1, 40) * seen.high if seen.high > 0 else [0.0]:
        for low in np.geomspace(0.02, 1, 40) * seen.low if seen.low < 0 else [0.0]:
            steps = _grid(float(low), float(high), symmetric)
            error = float(np.sum(counts * np.square(centres - _rounded(centres, steps))))
            if error < least:
                best, least = (float(low), float(high)), error
    return best


def _entropy(seen: Statistics, symmetric: bool) -> tuple[float, float]:
    """The range whose quantized distribution has the least Kullback-Leibler divergence from the original's: the outer
    values are clipped into the last bins, the inner ones shared out evenly within each quantization step.

    Source: Migacz, 8-bit inference with TensorRT, 2017.
    """
    centres, counts = _bins(seen)
    best, least = (seen.low, seen.high), np.inf
    reach = max(-seen.low, seen.high)
    for part in np.linspace(1, 0.05, 96):
        low, high = max(seen.low, -part * reach), min(seen.high, part * reach)
        inside = (centres >= low) & (centres <= high)
        if low == high or not inside.any():
            continue
        reference = counts[inside].copy()
        reference[0] += counts[centres < low].sum()
        reference[-1] += counts[centres > high].sum()
        steps = _grid(low, high, symmetric)
        index = np.round(centres[inside] / steps.scale).astype(np.int64)
        index -= index.min()
        kept = counts[inside]
        filled = (kept > 0).astype(np.float64)
        mass = np.bincount(index, kept)
        places = np.bincount(index, filled)
        model = np.divide(mass, places, out=np.zeros_like(mass), where=places > 0)[index] * filled
        p = reference / reference.sum()
        q = (model + 1e-9 * (reference > 0)) / (model.sum() + 1e-9)
        used = p > 0
        divergence = float(np.sum(p[used] * np.log(p[used] / q[used])))
        if divergence < least:
            best, least = (low, high), divergence
    return best


def _bins(seen: Statistics) -> tuple[Array, Array]:
    """Centres and counts of the bins that hold something."""
    edges = np.linspace(seen.low, seen.high, BINS + 1)
    used = seen.counts > 0
    return ((edges[:-1] + edges[1:]) / 2)[used], seen.counts[used]


def _rounded(values: Array, steps: Grid) -> Array:
    q = np.clip(np.round(values / steps.scale) + steps.zero_point, steps.low, steps.high)
    return np.asarray((q - steps.zero_point) * steps.scale)


_RANGES = {"min-max": _min_max, "percentile": _percentile, "mse": _mse, "entropy": _entropy}
