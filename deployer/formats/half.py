"""A float32 ONNX file in half precision, and what tells on a CPU how well it answers.

TensorRT's networks are strongly typed: an engine computes in the types that its ONNX file has. The conversion is made
on the optimised float32 graph, where batch norms are folded into convolutions already, so each weight is rounded once.

ONNX Runtime has no half arithmetic on most CPUs. It computes a half graph in float32 and drops the casts between two
operators, so that neither rounding nor an overflow at 65,504 shows, and a gate on that proves nothing. `with_rounding`
makes every operator's answer pass through half precision there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deployer.errors import ExportError
from deployer.spec import Array

_LARGEST = 65504.0
_SMALLEST = 2.0**-24
_STANDS_FOR_INFINITY = 1e30  # masks are filled with -3.4e38; no weight is of that size
_SINGLE_FILE_LIMIT_BYTES = 1_500_000_000  # protobuf stops at 2 GiB
_HALF_TYPE = "tensor(float16)"

#: sums, powers, exponentials and norms, as torch.autocast has it: computed in float32 between two casts
_KEPT_IN_FLOAT32 = (
    "ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd",
    "ReduceSumSquare", "Pow", "CumSum", "Exp", "Log", "Softplus", "Softmax", "LogSoftmax", "Tan", "Reciprocal",
    "LayerNormalization", "GroupNormalization", "InstanceNormalization", "RMSNormalization", "LpNormalization",
)  # fmt: skip


def convert_to_half(path: Path) -> dict[str, Any]:
    """Rewrite the ONNX file at `path` (float32) in half precision; its inputs and outputs keep their dtypes.

    Operators whose definition takes no half precision (Range, the scales of Resize) and those of _KEPT_IN_FLOAT32 stay
    in float32 between casts. A single number that half precision would flush to 0 (an epsilon of 1e-12) becomes its
    smallest number, and what stands for infinity (a mask's -3.4e38) its largest. Returns facts for the manifest:
    `float32_operators` (operator → how many were kept) and `clipped` (constants changed by more than rounding). Raises
    ExportError for a weight that half precision cannot hold, naming it and its value.
    """
    import onnx

    typed = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False))
    model = onnx.load(path)
    facts = _Conversion(model.graph, _float_values(typed.graph), _positions(model)).run()
    del model.graph.value_info[:]
    data = path.with_name(path.name + ".data")
    data.unlink(missing_ok=True)
    large = model.ByteSize() > _SINGLE_FILE_LIMIT_BYTES
    onnx.save(model, path, save_as_external_data=large, location=data.name)
    return facts


def _float_values(graph: Any) -> set[str]:
    """Names of all float32 values of a graph whose types were inferred. Raises ExportError where a type is unknown."""
    import onnx

    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        for name in filter(None, node.output):
            if name not in types:
                raise ExportError(
                    f"the type of '{name}', which {node.op_type} gives, is unknown; no fp16 of such a graph"
                )
    return {name for name, kind in types.items() if kind == onnx.TensorProto.FLOAT}


def _positions(model: Any) -> Callable[[Any], tuple[Callable[[int], bool], Callable[[int], bool]]]:
    """node → (which inputs, which outputs may be half precision), from the definitions of the model's opset."""
    import onnx

    versions = {entry.domain: entry.version for entry in model.opset_import}

    def of(node: Any) -> tuple[Callable[[int], bool], Callable[[int], bool]]:
        try:
            schema = onnx.defs.get_schema(node.op_type, versions.get(node.domain, 1), node.domain)
        except onnx.defs.SchemaError:
            return (lambda _: False), (lambda _: False)
        allowed = {entry.type_param_str: entry.allowed_type_strs for entry in schema.type_constraints}
        kept = node.op_type in _KEPT_IN_FLOAT32

        def may(formals: Any) -> Callable[[int], bool]:
            def at(index: int) -> bool:
                kind = formals[min(index, len(formals) - 1)].type_str  # the last one may stand for many
                return not kept and _HALF_TYPE in allowed.get(kind, [kind])

            return at

        return may(schema.inputs), may(schema.outputs)

    return of


class _Conversion:
    """One graph: every float32 value becomes half, but where an operator cannot take or give it."""

    def __init__(self, graph: Any, floats: set[str], positions: Callable[[Any], Any]) -> None:
        self._graph = graph
        self._floats = floats
        self._positions = positions
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._inputs = {value.name for value in graph.input}
        self._borders = self._inputs | {value.name for value in graph.output}
        self._nodes: list[Any] = []
        self._in_float: dict[str, str] = {}  # value → name under which it is there in float32
        self._kept: dict[str, int] = {}
        self._clipped: list[str] = []

    def run(self) -> dict[str, Any]:
        self._check()
        for value in self._graph.input:
            if value.name in self._floats:
                self._cast(value.name, self._half_name(value.name), half=True)
                self._in_float[value.name] = value.name
        for node in list(self._graph.node):
            self._convert(node)
        for value in self._graph.output:
            if value.name in self._floats and value.name not in self._inputs:
                self._cast(self._half_name(value.name), value.name, half=False)
        originals = {name: tensor for name, tensor in self._initializers.items() if name in self._floats}
        for name, tensor in originals.items():
            tensor.CopyFrom(self._halved(tensor, name))
        del self._graph.node[:]
        self._graph.node.extend(self._nodes)
        return {"float32_operators": dict(sorted(self._kept.items())), "clipped": sorted(self._clipped)}

    def _check(self) -> None:
        for node in self._graph.node:
            if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
                raise ExportError(
                    f"the graph has the operator {node.op_type} with a graph inside, not converted to fp16"
                )

    def _half_name(self, name: str) -> str:
        """The graph's inputs and outputs keep their names for the float32 values that callers see."""
        return f"{name}_float16" if name in self._borders else name

    def _convert(self, node: Any) -> None:
        takes, gives = self._positions(node)
        kept = False
        for index, name in enumerate(node.input):
            if name in self._floats:
                node.input[index] = self._half_name(name) if takes(index) else self._float_name(name)
                kept |= not takes(index)
        self._convert_attributes(node, gives)
        after = []
        for index, name in enumerate(node.output):
            if name in self._floats:
                node.output[index] = self._half_name(name)
                if not gives(index):
                    node.output[index] = f"{name}_float32"
                    self._in_float[name] = node.output[index]
                    after.append((node.output[index], self._half_name(name)))
                    kept = True
        self._nodes.append(node)
        for source, target in after:
            self._cast(source, target, half=True)
        if kept:
            self._kept[node.op_type] = self._kept.get(node.op_type, 0) + 1

    def _convert_attributes(self, node: Any, gives: Callable[[int], bool]) -> None:
        import onnx

        if not node.output or node.output[0] not in self._floats or not gives(0):
            return
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = onnx.TensorProto.FLOAT16
            if attribute.HasField("t") and attribute.t.data_type == onnx.TensorProto.FLOAT:
                attribute.t.CopyFrom(self._halved(attribute.t, node.output[0]))

    def _float_name(self, name: str) -> str:
        """A value in float32: the constant as it was, what an operator gave, or a cast of the half value."""
        import onnx

        if name not in self._in_float:
            self._in_float[name] = f"{name}_float32"
            if name in self._initializers:
                copy = onnx.TensorProto()
                copy.CopyFrom(self._initializers[name])
                copy.name = f"{name}_float32"
                self._graph.initializer.append(copy)
            else:
                self._cast(self._half_name(name), f"{name}_float32", half=False)
        return self._in_float[name]

    def _cast(self, source: str, target: str, *, half: bool) -> None:
        import onnx

        to = onnx.TensorProto.FLOAT16 if half else onnx.TensorProto.FLOAT
        self._nodes.append(onnx.helper.make_node("Cast", [source], [target], name=f"cast_{target}", to=to))

    def _halved(self, tensor: Any, name: str) -> Any:
        import onnx

        halved, clipped = halve(onnx.numpy_helper.to_array(tensor), name)
        if clipped:
            self._clipped.append(name)
        return onnx.numpy_helper.from_array(halved, tensor.name)


def halve(array: Array, name: str) -> tuple[Array, bool]:
    """A float32 constant in float16, and whether it was changed by more than rounding. Raises ExportError."""
    size = np.abs(array, where=np.isfinite(array), out=np.zeros_like(array))
    beyond = (size > _LARGEST) & (size < _STANDS_FOR_INFINITY)
    if beyond.any():
        value = array[np.unravel_index(int(np.argmax(np.where(beyond, size, 0))), array.shape)]
        raise ExportError(f"'{name}' holds {value:g}, and half precision ends at {_LARGEST:g}; keep this model in fp32")
    limited = np.where(size >= _STANDS_FOR_INFINITY, np.copysign(np.float32(_LARGEST), array), array)
    if array.size == 1:  # an epsilon that guards a division must not become 0; among many weights a 0 is rounding
        limited = np.where((size > 0) & (size < _SMALLEST), np.copysign(np.float32(_SMALLEST), array), limited)
    return limited.astype(np.float16), bool((limited != array)[np.isfinite(array)].any())


def with_rounding(path: Path) -> Any:
    """The half ONNX file at `path` as a model that ONNX Runtime rounds to half precision after every operator.

    Two Identities follow each half value: ONNX Runtime has them in half precision, and of two in a row it takes neither
    away. To be opened with the optimiser "EliminateIdentity" switched off.
    """
    import onnx

    model = onnx.load(path)
    typed = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False)).graph
    halves = {
        value.name
        for value in (*typed.value_info, *typed.output)
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    }
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name in halves:
                node.output[index], between = f"{name}_exact", f"{name}_between"
                nodes.append(onnx.helper.make_node("Identity", [node.output[index]], [between]))
                nodes.append(onnx.helper.make_node("Identity", [between], [name]))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model
