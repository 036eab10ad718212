"""Changes to a model that leave its float answers as they are and let int8 lose less, and the correction of a bias.

smooth         outlier channels of a linear layer's input moved into its weight
equalize       neighbouring convolutions and linear layers rescaled channel by channel
bias_error     the mean error that rounded weights make, for the bias to take back
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

aten = torch.ops.aten


class Smoothed(nn.Linear):
    """A linear layer over x·inverse, with inverse folded into its weight: the same answer."""

    inverse: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input * self.inverse, self.weight, self.bias)


def smooth(model: nn.Module, batches: Iterable[tuple[Tensor, ...]], alpha: float) -> list[str]:
    """Divide each channel j of a linear layer's input by s_j = max|x_j|^alpha / max|W_j|^(1 - alpha) and multiply the
    weight by it. Layers that share an input share s. Changes `model`, which takes `batches` positionally; returns the
    names of the layers that were smoothed.

    The division stays an operator of its own: folding it into the layer norm before would need a norm whose output goes
    nowhere else, and in post-norm transformers it also feeds the residual sum.

    Source: Xiao et al., SmoothQuant, 2022 (arXiv:2211.10438), equation 4.
    """
    layers = dict(_own_linears(model))
    peaks, groups = _watch(model, layers, batches)
    for group in groups:
        weight = torch.stack([layers[name].weight.detach().abs().amax(0) for name in group]).amax(0)
        peak = peaks[group[0]]
        scale = peak.clamp(min=1e-30).pow(alpha) / weight.clamp(min=1e-30).pow(1 - alpha)
        scale = torch.where((peak > 0) & (weight > 0), scale, torch.ones_like(scale))
        for name in group:
            layer = layers[name]
            layer.weight.data = layer.weight.data * scale
            layer.register_buffer("inverse", 1 / scale)
            layer.__class__ = Smoothed
    return [name for name in layers if name in peaks]


def _own_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Plain linear layers whose weight nothing else uses (an embedding that is tied to it would change too)."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for name, module in model.named_modules():
        if type(module) is nn.Linear and uses[id(module.weight)] == 1:
            yield name, module


def _watch(
    model: nn.Module, layers: dict[str, nn.Linear], batches: Iterable[tuple[Tensor, ...]]
) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Per layer the largest magnitude of each input channel, and the layers grouped by the tensor that they take."""
    peaks: dict[str, Tensor] = {}
    taken: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            value = inputs[0] if inputs else named["input"]
            peak = value.detach().abs().reshape(-1, value.shape[-1]).amax(0)
            peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak
            taken.setdefault(name, value)  # held, so that no other tensor gets its place in memory

        return hook

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it passes the layers by
    hooks = [layer.register_forward_pre_hook(note(name), with_kwargs=True) for name, layer in layers.items()]
    groups: dict[int, list[str]] = {}
    try:
        with torch.no_grad():
            for turn, tensors in enumerate(batches):
                model(*tensors)
                if turn == 0:
                    for name, value in taken.items():
                        groups.setdefault(id(value), []).append(name)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for hook in hooks:
            hook.remove()
    grouped = {name for group in groups.values() for name in group}
    alone = [[name] for name in peaks if name not in grouped]
    for group in groups.values():  # they share what the largest of them saw
        peak = torch.stack([peaks[name] for name in group]).amax(0)
        peaks.update(dict.fromkeys(group, peak))
    return peaks, [*groups.values(), *alone]


@dataclass(frozen=True)
class Pair:
    """Two layers with nothing between them but what passes a channel's scale on; names of parameters in the model."""

    first: str
    first_bias: str | None
    norm: tuple[str, str, str] | None
    second: str
    second_depthwise: bool
    eps: float = 0.0


#: f(s·x) = s·f(x) for s > 0, channel by channel
_HOMOGENEOUS = (
    aten.relu.default,
    aten.relu_.default,
    aten.leaky_relu.default,
    aten.leaky_relu_.default,
    aten.max_pool2d.default,
    aten.avg_pool2d.default,
    aten.adaptive_avg_pool2d.default,
    aten.dropout.default,
)
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default)
_LAYERS = (*_CONVOLUTIONS, aten.linear.default)


def equalize(model: nn.Module, program: fx.GraphModule, prefix: str = "", sweeps: int = 20) -> list[str]:
    """Give both sides of each pair of neighbouring layers the same range per channel: the first's output channel i is
    divided by s_i = sqrt(r1_i / r2_i), the second's input channel multiplied by it. Changes the parameters of `model`,
    whose program (`program`, parameters called prefix + their name) tells what is neighbouring; returns the names of
    the first layers' weights.

    A batch norm between them takes the division, so that no layer has to be folded first.

    Source: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction, 2019
    (arXiv:1906.04721), section 4.1.
    """
    pairs = list(_pairs(program, prefix))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for _ in range(sweeps):
            change = max((_equalize_pair(pair, tensors) for pair in pairs), default=0.0)
            if change < 1e-3:
                break
    return [pair.first for pair in pairs]


