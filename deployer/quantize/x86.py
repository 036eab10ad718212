"""What torchao's PT2E is told about a program: the layers that become int8, and by which grids.

torchao's own X86InductorQuantizer finds its patterns by source partitions and stops at a module that is called twice
(one ReLU for a whole block, as ResNets have it). This one reads the graph, and asks for what inductor lowers on x86:

    convolution, linear   input and weight in int8
    convolution + add     the other addend in int8 too, so that the sum is fused into the convolution
    max pooling           in int8 on one grid, where it follows such a layer

Imported inside functions only: torchao is an extra, and takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401 - registers inductor's lowerings
from torch import fx
from torchao.quantization.pt2e.observer import PerChannelMinMaxObserver, PlaceholderObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.utils import _fuse_conv_bn_, _fuse_linear_bn_

from deployer.quantize.observe import Grid

aten = torch.ops.aten
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default)
_ADDS = (aten.add.Tensor, aten.add_.Tensor)
_UNARY = (aten.relu.default, aten.relu_.default, aten.hardtanh.default, aten.hardtanh_.default)
_KEY = "quantization_annotation"
#: a scale's floor. torchao's own, 2**-12, rounds channels of small weights to nothing
_LEAST_SCALE = 1e-20
#: of an activation, at run time: all zeros are divided by it
_LEAST_ACTIVATION = 1e-12


def fold_norms(program: fx.GraphModule) -> None:
    """Batch norms into the convolutions and linear layers before them: the program is changed."""
    _fuse_conv_bn_(program)
    _fuse_linear_bn_(program)


def straighten(program: fx.GraphModule) -> None:
    """Inputs of linear layers in C order: over another one of three axes a linear layer becomes a batched product, and
    torchao's lowering of that stops at a dynamic axis. The program is changed."""
    for node in list(program.graph.nodes):
        if node.target is not aten.linear.default or node.args[0].meta["val"].is_contiguous():
            continue
        value = node.args[0]
        with program.graph.inserting_before(node):
            copied = program.graph.call_function(
                aten.clone.default, (value,), {"memory_format": torch.contiguous_format}
            )
        copied.meta["val"] = value.meta["val"].contiguous()
        node.args = (copied, *node.args[1:])
    program.recompile()


def layers_of(program: fx.GraphModule, *, static: bool) -> dict[str, str]:
    """Node → layer, of all that can become int8, in the program's order: convolutions (`static` alone) and linear
    layers of float32 whose weight is a parameter. A layer is called as its module is: `layer1.0.conv2`."""
    kinds = (*_CONVOLUTIONS, aten.linear.default) if static else (aten.linear.default,)
    found = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target not in kinds:
            continue
        value, weight = node.args[:2]
        floats = all(arg.meta["val"].dtype is torch.float32 for arg in (value, weight))
        if weight.op == "get_attr" and floats:
            found[node.name] = weight.target.removeprefix("model.").removesuffix(".weight")
    return found


def tensors_of(program: fx.GraphModule, nodes: Mapping[str, str]) -> dict[str, int]:
    """Which tensors must be seen before `nodes` become int8 (static), name → channel axis: what they take, and where
    that was pooled, what it was pooled from."""
    axes = {}
    for user, value in _edges(program, nodes):
        axes[source(value).name] = 1
        if user.name in nodes:
            axes[value.name] = -1 if user.target is aten.linear.default else 1
    return axes


def one_channel(program: fx.GraphModule, nodes: Mapping[str, str]) -> list[str]:
    """The layers of `nodes` that are convolutions over a single channel."""
    by_name = {node.name: node for node in program.graph.nodes}
    thin = (name for name in nodes if by_name[name].target in _CONVOLUTIONS)
    return list(dict.fromkeys(nodes[name] for name in thin if by_name[name].args[0].meta["val"].shape[1] == 1))


def fed_by(program: fx.GraphModule, nodes: Mapping[str, str], tensors: Collection[str]) -> list[str]:
    """The layers of `nodes` that take one of `tensors`."""
    users = [user.name for user, value in _edges(program, nodes) if source(value).name in tensors]
    return list(dict.fromkeys(nodes[name] for name in users if name in nodes))


def quantized(
    program: fx.GraphModule, nodes: Mapping[str, str], grids: Mapping[str, Grid] | None, weight_limit: int
) -> fx.GraphModule:
    """`program` with `nodes` in int8, as quantize and dequantize operators around them. `grids` None: dynamic; tensors
    without a grid, which no layer takes, stay float.

    Weights are symmetric per output channel, from -weight_limit to weight_limit. `program` is used up.
    """
    prepared = prepare_pt2e(program, _Annotator(nodes, grids, weight_limit))
    for node in prepared.graph.nodes:  # activations' grids are known; weights need no run of the model to be seen
        if node.op == "call_module" and isinstance(
            seer := prepared.get_submodule(node.target), PerChannelMinMaxObserver
        ):
            seer(attribute(prepared, node.args[0].target))
    converted: fx.GraphModule = convert_pt2e(prepared)
    if grids is None:
        _bring_zero_in(converted)
    return converted


