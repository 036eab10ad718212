"""A float32 ONNX graph rewritten in INT8: what computes with weights, and three ways to write it.

`static`       QuantizeLinear and DequantizeLinear round activations whose ranges are known (QDQ, as ONNX Runtime and
               TensorRT read it)
`dynamic`      every row of an activation (along its last axis) gets its range when it comes: a row's answer does not
               depend on the rows beside it, as it does with ONNX's DynamicQuantizeLinear, one range for a whole batch
`weight_only`  weights are stored in int8 and made float again where they are used

Weights are symmetric with one scale a channel: ±127, or ±64 with `reduce_range`. The file is written by hand rather
than by onnxruntime.quantization: rows' own ranges and SmoothQuant are not in there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deployer.errors import ExportError
from deployer.quantize.observers import Spread
from deployer.spec import Array

_METADATA = "pkg.torch.onnx."
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST_BIAS = 2.0**30  # in int32, with room for the sum that it is added to
_LSTM_GATES = 4
#: INT8 versions exist in ONNX Runtime: with a range of their own, or with that of their input
_JOINING = ("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid")
_PASSING = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")
_CLAMPING = ("Relu", "Clip")
_FUSED_WITH_GEMM = (*_CLAMPING, "Elu", "HardSigmoid", "LeakyRelu", "Selu", "Sigmoid", "Softplus", "Softsign", "Tanh")


@dataclass(frozen=True)
class Layer:
    """An operator with a constant weight. `name` is its module's path (several operators may share a module), `kind`
    one of conv, linear, lstm, embedding; `inner` says that it stands in the body of a loop, `work` counts the
    multiplications for each vector of its input."""

    name: str
    kind: str
    node: Any
    weight: str
    inner: bool
    work: float

    @property
    def input(self) -> str:
        return str(self.node.input[1 if self.kind == "embedding" else 0])

    @property
    def axis(self) -> int:
        """The axis of the input along which weights are multiplied and summed."""
        return 1 if self.kind == "conv" else -1


class Int8Graph:
    """`model` (an onnx.ModelProto with its weights inside) is kept; each method returns a new one."""

    def __init__(self, model: Any) -> None:
        import onnx

        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._skeleton = onnx.ModelProto()
        self._skeleton.CopyFrom(model)
        del self._skeleton.graph.initializer[:]
        # Shapes and types inside the graph change with the rewriting: ONNX Runtime infers them anew.
        del self._skeleton.graph.value_info[:]
        self._outputs = {value.name for value in model.graph.output}
        self.layers = list(self._find_layers(self._skeleton.graph, inner=False))

    def weight(self, layer: Layer) -> Array:
        """A layer's weight, (inputs, outputs) for a linear layer."""
        array = self._array(layer.weight)
        return np.ascontiguousarray(array.T) if _transposed(layer.node) else array

    def watched(self) -> dict[str, int]:
        """Value → axis of its channels: everything of which `static` may ask for the range."""
        found = {
            layer.input: layer.axis for layer in self.layers if layer.kind in ("conv", "linear") and not layer.inner
        }
        joined = any(layer.node.op_type in ("Conv", "Gemm") for layer in self.layers)
        for node in self._skeleton.graph.node if joined else ():
            if node.op_type in ("Conv", "Gemm", *_JOINING, *_CLAMPING):
                found.setdefault(node.output[0], 1 if node.op_type == "Conv" else -1)
        return found

    def with_outputs(self, names: Collection[str]) -> Any:
        """The float model with these values as its only outputs."""
        import onnx

        edit = _Edit(self)
        for node in self._skeleton.graph.node:
            edit.nodes.append(node)
        model = edit.model()
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        return model

    # ------------------------------------------------------------------------------------------------------- the layers

    def _find_layers(self, graph: Any, *, inner: bool) -> Iterator[Layer]:
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    yield from self._find_layers(attribute.g, inner=True)
            if found := self._weight_of(node):
                size = float(np.prod(self._tensors[found[2]].dims))
                strides = [list(entry.ints) for entry in node.attribute if entry.name == "strides"]
                work = size / float(np.prod(strides[0])) if strides else size
                yield Layer(_module_path(node, found[2]), *found, inner=inner, work=work)

    def _weight_of(self, node: Any) -> tuple[str, Any, str] | None:
        """(kind, node, weight) of what can be quantized."""
        rank = {"Conv": None, "MatMul": 2, "Gemm": 2, "LSTM": 3, "Gather": 2}
        if node.op_type not in rank or node.domain not in ("", "ai.onnx"):
            return None
        weight = node.input[0 if node.op_type == "Gather" else 1]
        tensor = self._tensors.get(weight)
        if tensor is None or tensor.data_type != 1 or rank[node.op_type] not in (None, len(tensor.dims)):
            return None
        settings = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Gemm":
            plain = all(settings[name].f == 1 for name in ("alpha", "beta") if name in settings)
            bias = self._tensors.get(node.input[2]) if len(node.input) > 2 else None
            fits = len(node.input) < 3 or (bias is not None and len(bias.dims) == 1)
            return ("linear", node, weight) if plain and fits and not _flag(node, "transA") else None
        if node.op_type == "LSTM":
            fits = node.input[2] in self._tensors and not _flag(node, "layout")
            return ("lstm", node, weight) if fits else None
        if node.op_type == "Gather":
            return ("embedding", node, weight) if not _flag(node, "axis") else None
        return ("conv" if node.op_type == "Conv" else "linear", node, weight)

    def _array(self, name: str) -> Array:
        import onnx

        return np.asarray(onnx.numpy_helper.to_array(self._tensors[name]))

    # ------------------------------------------------------------------------------------------------------ the methods

    def static(
        self,
        layers: Collection[Layer],
        ranges: Mapping[str, tuple[float, float]],
        *,
        reduce_range: bool,
        symmetric: bool = False,
        smooth: Mapping[str, tuple[Array, tuple[float, float]]] | None = None,
        means: Mapping[str, Array] | None = None,
    ) -> Any:
        """`ranges` are the activations'; `smooth` has what the channels of a linear layer's input are divided by
        (SmoothQuant) and the range that is left; with `means`, those of the inputs' channels, biases take back the mean
        error of the rounded weights."""
        return _Static(self, layers, ranges, reduce_range, symmetric, smooth or {}, means or {}).model()

    def dynamic(
        self, layers: Collection[Layer], *, reduce_range: bool, scales: Mapping[str, Array] | None = None
    ) -> Any:
        """Linear and recurrent layers; `scales` divide the channels of a linear layer's input (SmoothQuant)."""
        edit = _Edit(self)
        chosen = {_key(layer.node): layer for layer in layers}
        edit.nodes = list(self._dynamic_nodes(self._skeleton.graph, edit, chosen, reduce_range, scales or {}))
        return edit.model(microsoft=any(layer.kind == "lstm" for layer in layers))

    def _dynamic_nodes(
        self, graph: Any, edit: _Edit, chosen: Mapping[str, Layer], reduce_range: bool, scales: Mapping[str, Array]
    ) -> Iterator[Any]:
        rows: dict[str, _Rows] = {}
        for node in graph.node:
            layer = chosen.get(_key(node))
            if layer is None:
                yield self._with_bodies(
                    node, lambda body: self._dynamic_nodes(body, edit, chosen, reduce_range, scales)
                )
            elif layer.kind == "lstm":
                yield self._dynamic_lstm(layer, edit, reduce_range)
            else:
                if layer.input not in rows:
                    rows[layer.input] = _Rows(edit, layer.input, scales.get(layer.input))
                    yield from rows[layer.input].nodes
                yield from self._dynamic_linear(layer, edit, rows[layer.input], reduce_range)

    def _with_bodies(self, node: Any, rewrite: Any) -> Any:
        """A node as it is, or a copy with rewritten graphs inside."""
        if not any(attribute.HasField("g") for attribute in node.attribute):
            return node
        copy = _copy(node)
        for attribute, original in zip(copy.attribute, node.attribute, strict=True):
            if attribute.HasField("g"):
                rewritten = list(rewrite(original.g))
                del attribute.g.node[:]
                attribute.g.node.extend(rewritten)
        return copy

    def _dynamic_linear(self, layer: Layer, edit: _Edit, rows: _Rows, reduce_range: bool) -> Iterator[Any]:
        """y = size · (x̂ Ŵ) + low · ΣŴ + bias, where x = size · x̂ + low, row by row."""
        weight = self.weight(layer)
        if rows.scale is not None:
            weight = weight * rows.scale[:, None]
        rounded, steps = _rounded(weight, 1, reduce_range)
        sums = (rounded.astype(np.float64) * steps).sum(0).astype(np.float32)
        base, output = layer.node.output[0], layer.node.output[0]
        float_weight = edit.dequantized(base, rounded, steps, axis=1)
        yield float_weight
        product, sized, shift = edit.name(f"{base}_product"), edit.name(f"{base}_sized"), edit.name(f"{base}_shift")
        yield edit.node("MatMul", [rows.value, float_weight.output[0]], product, like=layer.node, name=layer.node.name)
        yield edit.node("Mul", [product, rows.size], sized)
        yield edit.node("Mul", [rows.low, edit.constant(f"{base}_sums", sums)], shift)
        if len(layer.node.input) > 2 and layer.node.input[2]:
            shifted = edit.name(f"{base}_shifted")
            yield edit.node("Add", [shift, layer.node.input[2]], shifted)
            shift = shifted
        yield edit.node("Add", [sized, shift], output, like=layer.node)

    def _dynamic_lstm(self, layer: Layer, edit: _Edit, reduce_range: bool) -> Any:
        """ONNX Runtime's own operator, which rounds the inputs and the state of a step with one range for all rows."""
        node = _copy(layer.node)
        node.op_type, node.domain = "DynamicQuantizeLSTM", "com.microsoft"
        kept = [attribute for attribute in layer.node.attribute if attribute.name != "layout"]  # 0, or it is no layer
        del node.attribute[:]
        node.attribute.extend(kept)
        inputs = [*node.input, *[""] * (8 - len(node.input))]
        for place in (1, 2):
            weight = np.ascontiguousarray(self._array(inputs[place]).transpose(0, 2, 1))  # direction, input, gates
            flat = weight.transpose(1, 0, 2).reshape(weight.shape[1], -1)
            rounded, steps = _rounded(flat, 1, reduce_range)
            back = np.ascontiguousarray(rounded.reshape(weight.shape[1], weight.shape[0], -1).transpose(1, 0, 2))
            steps = steps.reshape(weight.shape[0], -1)
            base = f"{node.output[0] or node.name}_{'wr'[place - 1]}"
            inputs[place] = edit.constant(base, back)
            inputs += [
                edit.constant(f"{base}_step", steps),
                edit.constant(f"{base}_zero", np.zeros(steps.shape, np.int8)),
            ]
        del node.input[:]
        node.input.extend(inputs)
        return node

    def weight_only(self, layers: Collection[Layer]) -> Any:
        """Convolutions, linear layers and lookup tables; what else has weights keeps them."""
        edit = _Edit(self)
        chosen = {_key(layer.node): layer for layer in layers}
        edit.nodes = list(self._weight_only_nodes(self._skeleton.graph, edit, chosen))
        return edit.model()

    def _weight_only_nodes(self, graph: Any, edit: _Edit, chosen: Mapping[str, Layer]) -> Iterator[Any]:
        for node in graph.node:
            layer = chosen.get(_key(node))
            if layer is None:
                yield self._with_bodies(node, lambda body: self._weight_only_nodes(body, edit, chosen))
            elif layer.kind == "embedding":
                yield from self._looked_up(layer, edit)
            else:
                copy, base = _copy(node), node.output[0]
                axis = 0 if layer.kind == "conv" or _transposed(node) else 1
                rounded, steps = _rounded(self._array(layer.weight), axis, reduce_range=False)
                back = edit.dequantized(base, rounded, steps, axis=axis)
                yield back
                copy.input[1] = back.output[0]
                yield copy

    def _looked_up(self, layer: Layer, edit: _Edit) -> Iterator[Any]:
        """Rows of an int8 table, each with its own scale: both are looked up, and multiplied in float."""
        import onnx

        rounded, steps = _rounded(self._array(layer.weight), 0, reduce_range=False)
        ids, output = layer.node.input[1], layer.node.output[0]
        row, step, cast = edit.name(f"{output}_int8"), edit.name(f"{output}_step"), edit.name(f"{output}_rounded")
        yield edit.node("Gather", [edit.constant(f"{output}_table", rounded), ids], row, name=layer.node.name)
        yield edit.node("Gather", [edit.constant(f"{output}_steps", steps[:, None]), ids], step)
        yield edit.node("Cast", [row], cast, to=onnx.TensorProto.FLOAT)
        yield edit.node("Mul", [cast, step], output, like=layer.node)


