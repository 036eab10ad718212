"""Operators that the ONNX exporter lacks or translates wrongly, in terms of ones that it translates rightly.

They are applied to every program before its translation. A row of attention that may look at nothing is the reason for
the first: PyTorch answers zeros there, the exporter's translation the mean of all values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = (query * factor) @ (key * factor).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        return scores.softmax(-1) @ value
    allowed = attn_mask.dtype == torch.bool
    scores = scores.masked_fill(~attn_mask, -math.inf) if allowed else scores + attn_mask
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(nothing, 0.0) @ value


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    difference = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs()
    if p == 2:
        return difference.square().sum(-1).sqrt()
    if math.isinf(p):
        return difference.amax(-1)
    if p == 0:
        return (difference != 0).to(x1.dtype).sum(-1)
    return difference.pow(p).sum(-1).pow(1 / p)


def _cummax(self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _running(self, dim, largest=True)


def _cummin(self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _running(self, dim, largest=False)


def _running(x: Tensor, dim: int, *, largest: bool) -> tuple[Tensor, Tensor]:
    """Largest (or smallest) so far and the last place where it stands: all pairs compared, quadratic in the axis."""
    rows = x.movedim(dim, -1)
    length = rows.shape[-1]
    upto = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    pairs = rows.unsqueeze(-2)
    limit = -math.inf if largest else math.inf
    if not x.is_floating_point():
        limit = torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max
    masked = torch.where(upto, pairs, torch.full((), limit, dtype=x.dtype, device=x.device))
    values = masked.amax(-1) if largest else masked.amin(-1)
    position = torch.arange(length, device=x.device)
    found = (pairs == values.unsqueeze(-1)) & upto
    indices = torch.where(found, position, torch.full((), -1, dtype=torch.int64, device=x.device)).amax(-1)
    return values.movedim(-1, dim), indices.movedim(-1, dim)


def _cumprod(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """All prefixes multiplied, quadratic in the axis: ONNX has no running product."""
    rows = (self if dtype is None else self.to(dtype)).movedim(dim, -1)
    length = rows.shape[-1]
    upto = torch.ones(length, length, dtype=torch.bool, device=rows.device).tril()
    return torch.where(upto, rows.unsqueeze(-2), torch.ones_like(rows).unsqueeze(-2)).prod(-1).movedim(-1, dim)


def _atan2(self: Tensor, other: Tensor) -> Tensor:
    """The exporter's translation answers π or NaN where both are zero."""
    y_below = (self < 0) | ((self == 0) & (1 / self < 0))  # the sign of a zero counts
    x_below = (other < 0) | ((other == 0) & (1 / other < 0))
    half_turn = torch.where(y_below, -math.pi, math.pi).to(self.dtype)
    inside = torch.atan(self / torch.where(other == 0, torch.ones_like(other), other))
    turned = inside + torch.where(other < 0, half_turn, torch.zeros_like(half_turn))
    upright = torch.where(self == 0, torch.where(x_below, half_turn, self), half_turn / 2)
    return torch.where(other == 0, upright, turned)


#: operator → its equal
TABLE: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.atan2.default: _atan2,
    aten.cdist.default: _cdist,
    aten._cdist_forward.default: _cdist,
    aten.cummax.default: _cummax,
    aten.cummin.default: _cummin,
    aten.cumprod.default: _cumprod,
}


def decomposed(program: torch.export.ExportedProgram) -> tuple[torch.export.ExportedProgram, list[str]]:
    """`program` without the operators of TABLE, and the names of those that were replaced.

    Attention without a mask is left to the exporter, which then writes ONNX's own Attention.
    """
    used = sorted({str(node.target) for node in _nodes(program) if node.target in TABLE and _needed(node)})
    if not used:
        return program, []
    table = {operator: replacement for operator, replacement in TABLE.items() if str(operator) in used}
    return program.run_decompositions(table), used


def _nodes(program: torch.export.ExportedProgram) -> Iterable[torch.fx.Node]:
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


def _needed(node: torch.fx.Node) -> bool:
    if node.target is not aten.scaled_dot_product_attention.default:
        return True
    return (node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")) is not None
