"""TensorRT: two builders behind one format, chosen by what the machine has.

`onnx-rtx`   any machine: the ONNX file of format `onnx` → TensorRT-RTX engine, built ahead of time (`trt_rtx`)
`torch-trt`  a CUDA machine: torch_tensorrt on the exported program, for the GPU at hand (`trt_torch`)

Without a GPU an engine is built and not executed. The ONNX file that it was built from stays in the bundle and goes
through the gate in its place, with half precision rounded as the GPU would (`half`).
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deployer.errors import ExportError, MachineError, UsageError
from deployer.files import sha256_of
from deployer.formats import half, onnx, trt_rtx, trt_torch
from deployer.formats.record import Builder, ExportJob, Format, Loaded, LoadJob, Target
from deployer.formats.trail import Inside
from deployer.machine import gpu_arch, gpu_fault
from deployer.quantize.calibration import Calibration
from deployer.quantize.workbench import Workbench
from deployer.spec import Arrays

log = logging.getLogger(__name__)

ONNX_RTX = Builder(
    "onnx-rtx",
    modules=("tensorrt_rtx", "onnx", "onnxscript", "onnxruntime"),
    run_modules=("tensorrt_rtx",),
    extra="trt-rtx",
)
TORCH_TRT = Builder("torch-trt", modules=("torch_tensorrt",), run_modules=("torch_tensorrt",), extra="trt")

_SOURCE = "model.onnx"
#: for a session that quantizes nothing but what the file does: ONNX Runtime would go on between two rounded values
AS_WRITTEN = {"disabled_optimizers": ["WeightBiasQuantization"]}


def choose(target: Target) -> dict[str, Any]:
    """`builder`, `gpu_archs` (onnx-rtx) and in words `builder_reason`. Raises MachineError for torch-trt without a GPU,
    before it is imported, UsageError for GPU generations that do not go with it."""
    fault = gpu_fault()
    builder, reason = _builder(target, fault)
    if builder == TORCH_TRT.name and target.precision == "int8":
        raise UsageError(f"--precision int8 goes with --builder {ONNX_RTX.name}; {builder} has no such path")
    if builder == TORCH_TRT.name:
        if fault:
            raise MachineError(
                f"--builder {builder} builds on the GPU that the engine is for: {fault}", reason="no_gpu"
            )
        if target.gpu_archs:
            raise UsageError(f"--gpu-arch goes with --builder {ONNX_RTX.name}; {builder} builds for the GPU at hand")
        return {"builder": builder, "builder_reason": reason}
    archs = dict.fromkeys(target.gpu_archs or trt_rtx.DEFAULT_GPU_ARCHS)
    if not target.gpu_archs and not fault and gpu_arch() in trt_rtx.GPU_ARCHS:
        archs[gpu_arch()] = None
    return {"builder": builder, "builder_reason": reason, "gpu_archs": list(archs)}


def _builder(target: Target, fault: str) -> tuple[str, str]:
    if target.builder is not None:
        return target.builder, "asked for"
    if fault:
        return ONNX_RTX.name, fault
    if target.gpu_archs:
        return ONNX_RTX.name, "--gpu-arch names the GPUs"
    if target.precision == "int8":
        return ONNX_RTX.name, "--precision int8"
    if gpu_arch() not in trt_rtx.GPU_ARCHS:
        return TORCH_TRT.name, f"TensorRT-RTX builds nothing for this GPU, {gpu_arch()}"
    if importlib.util.find_spec("torch_tensorrt") is not None:
        return TORCH_TRT.name, "a CUDA device answers and torch_tensorrt is installed"
    return ONNX_RTX.name, "torch_tensorrt is not installed"


def export(job: ExportJob) -> dict[str, Any]:
    """Write the engine; with onnx-rtx the ONNX file that it was built from too. Raises ExportError, MachineError."""
    chosen = choose(job.target)
    log.info("trt: builder %s (%s)", chosen["builder"], chosen["builder_reason"])
    if chosen["builder"] == TORCH_TRT.name:
        return {**chosen, **trt_torch.export(job)}
    # The graph is exported for the CPU: an ONNX file knows no device, and the gate may have to run it there.
    details = onnx.export(replace(job, target=Target("onnx")))
    source = job.folder / _SOURCE
    if job.target.precision == "fp16":
        details |= half.convert_to_half(source)
    return {**chosen, **details, **build(job, source, chosen["gpu_archs"])}


def build(job: ExportJob, source: Path, gpu_archs: list[str]) -> dict[str, Any]:
    """The engine of an ONNX file that has the inputs and outputs of the spec: float32, float16 or QDQ INT8.

    Returns what the build's listing says (`trt_rtx.build_engine`) and `onnx_sha256`, the hash of what was built. Raises
    ExportError, also where an axis, a range or a dtype came out otherwise than the spec has it.
    """
    log.info("trt: building for %s", ", ".join(gpu_archs))
    facts = trt_rtx.build_engine(source, job.folder / trt_rtx.PLAN, trt_rtx.profile_of(job.spec), gpu_archs)
    trt_rtx.check_listing(facts, job.spec)
    counted = ", ".join(f"{count} {name}" for name, count in facts["layers"].items()) or "none"
    log.info("trt: %d matrix and convolution layers: %s", sum(facts["layers"].values()), counted)
    return {**facts, "onnx_sha256": sha256_of(source)}


def load(job: LoadJob) -> Loaded:
    """Open the engine on this machine's GPU."""
    return trt_torch.load(job) if job.details["builder"] == TORCH_TRT.name else trt_rtx.load(job)