class _Edit:
    """A new graph in the making: nodes, and constants that go with them."""

    def __init__(self, source: Int8Graph) -> None:
        self.nodes: list[Any] = []
        self._source = source
        self._new: dict[str, Any] = {}
        self._taken = set(_all_names(source._skeleton.graph)) | set(source._tensors)

    def name(self, wanted: str) -> str:
        """A name that the graph does not have yet."""
        name, turn = wanted, 1
        while name in self._taken:
            name, turn = f"{wanted}_{turn}", turn + 1
        self._taken.add(name)
        return name

    def constant(self, wanted: str, array: Array | np.generic) -> str:
        import onnx

        name = self.name(wanted)
        self._new[name] = onnx.numpy_helper.from_array(np.asarray(array), name)
        return name

    def node(
        self, operator: str, inputs: list[str], output: str, *, like: Any = None, name: str = "", **values: Any
    ) -> Any:
        """`like` is the node whose operator of torch this one stands for."""
        import onnx

        made = onnx.helper.make_node(operator, inputs, [output], name=name or self.name(f"node_{output}"), **values)
        if like is not None:
            made.metadata_props.extend(like.metadata_props)
        return made

    def dequantized(self, base: str, rounded: Array, steps: Array, *, axis: int) -> Any:
        """The node that makes a rounded weight float again."""
        names = [
            self.constant(f"{base}_weight", rounded),
            self.constant(f"{base}_weight_step", steps),
            self.constant(f"{base}_weight_zero", np.zeros(steps.shape, np.int8)),
        ]
        return self.node("DequantizeLinear", names, self.name(f"{base}_weight_float"), axis=axis)

    def model(self, *, microsoft: bool = False) -> Any:
        """The finished model: constants that no node reads any more are left out."""
        import onnx

        model = onnx.ModelProto()
        model.CopyFrom(self._source._skeleton)
        del model.graph.node[:]
        model.graph.node.extend(self.nodes)
        read = set(_read_names(model.graph)) | self._source._outputs
        known = {**self._source._tensors, **self._new}
        model.graph.initializer.extend(tensor for name, tensor in known.items() if name in read)
        if microsoft and all(entry.domain != "com.microsoft" for entry in model.opset_import):
            model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
        return model


