"""What tensors inside a torch program hold on calibration data, and the grid that int8 gives each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from deployer.errors import ExportError
from deployer.quantize.observers import BINS, Spread, limits


def observe(
    program: fx.GraphModule, axes: Mapping[str, int], batches: Iterable[tuple[Tensor, ...]]
) -> dict[str, Spread]:
    """Run `program` twice over `batches`: the values of the nodes named in `axes` (name → channel axis).

    Raises ExportError when one is not finite: a range would mean nothing.
    """
    inputs = list(batches)
    spreads = {name: Spread(axis) for name, axis in axes.items()}
    with torch.no_grad():
        for turn in (_Seer, _Counter):
            watching = turn(program, spreads)
            for tensors in inputs:
                watching.run(*tensors)
    return spreads


class _Seer(fx.Interpreter):
    def __init__(self, program: fx.GraphModule, spreads: Mapping[str, Spread]) -> None:
        super().__init__(program)
        self._spreads = spreads

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self._spreads:
            self.look(n.name, value.detach(), self._spreads[n.name])
        return value

    def look(self, name: str, value: Tensor, spread: Spread) -> None:
        if not torch.isfinite(value).all():
            raise ExportError(f"the value '{name}' inside the model is not finite on calibration data")
        spread.see(value.numpy())


class _Counter(_Seer):
    def look(self, name: str, value: Tensor, spread: Spread) -> None:
        if spread.low < spread.high:  # torch counts several times faster than numpy
            counts = torch.histc(value[value != 0], BINS, spread.low, spread.high)
            spread.counts += counts.numpy().astype(spread.counts.dtype)


@dataclass(frozen=True)
class Grid:
    """The 256 values that an activation may take: (q - zero_point)·scale, q from `low` to `high`."""

    scale: float
    zero_point: int
    low: int
    high: int


def grid(spread: Spread, observer: str, *, symmetric: bool) -> Grid:
    """The grid that an observer (one of OBSERVERS) chooses. The tensor must have held something other than zeros."""
    low, high = limits(spread, observer, symmetric=symmetric)
    if symmetric:
        return Grid(high / 127, 0, -128, 127)
    scale = (high - low) / 255
    return Grid(scale, round(-low / scale), 0, 255)