def stand_in(job: LoadJob) -> Loaded:
    """The ONNX file that the engine was built from, on the CPU. Raises MachineError where there is none to run."""
    if job.details["builder"] == TORCH_TRT.name:
        raise MachineError("an engine of torch_tensorrt runs on the GPU that built it alone", reason="no_gpu")
    if importlib.util.find_spec("onnxruntime") is None:
        raise MachineError(
            "the gate of an engine that cannot run here needs onnxruntime", install="pip install onnxruntime"
        )
    on_cpu = replace(job, target=Target("onnx"))
    if job.target.precision == "int8":
        return onnx.open_model(str(job.folder / _SOURCE), on_cpu, **AS_WRITTEN)
    if job.target.precision != "fp16":
        return onnx.load(on_cpu)
    model = half.with_rounding(job.folder / _SOURCE).SerializeToString()
    loaded = onnx.open_model(model, on_cpu, disabled_optimizers=["EliminateIdentity"])
    return replace(loaded, engine=f"{loaded.engine}, rounded to float16")


def look(job: LoadJob, program: torch.export.ExportedProgram, arrays: Arrays) -> Inside:
    """The ONNX file that the engine was built from, node by node. Raises ExportError for one of torch_tensorrt."""
    if job.details["builder"] == TORCH_TRT.name:
        raise ExportError("an engine of torch_tensorrt cannot be taken apart; export to onnx and localise there")
    inside = onnx.look(job, program, arrays)
    return replace(inside, note=f"{_SOURCE}, which the engine was built from, was looked at, not the engine")


def make_workbench(job: ExportJob, calibration: Calibration) -> Workbench:
    from deployer.formats.trt_int8 import TrtWorkbench

    return TrtWorkbench(job, calibration)


FORMAT = Format(
    name="trt",
    artifact=trt_rtx.PLAN,
    summary="TensorRT engine: by TensorRT-RTX from ONNX on any machine, by torch_tensorrt on a GPU",
    export=export,
    load=load,
    devices=("cuda",),
    precisions=("fp32", "fp16", "int8"),
    tools=("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "tensorrt-rtx", "torch-tensorrt"),
    builders=(ONNX_RTX, TORCH_TRT),
    gpu_archs=trt_rtx.GPU_ARCHS,
    choose=choose,
    stand_in=stand_in,
    look=look,
    workbench=make_workbench,
)