class _Rows:
    """The nodes that round an activation row by row: x̂ in 0 … 1 as 0 … 255, x = `size` · x̂ + `low`."""

    def __init__(self, edit: _Edit, value: str, scale: Array | None) -> None:
        self.scale = scale
        self.nodes: list[Any] = []
        last = edit.constant(f"{value}_last", np.array([-1], np.int64))
        if scale is not None:
            value = self._add(edit, "Mul", [value, edit.constant(f"{value}_smoothing", 1 / scale)], f"{value}_smooth")
        high = self._add(edit, "ReduceMax", [value, last], f"{value}_high")
        self.low = self._add(edit, "ReduceMin", [value, last], f"{value}_low")
        width = self._add(edit, "Sub", [high, self.low], f"{value}_width")
        # A row of one value has no width: it is all `low`.
        self.size = self._add(
            edit, "Max", [width, edit.constant(f"{value}_least", np.float32(_SMALLEST))], f"{value}_size"
        )
        above = self._add(edit, "Sub", [value, self.low], f"{value}_above")
        share = self._add(edit, "Div", [above, self.size], f"{value}_share")
        step, zero = edit.constant(f"{value}_step", np.float32(1 / 255)), edit.constant(f"{value}_zero", np.uint8(0))
        rounded = self._add(edit, "QuantizeLinear", [share, step, zero], f"{value}_rounded")
        self.value = self._add(edit, "DequantizeLinear", [rounded, step, zero], f"{value}_back")

    def _add(self, edit: _Edit, operator: str, inputs: list[str], output: str) -> str:
        name = edit.name(output)
        self.nodes.append(edit.node(operator, inputs, name))
        return name


