"""TensorRT engines through torch_tensorrt, on the GPU that they are for. Not run on a GPU yet.

`torch_tensorrt` cannot even be imported without a GPU's libraries, so nothing here imports it before a CUDA device has
answered. Types are explicit: fp16 is a model in half precision, not a permission to the compiler.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deployer.errors import ExportError, MachineError, UsageError, first_line, nearest
from deployer.formats.record import ExportJob, Loaded, LoadJob
from deployer.formats.traceable import as_arrays, as_tensors, example_tensors, export_program
from deployer.formats.trt_rtx import profile_of
from deployer.machine import gpu_arch, gpu_fault

ENGINE = "model.ep"

#: small engines between PyTorch operators cost more than they save: the library's own default
_OPTIONS = {"min_block_size": 5}


class InHalf(nn.Module):
    """A model in half precision whose float32 inputs and outputs stay float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half()

    def forward(self, **inputs: Tensor) -> Any:
        halves = {name: tensor.half() if tensor.dtype == torch.float32 else tensor for name, tensor in inputs.items()}
        return torch.utils._pytree.tree_map_only(
            Tensor, lambda value: value.float() if value.dtype == torch.float16 else value, self.model(**halves)
        )


def check_options(options: Mapping[str, Any], compile_function: Callable[..., Any]) -> None:
    """Raises UsageError for an option that is no parameter of `torch_tensorrt.dynamo.compile`, which takes any keyword
    and drops those it does not know."""
    parameters = inspect.signature(compile_function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    for name in options:
        if name not in known:
            raise UsageError(f"torch_tensorrt has no option '{name}'{nearest(name, known)}")


def export(job: ExportJob) -> dict[str, Any]:
    """Write `model.ep` for the GPU at hand. Raises MachineError without one, ExportError with the library's reason."""
    if fault := gpu_fault():
        raise MachineError(f"--builder torch-trt: {fault}", reason="no_gpu")
    import torch_tensorrt
    from torch.export.passes import move_to_device_pass

    check_options(_OPTIONS, torch_tensorrt.dynamo.compile)
    model = InHalf(job.model) if job.target.precision == "fp16" else job.model
    traced = export_program(replace(job, model=model))
    program = move_to_device_pass(traced.program, "cuda")  # traced on the CPU; its constants and devices move too
    shapes = profile_of(job.spec)
    inputs = [
        torch_tensorrt.Input(
            min_shape=shapes[tensor.name][0], opt_shape=shapes[tensor.name][1], max_shape=shapes[tensor.name][2],
            dtype=getattr(torch, tensor.dtype), name=tensor.name,
        )
        for tensor in job.spec.inputs
    ]  # fmt: skip
    with _CoverageLog() as lines:
        try:
            compiled = torch_tensorrt.dynamo.compile(program, arg_inputs=inputs, **_OPTIONS)
            examples = [tensor.cuda() for tensor in example_tensors(job.spec, job.samples)]
            torch_tensorrt.save(
                compiled, str(job.folder / ENGINE), output_format="exported_program", arg_inputs=examples, retrace=True
            )
        except Exception as error:  # converters and builder raise what they like
            raise ExportError(f"torch_tensorrt failed with {type(error).__name__}: {first_line(error)}") from error
    facts = coverage(compiled, lines)
    if not facts["engines"]:
        raise ExportError("torch_tensorrt converted nothing of this model; export it to another format")
    return {**traced.details, "coverage": facts, "gpu_archs": [gpu_arch()]}


class _CoverageLog(logging.Handler):
    """Keeps what torch_tensorrt says of the operators that it converts; it returns it nowhere."""

    _LOGGER = "torch_tensorrt.dynamo._DryRunTracker"

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logger = logging.getLogger(self._LOGGER)
        self._level = logger.level
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)
        return self.lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger(self._LOGGER)
        logger.removeHandler(self)
        logger.setLevel(self._level)


def coverage(compiled: nn.Module, lines: list[str]) -> dict[str, Any]:
    """`engines`, the operators `left` to PyTorch (name → count) and, as the library tells it, `total` and `converted`.

    What is left stands in the compiled graph or in its submodules that are no engine.
    """
    left: dict[str, int] = {}
    graphs = [compiled, *(child for _, child in compiled.named_children() if isinstance(child, torch.fx.GraphModule))]
    for graph in graphs:
        for node in getattr(graph, "graph", torch.fx.Graph()).nodes:
            if node.op == "call_function" and "getitem" not in str(node.target):
                left[str(node.target)] = left.get(str(node.target), 0) + 1
    names = [name for name, child in compiled.named_children() if "_run_on_acc" in name]
    engines = [name for name in names if not isinstance(getattr(compiled, name), torch.fx.GraphModule)]
    told = re.search(r"consists of (\d+) Total Operators, of which (\d+) operators are supported", "\n".join(lines))
    numbers = {"total": int(told[1]), "converted": int(told[2])} if told else {}
    return {"engines": len(engines), "left": left, **numbers}


def load(job: LoadJob) -> Loaded:
    """Load `model.ep` on the GPU that it was built for."""
    import torch_tensorrt

    module = torch_tensorrt.load(str(job.folder / ENGINE)).module()

    def call(arrays: Any) -> dict[str, Any]:
        tensors = [tensor.cuda() for tensor in as_tensors(job.spec, arrays)]
        with torch.no_grad():
            return as_arrays(job.spec, module(*tensors))

    return Loaded(call, f"torch_tensorrt {torch_tensorrt.__version__} on {torch.cuda.get_device_name()}")
