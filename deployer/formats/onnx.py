"""ONNX through PyTorch's dynamo exporter, run by ONNX Runtime."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deployer.errors import ExportError, MachineError, first_line
from deployer.formats.decompositions import decomposed
from deployer.formats.record import ExportJob, Format, Loaded, LoadJob
from deployer.formats.refusals import operator_in, reason_in
from deployer.formats.traceable import export_program
from deployer.formats.trail import Inside, eager_steps
from deployer.quantize.calibration import Calibration
from deployer.quantize.workbench import Workbench
from deployer.spec import Array, Arrays, ModelSpec

log = logging.getLogger(__name__)

ARTIFACT = "model.onnx"
_NO_CPU = "session.disable_cpu_ep_fallback"
_PROVIDERS = {
    "cpu": ["CPUExecutionProvider"],
    "cuda": ["CUDAExecutionProvider"],
    "tensorrt": ["TensorrtExecutionProvider", "CUDAExecutionProvider"],  # the second takes what the first leaves
}
_SINGLE_FILE_LIMIT_BYTES = 1_500_000_000  # protobuf stops at 2 GiB; larger weights go to model.onnx.data


def export(job: ExportJob) -> dict[str, Any]:
    """Write `model.onnx` (weights beside it beyond 1.5 GB). Raises ExportError, also when an axis came out fixed."""
    from onnx_ir.passes.common import NameFixPass

    exported = export_program(job)
    try:
        program, replaced = decomposed(exported.program)
        if replaced:
            log.info("onnx: %s replaced by equals that the exporter translates rightly", ", ".join(replaced))
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            optimize=True,
            verbose=False,
            input_names=[tensor.name for tensor in job.spec.inputs],
            output_names=written_outputs(job.spec),
        )
    except Exception as error:  # the exporter wraps whatever went wrong
        raise _refusal(error) from error
    if onnx_program is None:
        raise ExportError("the ONNX exporter returned nothing")
    _name_axes(onnx_program.model, job.spec, program)
    # The exporter names values after the operators: an output called `embedding` or `linear` then has a namesake
    # inside the graph, and ONNX Runtime refuses the file. Inputs and outputs keep their names, the others give way.
    NameFixPass()(onnx_program.model)
    weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    onnx_program.save(str(job.folder / ARTIFACT), external_data=weights_bytes > _SINGLE_FILE_LIMIT_BYTES)
    opset = check_axes(job.folder / ARTIFACT, job.spec)
    return {"opset": opset, **exported.details} | ({"decomposed": replaced} if replaced else {})


def _refusal(error: Exception) -> ExportError:
    """The exporter wraps what went wrong; the innermost cause says it."""
    reason, operator = reason_in(error), operator_in(error)
    if reason == "unsupported_operator" and operator:
        return ExportError(f"the ONNX exporter knows no translation of {operator}", reason=reason)
    cause = error
    while isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    named = f" at {operator}" if operator else ""
    return ExportError(
        f"the ONNX exporter failed{named} with {type(cause).__name__}: {first_line(cause)}", reason=reason
    )


def written_outputs(spec: ModelSpec) -> list[str]:
    """The names of the outputs in the file, in spec order. Inputs and outputs share one space of names in ONNX: an
    output that is called as an input is written as `output.NAME`, and read back under its own name."""
    inputs = {tensor.name for tensor in spec.inputs}
    return [f"output.{tensor.name}" if tensor.name in inputs else tensor.name for tensor in spec.outputs]


def _name_axes(model: Any, spec: ModelSpec, program: torch.export.ExportedProgram) -> None:
    """Give the exporter's symbols (`s95`) the names of the spec's Dims, throughout the graph."""
    import onnx_ir

    names: dict[str, str] = {}
    for value, tensor in zip(model.graph.inputs, spec.inputs, strict=True):
        for found, size in zip(value.shape, tensor.shape, strict=True):
            if isinstance(size, str) and isinstance(found, onnx_ir.SymbolicDim) and found.value:
                names[found.value] = size
    if not names:
        return
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    values = [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]
    for value in values:
        if value.shape is None:
            continue
        for axis, size in enumerate(value.shape):
            if isinstance(size, onnx_ir.SymbolicDim) and size.value:
                value.shape[axis] = pattern.sub(lambda match: names[match[1]], size.value)


def check_axes(path: Path, spec: ModelSpec) -> int:
    """Read inputs and axes back from the written file; returns its opset version.

    The exporter has been seen to write a fixed batch though it was declared dynamic. Raises ExportError naming the
    input and axis.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    written = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    for tensor in spec.inputs:
        if tensor.name not in written:
            raise ExportError(f"the ONNX file lost the input '{tensor.name}'")
        for axis, (size, found) in enumerate(zip(tensor.shape, written[tensor.name], strict=True)):
            dynamic = isinstance(size, str) and spec.dims[size].min < spec.dims[size].max
            if dynamic and not found.dim_param:
                raise ExportError(
                    f"the ONNX exporter fixed axis {axis} ('{size}') of '{tensor.name}' to {found.dim_value}: "
                    "the model uses its size as a Python number; use x.shape or a size of -1 in its place",
                    reason="specialized_axis",
                )
    return next(int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


def load(job: LoadJob) -> Loaded:
    """Open the file on the target's device, as `open_model` does."""
    return open_model(str(job.folder / ARTIFACT), job)


def open_model(model: str | bytes, job: LoadJob, **options: Any) -> Loaded:
    """A session on the device of the job's target; `model` is a path or the file itself, `options` go to ONNX Runtime.

    What was really loaded is read back: a provider that does not work is dropped by ONNX Runtime, which then runs on
    the CPU. Raises MachineError for it.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    if job.threads is not None:
        settings.intra_op_num_threads = job.threads
    wanted = _PROVIDERS[job.target.device]
    mixed = ""
    try:
        if job.target.device != "cpu":
            settings.add_session_config_entry(_NO_CPU, "1")
        session = onnxruntime.InferenceSession(model, settings, providers=wanted, **options)
    except Exception:
        if job.target.device == "cpu":
            raise
        # Refused for a provider that does not load, or for shape arithmetic that belongs on the CPU: what a session
        # without the ban reads back tells them apart.
        settings.add_session_config_entry(_NO_CPU, "0")
        session = onnxruntime.InferenceSession(model, settings, providers=wanted, **options)
        mixed = ", some operators on the CPU"
    loaded = session.get_providers()
    if loaded[: len(wanted)] != wanted or (job.target.device == "cpu" and loaded != wanted):
        raise MachineError(
            f"ONNX Runtime loaded {', '.join(loaded)} where {', '.join(wanted)} was asked for",
            install="" if job.target.device == "cpu" else "pip uninstall -y onnxruntime && pip install 'deployer[gpu]'",
        )
    if mixed:
        log.warning("%s runs%s", wanted[0], mixed.removeprefix(","))
    names, written = [tensor.name for tensor in job.spec.outputs], written_outputs(job.spec)

    def call(arrays: Arrays) -> dict[str, Array]:
        return dict(zip(names, session.run(written, dict(arrays)), strict=True))

    return Loaded(call, f"onnxruntime {onnxruntime.__version__} {wanted[0]}{mixed}")


def look(job: LoadJob, program: torch.export.ExportedProgram, arrays: Arrays) -> Inside:
    """The file run once with every node's value as an output; each node says which of torch's operators it is part of,
    and the last of them holds that operator's value."""
    import onnx
    import onnxruntime

    model = onnx.load(job.folder / ARTIFACT)
    sources = {
        node.output[0]: found[1]
        for node in model.graph.node
        for entry in node.metadata_props
        if entry.key == "pkg.torch.onnx.fx_node" and (found := re.match(r"%(\w+)\b", entry.value))
    }
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sources if name not in known)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found_values = dict(zip(sources, session.run(list(sources), dict(arrays)), strict=True))
    values = {
        sources[name]: (value,) for name, value in found_values.items() if isinstance(value, np.ndarray)
    }  # in the file's order: the last node of an operator wins
    return Inside(eager_steps(_decomposed(program), job.spec, arrays), values)


def _decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program as the exporter takes it apart before it writes it, so that names agree."""
    from torch.onnx._internal.exporter import _fx_passes, _registration

    registry = _registration.ONNXRegistry.from_torchlib()
    return _fx_passes.decompose_with_registry(program, registry)


def make_workbench(job: ExportJob, calibration: Calibration) -> Workbench:
    from deployer.formats.onnx_int8 import OnnxWorkbench

    return OnnxWorkbench(job, calibration)


FORMAT = Format(
    name="onnx",
    artifact=ARTIFACT,
    summary="dynamo exporter, run by ONNX Runtime",
    export=export,
    load=load,
    modules=("onnx", "onnxscript", "onnxruntime"),
    run_modules=("onnxruntime",),
    extra="cpu",
    devices=tuple(_PROVIDERS),
    precisions=("fp32", "int8"),
    workbench=make_workbench,
    tools=("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu"),
    look=look,
)