class _Static:
    """QDQ around convolutions and linear layers, and on through what joins convolutions in INT8."""

    def __init__(
        self,
        source: Int8Graph,
        layers: Collection[Layer],
        ranges: Mapping[str, tuple[float, float]],
        reduce_range: bool,
        symmetric: bool,
        smooth: Mapping[str, tuple[Array, tuple[float, float]]],
        means: Mapping[str, Array],
    ) -> None:
        self._source, self._ranges, self._reduce, self._symmetric = source, ranges, reduce_range, symmetric
        self._smooth, self._means = smooth, means
        self._layers = {_key(layer.node): layer for layer in layers}
        self._nodes = list(source._skeleton.graph.node)
        self._readers: dict[str, list[Any]] = {}
        for node in self._nodes:
            for name in _node_reads(node):
                self._readers.setdefault(name, []).append(node)
        self._edit = _Edit(source)
        self._inputs = {str(value.name) for value in source._skeleton.graph.input}
        self._parameters: dict[str, tuple[str, str, float]] = {}
        self._rounded: dict[str, str] = {}
        self._int8 = self._int8_nodes()
        self._given = {
            str(node.output[0]) if self._passes(node) else self._end(node)
            for node in self._int8.values()
            if not self._gives_float(node)
        }

    # what runs in INT8

    def _gives_float(self, node: Any) -> bool:
        """Linear layers do, but for a Gemm before an activation: in float ONNX Runtime would make the two one operator
        that is not there in INT8."""
        if _key(node) not in self._layers or self._layers[_key(node)].kind != "linear":
            return False
        readers = self._readers.get(node.output[0], [])
        fused = node.op_type == "Gemm" and len(readers) == 1 and readers[0].op_type in _FUSED_WITH_GEMM
        return self._symmetric or not fused

    def _passes(self, node: Any) -> bool:
        return node.op_type in _PASSING

    def _end(self, node: Any) -> str:
        """The value to round: behind the Relu that follows a convolution or an addition and nothing else reads."""
        output = str(node.output[0])
        readers = self._readers.get(output, [])
        if output in self._source._outputs or len(readers) != 1 or readers[0].op_type not in _CLAMPING:
            return output
        return str(readers[0].output[0])

    def _int8_nodes(self) -> dict[str, Any]:
        """Layers, and the operators between them that get all they read in INT8 and give it to one of them."""
        found: dict[str, Any] = {}
        there: set[str] = set()
        for node in self._nodes:
            layer = self._layers.get(_key(node))
            joins = node.op_type in _JOINING and all(name in there for name in node.input)
            passes = self._passes(node) and node.input[0] in there
            if (layer is not None and not self._gives_float(node)) or joins or passes:
                there.add(str(node.output[0]) if passes else self._end(node))
            if layer is not None or joins or passes:
                found[_key(node)] = node
        wanted: set[str] = set()
        for node in reversed(self._nodes):
            if _key(node) not in found:
                continue
            end = str(node.output[0]) if self._passes(node) else self._end(node)
            if _key(node) not in self._layers and end not in wanted:
                del found[_key(node)]
                continue
            wanted |= set(self._int8_inputs(node))
        return found

    # writing

    def model(self) -> Any:
        self._round_for_readers(*self._inputs)
        skipped: set[str] = set()
        for node in self._nodes:
            if _key(node) in skipped:
                continue
            layer = self._layers.get(_key(node))
            if _key(node) not in self._int8:
                self._edit.nodes += self._left_alone(node)
                self._round_for_readers(*node.output)
            elif self._gives_float(node):
                copy = _copy(node)
                self._read_rounded(copy)
                self._weights(self._layers[_key(node)], copy)
                self._edit.nodes.append(copy)
                self._round_for_readers(*node.output)
            else:
                copy = _copy(node)
                self._read_rounded(copy)
                if layer is not None:
                    self._weights(layer, copy)
                self._rounded_output(node, copy, skipped)
        return self._edit.model()

    def _left_alone(self, node: Any) -> list[Any]:
        """A float operator. Between two rounded values ONNX Runtime quantizes the weights of some on its own, with one
        scale for the whole weight and in 8 bits whatever the CPU (WeightBiasQuantization, Conv and Gemm): a Clip that
        cuts nothing off keeps it away. TensorRT does no such thing."""
        if self._symmetric or node.op_type not in ("Conv", "ConvTranspose", "Gemm") or node.input[0] in self._inputs:
            return [node]
        copy, limit = _copy(node), float(np.finfo(np.float32).max)
        copy.input[0] = self._edit.name(f"{node.input[0]}_float")
        ends = [self._edit.constant(f"{copy.input[0]}_end", np.array(end, np.float32)) for end in (-limit, limit)]
        return [self._edit.node("Clip", [node.input[0], *ends], copy.input[0]), copy]

    def _read_rounded(self, copy: Any) -> None:
        for place, name in enumerate(copy.input):
            copy.input[place] = self._rounded.get(name, name)

    def _rounded_output(self, node: Any, copy: Any, skipped: set[str]) -> None:
        """Round what an INT8 operator gives; every reader gets the rounded value."""
        end = str(node.output[0]) if self._passes(node) else self._end(node)
        exact = self._edit.name(f"{end}_exact")
        clamp = next((reader for reader in self._readers.get(node.output[0], []) if end in reader.output), None)
        if self._passes(node):
            self._parameters[end] = self._parameters_of(str(node.input[0]))
        if clamp is not None and end != node.output[0]:
            skipped.add(_key(clamp))
            if self._superfluous(clamp, end):
                copy.output[0] = exact
                self._edit.nodes.append(copy)
            else:
                copy.output[0] = node.output[0]
                kept = _copy(clamp)
                kept.output[0] = exact
                self._edit.nodes += [copy, kept]
        else:
            copy.output[0] = exact
            self._edit.nodes.append(copy)
        self._round(exact, end, self._parameters_of(end), like=clamp if end != node.output[0] else node)

    def _superfluous(self, clamp: Any, end: str) -> bool:
        """uint8 begins at 0 and ends at the range's end, so that rounding clamps as the operator does."""
        low, high = self._ranges[end]
        if self._symmetric or low < 0:
            return False
        if clamp.op_type == "Relu":
            return True
        bounds = [
            float(self._source._array(name)) if name in self._source._tensors else np.nan for name in clamp.input[1:3]
        ]
        return bounds[:1] == [0.0] and (len(bounds) < 2 or bounds[1] >= high)

    def _round_for_readers(self, *names: str) -> None:
        """Round float values that INT8 operators read, for them alone."""
        for name in names:
            if not any(
                _key(reader) in self._int8 and name in self._int8_inputs(reader)
                for reader in self._readers.get(name, [])
            ):
                continue
            value = name
            if (scale := self._scale(name)) is not None:
                value = self._edit.name(f"{name}_smooth")
                factor = self._edit.constant(f"{name}_smoothing", 1 / scale)
                self._edit.nodes.append(self._edit.node("Mul", [name, factor], value))
            back = self._edit.name(f"{name}_back")
            self._round(value, back, self._parameters_of(name))
            self._rounded[name] = back

    def _int8_inputs(self, node: Any) -> list[str]:
        return list(node.input[:1] if _key(node) in self._layers or self._passes(node) else node.input)

    def _scale(self, name: str) -> Array | None:
        """SmoothQuant's scale of a value that comes in float."""
        return self._smooth[name][0] if name in self._smooth and name not in self._given else None

    def _parameters_of(self, name: str) -> tuple[str, str, float]:
        """(scale's name, zero point's name, scale) of a value."""
        if name not in self._parameters:
            low, high = self._ranges[name] if self._scale(name) is None else self._smooth[name][1]
            if self._symmetric:
                step, zero = max(high, -low) / 127, np.array(0, np.int8)
            else:
                step = (high - low) / 255
                zero = np.clip(np.round(-low / max(step, _SMALLEST)), 0, 255).astype(np.uint8)
            step = float(np.float32(max(step, _SMALLEST)))
            names = self._edit.constant(f"{name}_step", np.float32(step)), self._edit.constant(f"{name}_zero", zero)
            self._parameters[name] = (*names, step)
        return self._parameters[name]

    def _round(self, value: str, back: str, parameters: tuple[str, str, float], like: Any = None) -> None:
        rounded = self._edit.name(f"{back}_rounded")
        self._edit.nodes += [
            self._edit.node("QuantizeLinear", [value, *parameters[:2]], rounded),
            self._edit.node("DequantizeLinear", [rounded, *parameters[:2]], back, like=like),
        ]

    def _weights(self, layer: Layer, copy: Any) -> None:
        weight, axis, scale = self._source._array(layer.weight), 0, None
        if layer.kind == "linear":
            axis, scale = 0 if _transposed(copy) else 1, self._scale(layer.input)
        if scale is not None:
            weight = weight * (scale[None, :] if axis == 0 else scale[:, None])
        step = self._parameters_of(layer.input)[2]
        bias = (
            self._source._array(copy.input[2])
            if len(copy.input) > 2 and copy.input[2] in self._source._tensors
            else None
        )
        # A channel of tiny weights and a large bias: its steps must be large enough for the bias to fit into int32.
        least = np.abs(bias) / (step * _LARGEST_BIAS) if bias is not None and not self._symmetric else None
        rounded, steps = _rounded(weight, axis, self._reduce, least)
        back = self._edit.dequantized(layer.node.output[0], rounded, steps, axis=axis)
        self._edit.nodes.append(back)
        copy.input[1] = back.output[0]
        if (mean := self._means.get(layer.input)) is not None:
            lost = _mean_error(weight, rounded, steps, axis, mean if scale is None else mean / scale)
            corrected = (0 if bias is None else bias) + lost
            if bias is not None or copy.op_type != "MatMul":
                bias = corrected.astype(np.float32)
                while len(copy.input) < 3:
                    copy.input.append("")
                copy.input[2] = self._edit.constant(f"{layer.node.output[0]}_bias_corrected", bias)
        if bias is not None and not self._symmetric:
            self._bias(layer, copy, bias, steps * np.float32(step))

    def _bias(self, layer: Layer, copy: Any, bias: Array, steps: Array) -> None:
        base = layer.node.output[0]
        names = [
            self._edit.constant(f"{base}_bias", np.round(bias.astype(np.float64) / steps).astype(np.int32)),
            self._edit.constant(f"{base}_bias_step", steps.astype(np.float32)),
            self._edit.constant(f"{base}_bias_zero", np.zeros(steps.shape, np.int32)),
        ]
        back = self._edit.node("DequantizeLinear", names, self._edit.name(f"{base}_bias_float"), axis=0)
        self._edit.nodes.append(back)
        copy.input[2] = back.output[0]


