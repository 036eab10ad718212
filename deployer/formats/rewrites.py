"""Functions that torch.export ties to the example's sizes, replaced while exporting by equals that it can follow.

Each gives the value of the original at every size; only how it is computed differs. They are tried after plain export
has failed, never before, and what was replaced is recorded and announced.

    lstm, gru, rnn      unrolled step by step by torch.export: the sequence becomes a constant → a scan
    take_along_dim      broadcasts by the example's sizes → a gather, where there is nothing to broadcast
    interpolate         sizes computed through floats, sizes × scale → whole numbers where the scale is whole
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, Sequence[Tensor]], State]


class Rewrites(TorchFunctionMode):
    """While active, calls of the functions above go to their equals; `used` holds the names of those that were met."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        replacement = _REPLACEMENTS.get(name)
        if replacement is not None:
            result = replacement(*args, **(kwargs or {}))
            if result is not NotImplemented:
                if name not in self.used:
                    self.used.append(name)
                return result
        return func(*args, **(kwargs or {}))


def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Any:
    if dim is None or input.ndim != indices.ndim:
        return NotImplemented
    others = [axis for axis in range(input.ndim) if axis != dim % input.ndim]
    if any(input.shape[axis] != indices.shape[axis] for axis in others):
        return NotImplemented
    return input.gather(dim, indices)


def _interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    spatial = input.shape[2:]
    factors = scale_factor if isinstance(scale_factor, list | tuple) else [scale_factor] * len(spatial)
    if scale_factor is None or any(float(factor) != int(factor) for factor in factors):
        return NotImplemented
    whole = [length * int(factor) for length, factor in zip(spatial, factors, strict=True)]
    return F.interpolate(input, whole, mode=mode, align_corners=align_corners, antialias=antialias)


def _lstm_cell(gates: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    hidden, memory = state
    ingate, forget, candidate, outgate = (gates + F.linear(hidden, *weights)).chunk(4, -1)
    memory = forget.sigmoid() * memory + ingate.sigmoid() * candidate.tanh()
    return outgate.sigmoid() * memory.tanh(), memory


def _gru_cell(gates: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    (hidden,) = state
    reset, update, candidate = gates.chunk(3, -1)
    hidden_reset, hidden_update, hidden_candidate = F.linear(hidden, *weights).chunk(3, -1)
    update = (update + hidden_update).sigmoid()
    candidate = (candidate + (reset + hidden_reset).sigmoid() * hidden_candidate).tanh()
    return ((1 - update) * candidate + update * hidden,)


def _rnn_tanh_cell(gates: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    return ((gates + F.linear(state[0], *weights)).tanh(),)


def _rnn_relu_cell(gates: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    return ((gates + F.linear(state[0], *weights)).relu(),)


def _recurrent(cell: Cell) -> Callable[..., Any]:
    """`torch.lstm` and its like as scans of `cell`."""

    def run(*arguments: Any) -> Any:
        if len(arguments) != 9 or not isinstance(arguments[3], bool):
            return NotImplemented  # packed sequences
        x, state, weights, biases, layers, _, training, bidirectional, batch_first = arguments
        states = tuple(state) if isinstance(state, list | tuple) else (state,)
        each = 4 if biases else 2
        ways = 2 if bidirectional else 1
        if training or len(weights) != layers * ways * each:  # dropout between layers; projections
            return NotImplemented
        steps = x.transpose(0, 1) if batch_first else x
        batch = steps.shape[1]
        ends: list[State] = []
        for layer in range(layers):
            outputs = []
            for way in range(ways):
                at = layer * ways + way
                part = weights[at * each : (at + 1) * each]
                output, end = _scan(cell, steps, tuple(value[at] for value in states), part, batch, reverse=way == 1)
                outputs.append(output)
                ends.append(end)
            steps = torch.cat(outputs, -1) if ways == 2 else outputs[0]
        last = tuple(torch.stack([end[i] for end in ends]) for i in range(len(states)))
        return (steps.transpose(0, 1) if batch_first else steps, *last)

    return run


def _scan(
    cell: Cell, steps: Tensor, state: State, weights: Sequence[Tensor], batch: int, *, reverse: bool
) -> tuple[Tensor, State]:
    """One layer in one direction: steps (length, batch, in) → outputs (length, batch, hidden), the last state."""
    from torch._higher_order_ops.scan import scan

    # weights: input, hidden, then their biases where there are any
    gates = F.linear(steps, weights[0], *weights[2:3])
    hidden_weights = (weights[1], *weights[3:4])
    width = state[0].shape[-1]

    def step(carry: State, gate: Tensor) -> tuple[State, Tensor]:
        # The reshape changes nothing: it makes the batch size an input of the loop, which AOTInductor looks for there.
        new = cell(gate, (carry[0].reshape(batch, width), *carry[1:]), hidden_weights)
        return new, new[0].clone()

    carry, outputs = scan(
        step, tuple(value.contiguous() for value in state), gates.flip(0) if reverse else gates, dim=0
    )
    return (outputs.flip(0) if reverse else outputs), carry


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "take_along_dim": _take_along_dim,
    "interpolate": _interpolate,
    "lstm": _recurrent(_lstm_cell),
    "gru": _recurrent(_gru_cell),
    "rnn_tanh": _recurrent(_rnn_tanh_cell),
    "rnn_relu": _recurrent(_rnn_relu_cell),
}