def equalizable(program: fx.GraphModule) -> bool:
    """Does a program have neighbouring layers that `equalize` would change?"""
    return any(True for _ in _pairs(program, ""))


def _equalize_pair(pair: Pair, tensors: dict[str, Tensor]) -> float:
    """Returns how far the scales were from one."""
    first, second = tensors[pair.first], tensors[pair.second]
    own = first.abs().flatten(1).amax(1)
    if pair.norm is not None:
        own = own * tensors[pair.norm[0]].abs() / (tensors[pair.norm[2]] + pair.eps).sqrt()
    axis = 0 if pair.second_depthwise else 1
    other = second.abs().movedim(axis, 0).flatten(1).amax(1)
    scale = (own / other).sqrt()
    scale = torch.where((own > 0) & (other > 0) & torch.isfinite(scale), scale, torch.ones_like(scale))
    if pair.norm is None:
        first /= scale.reshape(-1, *[1] * (first.ndim - 1))
        if pair.first_bias is not None:
            tensors[pair.first_bias].div_(scale)
    else:
        tensors[pair.norm[0]].div_(scale)
        tensors[pair.norm[1]].div_(scale)
    second *= scale.reshape([-1 if at == axis else 1 for at in range(second.ndim)])
    return float((scale.log().abs()).max())


def _pairs(program: fx.GraphModule, prefix: str) -> Iterator[Pair]:
    for node in program.graph.nodes:
        if node.target not in _LAYERS:
            continue
        arguments = [*node.args, None]
        weight, bias = arguments[1:3]
        if not _owned(weight) or not (bias is None or _owned(bias)):
            continue
        last, norm, eps = node, None, 0.0
        after = _only_user(node)
        if after is not None and after.target is aten.batch_norm.default and node.target in _CONVOLUTIONS:
            if not all(_owned(part) for part in after.args[1:5]):
                continue
            gain, shift, _, variance = (_name(part, prefix) for part in after.args[1:5])
            last, norm, eps = after, (gain, shift, variance), after.args[7]
        after = _only_user(last)
        while after is not None and after.target in _HOMOGENEOUS:
            after = _only_user(after)
        if after is None or after.target not in _LAYERS or not _owned(after.args[1]):
            continue
        if (after.target is aten.linear.default) != (node.target is aten.linear.default):
            continue  # between a convolution and a linear layer channels change their axis
        channels, shape = weight.meta["val"].shape[0], after.args[1].meta["val"].shape
        groups = after.args[6] if len(after.args) > 6 else 1
        depthwise = 1 < groups == channels == shape[0]
        if groups == 1 or depthwise:
            own_bias = None if bias is None else _name(bias, prefix)
            yield Pair(_name(weight, prefix), own_bias, norm, _name(after.args[1], prefix), depthwise, eps)


def _name(node: fx.Node, prefix: str) -> str:
    return str(node.target).removeprefix(prefix)


def _owned(node: Any) -> bool:
    """Is this a parameter that one operator alone uses?"""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return False
    uses = sum(len(other.users) for other in node.graph.nodes if other.op == "get_attr" and other.target == node.target)
    return uses == 1


def _only_user(node: fx.Node) -> Any:
    """A node, or None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def round_weight(weight: Tensor, limit: int) -> Tensor:
    """`weight` as int8 holds it: symmetric per output channel, whole numbers from -limit to limit times a scale."""
    peak = weight.abs().flatten(1).amax(1).reshape(-1, *[1] * (weight.ndim - 1))
    scale = torch.where(peak > 0, peak / limit, torch.ones_like(peak))
    return (weight / scale).round().clamp(-limit, limit) * scale


def bias_error(weight: Tensor, rounded: Tensor, input_mean: Tensor) -> Tensor:
    """The mean error of each output channel, (rounded - weight)·E[x], to be taken off the bias. Convolutions with
    groups too; the border, where a kernel sees padding, is counted as the inside.

    Source: Nagel et al. 2019 (arXiv:1906.04721), section 4.2, with E[x] measured instead of derived from batch norms.
    """
    delta = (rounded - weight).flatten(2).sum(2) if weight.ndim > 2 else rounded - weight
    groups = len(input_mean) // delta.shape[1]
    means = input_mean.reshape(groups, 1, -1)
    return (delta.reshape(groups, -1, delta.shape[1]) * means).sum(2).flatten()