def smoothing(
    graph: Int8Graph, layers: Collection[Layer], spreads: Mapping[str, Spread], alpha: float
) -> dict[str, Array]:
    """SmoothQuant (Xiao et al. 2023): input → what its channels are divided by, and weights' rows multiplied by:
    max|x|^alpha / max|w|^(1-alpha), one for all linear layers that read the input."""
    inputs: dict[str, list[Layer]] = {}
    for layer in layers:
        if layer.kind == "linear" and layer.input in spreads:
            inputs.setdefault(layer.input, []).append(layer)
    found = {}
    for name, readers in inputs.items():
        weights = np.max([np.abs(graph.weight(layer)).max(1) for layer in readers], axis=0)
        largest = spreads[name].largest
        # A channel that was always 0 is left as it is; one that no weight reads shrinks to where it does no harm.
        seen, read = largest > 0, weights > 0
        scale = np.where(seen, largest, 1.0) ** alpha / np.where(read & seen, weights, 1.0) ** (1 - alpha)
        if (seen & read).any():
            scale = np.where(seen & ~read, largest / (largest / scale)[seen & read].min(), scale)
        found[name] = np.maximum(scale, 1e-5).astype(np.float32)
    return found


def _rounded(weight: Array, axis: int, reduce_range: bool, least: Array | None = None) -> tuple[Array, Array]:
    """(int8 weight, steps of its channels along `axis`); no step is smaller than `least`."""
    most = 64 if reduce_range else 127
    others = tuple(other for other in range(weight.ndim) if other != axis)
    steps = np.abs(weight).max(others) / most
    steps = np.maximum(steps, _SMALLEST if least is None else np.maximum(least, _SMALLEST)).astype(np.float32)
    shape = [1] * weight.ndim
    shape[axis] = -1
    rounded = np.clip(np.round(weight / steps.reshape(shape)), -most, most).astype(np.int8)
    return rounded, steps


