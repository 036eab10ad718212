"""Every operator of the eager model with its value, one after the other: what an artifact's inside is held against.

The graph is torch.export's of the checkpoint's model, run node by node in eager mode. A format's `look` gives the
artifact's own value for as many of those nodes as it can.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from deployer.formats.traceable import as_tensors
from deployer.spec import Array, Arrays, ModelSpec
from deployer.userlines import UserLine, is_user_code

#: node name → its tensors
Values = Mapping[str, tuple[Array, ...]]


@dataclass(frozen=True)
class Step:
    """One operator: its node's name, aten name, the module it belongs to ("" for the root), the line of the user's
    code, the steps whose values it takes, its own values."""

    name: str
    operator: str
    module: str
    line: UserLine | None
    inputs: tuple[str, ...]
    values: tuple[Array, ...]


@dataclass(frozen=True)
class Inside:
    """`steps` in order, with eager values; `values` of the artifact by step name; `note` says what was looked at."""

    steps: list[Step]
    values: Values
    note: str = ""


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps a copy of every node's tensors."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, tuple[Array, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("call_function", "call_module", "call_method"):
            self.values[n.name] = tuple(_arrays(result))
        return result


def _arrays(value: Any) -> Iterator[Array]:
    if isinstance(value, Tensor):
        if value.layout == torch.strided and value.dtype != torch.bfloat16:
            yield value.detach().cpu().contiguous().clone().numpy()
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _arrays(item)


def run_recorded(module: fx.GraphModule, spec: ModelSpec, arrays: Arrays) -> dict[str, tuple[Array, ...]]:
    """The tensors of every node of an unlifted program, by node name."""
    recorder = _Recorder(module)
    with torch.no_grad():
        recorder.run(*as_tensors(spec, arrays))
    return recorder.values


def unlifted(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The program as a module that holds its weights; node names stay."""
    module = program.module(check_guards=False)
    if not isinstance(module, fx.GraphModule):
        raise TypeError(f"torch.export gave a {type(module).__name__}; a GraphModule is expected")
    return module


def eager_steps(program: torch.export.ExportedProgram, spec: ModelSpec, arrays: Arrays) -> list[Step]:
    """The operators of a program in order, each with its value in eager mode."""
    module = unlifted(program)
    values = run_recorded(module, spec, arrays)
    return [
        Step(
            node.name,
            operator_name(node),
            _module_path(node),
            _user_line(node),
            tuple(entry.name for entry in node.all_input_nodes),
            values[node.name],
        )
        for node in module.graph.nodes
        if values.get(node.name)
    ]


def operator_name(node: fx.Node) -> str:
    """`aten::linear`, or the name of what is called."""
    schema = getattr(node.target, "_schema", None)
    return str(schema.name) if schema is not None else getattr(node.target, "__name__", str(node.target))


def _module_path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("model").removeprefix(".")  # the root is inside a Traceable, as its `model`


def _user_line(node: fx.Node) -> UserLine | None:
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return next((UserLine(file, int(line)) for file, line in reversed(frames) if is_user_code(file)), None)