def _bring_zero_in(program: fx.GraphModule) -> None:
    """A range at run time holds zero. PyTorch's own operator sees to that, inductor's lowering of it does not (a tensor
    of ones came out as zeros): it gets the two ends, zero between them, in the tensor's place."""
    for node in list(program.graph.nodes):
        if node.target is torch.ops.quantized_decomposed.choose_qparams.tensor:
            with program.graph.inserting_before(node):
                low = program.graph.call_function(
                    aten.clamp.default, (_reduced(aten.amin.default, node),), {"max": 0.0}
                )
                high = program.graph.call_function(
                    aten.clamp.default, (_reduced(aten.amax.default, node),), {"min": 0.0}
                )
                ends = program.graph.call_function(aten.stack.default, ([low, high],))
            node.args = (ends, *node.args[1:])
    program.recompile()


def _reduced(operator: Any, node: fx.Node) -> fx.Node:
    return node.graph.call_function(operator, (node.args[0],))


def attribute(program: fx.GraphModule, path: str) -> torch.Tensor:
    """A parameter or buffer by its dotted path."""
    place, _, name = path.rpartition(".")
    return getattr(program.get_submodule(place), name)  # type: ignore[no-any-return]


class _Annotator(Quantizer):  # type: ignore[misc]
    def __init__(self, nodes: Mapping[str, str], grids: Mapping[str, Grid] | None, weight_limit: int) -> None:
        super().__init__()
        self._nodes = nodes
        self._grids = grids
        self._weight = QuantizationSpec(
            dtype=torch.int8,
            quant_min=-weight_limit,
            quant_max=weight_limit,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
            observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=_LEAST_SCALE),
        )
        self._annotated = False

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        if self._annotated:  # then it is the body of a loop, whose nodes have names of their own
            return model
        self._annotated = True
        maps: dict[fx.Node, dict[fx.Node, Any]] = {}
        for user, value in _edges(model, self._nodes):
            if user.name not in self._nodes and (self._grids is None or source(value).name not in self._grids):
                continue
            inputs = maps.setdefault(user, {})
            inputs[value] = self._activation(value)
            if user.name in self._nodes:
                inputs[user.args[1]] = self._weight  # type: ignore[index]
        for node, inputs in maps.items():
            pooled = node.target is aten.max_pool2d.default
            shared = SharedQuantizationSpec((node.args[0], node)) if pooled else None
            node.meta[_KEY] = QuantizationAnnotation(input_qspec_map=inputs, output_qspec=shared, _annotated=True)
        return model

    def _activation(self, value: fx.Node) -> QuantizationSpec | FixedQParamsQuantizationSpec:
        if self._grids is None:
            return QuantizationSpec(
                dtype=torch.uint8,
                quant_min=0,
                quant_max=255,
                qscheme=torch.per_tensor_affine,
                is_dynamic=True,
                observer_or_fake_quant_ctr=PlaceholderObserver.with_args(eps=_LEAST_ACTIVATION),
            )
        grid = self._grids[source(value).name]
        return FixedQParamsQuantizationSpec(
            dtype=torch.uint8 if grid.low == 0 else torch.int8,
            scale=grid.scale,
            zero_point=grid.zero_point,
            quant_min=grid.low,
            quant_max=grid.high,
            qscheme=torch.per_tensor_affine,
        )

    def validate(self, model: fx.GraphModule) -> None:
        """Nothing to check: what was annotated is what `layers_of` found."""


def _edges(program: fx.GraphModule, nodes: Mapping[str, str]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(user, value): each value that a user takes in int8, weights left out."""
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    for node in order:
        if node.name in nodes:
            yield node, node.args[0]
        elif node.target in _ADDS and (other := _fused_addend(node, nodes, order)) is not None:
            yield node, other
        elif node.target is aten.max_pool2d.default and _follows(node.args[0], nodes):
            yield node, node.args[0]


def _fused_addend(add: fx.Node, nodes: Mapping[str, str], order: Mapping[fx.Node, int]) -> fx.Node | None:
    """What is added to the answer of a convolution that becomes int8; the later of two convolutions takes the sum."""
    pair = [arg for arg in add.args[:2] if isinstance(arg, fx.Node) and "val" in arg.meta]
    if len(pair) != 2 or pair[0] is pair[1] or add.kwargs:
        return None
    first, second = (arg.meta["val"] for arg in pair)
    if not isinstance(second, torch.Tensor) or first.shape != second.shape or second.dtype is not torch.float32:
        return None
    convolutions = [arg for arg in pair if arg.name in nodes and arg.target in _CONVOLUTIONS and len(arg.users) == 1]
    if not convolutions:
        return None
    last = max(convolutions, key=lambda node: order[node])
    return pair[1] if last is pair[0] else pair[0]


def _follows(value: fx.Node, nodes: Mapping[str, str]) -> bool:
    """Is this the answer of a layer that becomes int8, perhaps through an activation or an addition?"""
    while value.target in (*_UNARY, *_ADDS):
        value = value.args[0]  # type: ignore[assignment]
    return value.name in nodes


def source(value: fx.Node) -> fx.Node:
    """The tensor whose grid `value` has: pooling picks values and keeps their grid."""
    while value.target is aten.max_pool2d.default:
        value = value.args[0]  # type: ignore[assignment]
    return value