def _mean_error(weight: Array, rounded: Array, steps: Array, axis: int, mean: Array) -> Array:
    """What rounding the weights takes from the mean output of each channel, for inputs of this mean (Nagel et al. 2019,
    Data-Free Quantization, section 4.2, with the mean from calibration data)."""
    shape = [1] * weight.ndim
    shape[axis] = -1
    error = weight.astype(np.float64) - rounded * steps.reshape(shape).astype(np.float64)
    if weight.ndim == 2:
        return np.asarray(error @ mean if axis == 0 else mean @ error)
    error = error.sum(tuple(range(2, weight.ndim)))  # outputs, inputs of a group
    groups = len(mean) // error.shape[1]
    grouped = error.reshape(groups, -1, error.shape[1])
    return np.asarray(np.einsum("goi,gi->go", grouped, mean.reshape(groups, -1)).reshape(-1))


def _module_path(node: Any, weight: str) -> str:
    """`features.0` from the weight's name in the state dict, else from the modules that the exporter names."""
    if node.op_type != "Gather" and weight.startswith("model.") and weight.count(".") > 1:  # a tied table has two users
        return weight.removeprefix("model.").rpartition(".")[0]
    for entry in node.metadata_props:
        if entry.key == f"{_METADATA}name_scopes":
            scopes = [str(scope) for scope in ast.literal_eval(entry.value)]
            path = re.sub(r"^model\.?", "", scopes[-2]) if len(scopes) > 1 else ""
            if path:
                return path
    return str(node.name or node.output[0])


def _key(node: Any) -> str:
    """What tells nodes apart: the first value that it gives."""
    return str(next(filter(None, node.output)))


def _transposed(node: Any) -> bool:
    return node.op_type == "Gemm" and _flag(node, "transB")


def _flag(node: Any, name: str) -> bool:
    return any(attribute.name == name and attribute.i for attribute in node.attribute)


def _copy(node: Any) -> Any:
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def _node_reads(node: Any) -> Iterator[str]:
    yield from filter(None, node.input)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield from _read_names(attribute.g)


def _read_names(graph: Any) -> Iterator[str]:
    for node in graph.node:
        yield from _node_reads(node)
    yield from (value.name for value in graph.output)


def _all_names(graph: Any) -> Iterator[str]:
    yield from (value.name for value in graph.input)
    for node in graph.node:
        yield from node.output
        yield node.name
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_names(attribute.g)


def check_known(layers: Collection[Layer], kept_float: Collection[str]) -> None:
    """Raises ExportError for a name that no layer has."""
    known = {layer.name for layer in layers}
    if unknown := sorted(set(kept_float) - known):
        raise ExportError(f"no layer is called '{unknown[0]}'; layers: {', '.join(sorted(known))}")
