"""`torch.export`: the model's graph as a `.pt2` file, run eager or through `torch.compile`."""

from __future__ import annotations

import importlib
import shutil
from contextlib import nullcontext
from typing import Any

import torch

from deployer.errors import MachineError
from deployer.formats.pt2e import MODULES, Bench, count_kernels, register_lowerings
from deployer.formats.record import COMPILE_MODES, ExportJob, Format, Loaded, LoadJob
from deployer.formats.traceable import as_arrays, as_tensors, export_program
from deployer.formats.trail import Inside, eager_steps, run_recorded, unlifted
from deployer.quantize.calibration import Calibration
from deployer.samples import sized_inputs
from deployer.spec import Array, Arrays

_ARTIFACT = "model.pt2"


def export(job: ExportJob) -> dict[str, Any]:
    """Write `model.pt2`. Raises ExportError."""
    if job.target.compile is not None:
        require_compiler()
    exported = export_program(job)
    torch.export.save(exported.program, str(job.folder / _ARTIFACT))
    details: dict[str, Any] = {"needs_compiler": job.target.compile is not None, **exported.details}
    if job.target.compile == "reduce-overhead" and job.target.device == "cpu":
        note = "reduce-overhead works through CUDA graphs; on a CPU it compiles as 'default' does"
        details["notes"] = [*details.get("notes", ()), note]
    return details


def workbench(job: ExportJob, calibration: Calibration) -> Bench:
    """INT8. Raises MachineError without torchao or a compiler where one is needed."""
    if job.target.compile is not None:
        require_compiler()
    return Bench(job, calibration, _write_int8, lambda job, details: _opened(job, details).call)


def _write_int8(job: ExportJob, program: torch.export.ExportedProgram) -> dict[str, Any]:
    torch.export.save(program, str(job.folder / _ARTIFACT))
    details: dict[str, Any] = {"needs_compiler": job.target.compile is not None}
    if job.target.compile is not None:
        return {**details, "int8": {"layers": _lowered(job, details)}}
    note = "without --compile the int8 operators are simulated in float: right, and slower than float32"
    weights = sum("dequantize_per_channel" in str(node.target) for node in program.graph.nodes)
    return {**details, "int8": {"layers": weights, "exact_on": "any"}, "notes": [note]}


def _lowered(job: ExportJob, details: dict[str, Any]) -> int:
    """How many int8 kernels torch.compile makes of the program that was saved."""
    from torch._inductor.utils import run_and_get_code  # takes a second, which no server has to spare

    sizes = {name: dim.typical for name, dim in job.spec.dims.items()}
    torch._dynamo.reset()
    _, codes = run_and_get_code(_opened(job, details).call, sized_inputs(job.spec, job.samples, sizes))
    return sum(count_kernels(code) for code in codes)


def _opened(job: ExportJob, details: dict[str, Any]) -> Loaded:
    return load(LoadJob(job.folder, job.spec, job.target, details))


def require_compiler() -> None:
    """`torch.compile` and AOTInductor build C++. Raises MachineError when there is no compiler."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise MachineError("torch.compile needs a C++ compiler", install="apt-get install g++")


def load(job: LoadJob) -> Loaded:
    """Open the program; with a compile mode it is compiled here, at its first run, for dynamic shapes."""
    if job.target.compile is not None:
        require_compiler()
    int8 = job.target.precision == "int8"
    if int8:
        importlib.import_module("torch.ao.quantization.fx._decomposed")  # the operators of a quantized program
    module: Any = torch.export.load(str(job.folder / _ARTIFACT)).module()
    engine = "torch.export eager CPU"
    if job.target.compile is not None:
        mode = None if job.target.compile == "default" else job.target.compile
        if int8:
            register_lowerings()
        module = torch.compile(module, mode=mode, dynamic=True)
        engine = f"torch.compile ({job.target.compile}) CPU"

    # Without freezing no weight is a constant, and nothing becomes an int8 kernel. Dynamo asks for it too, so that
    # torch.compile's options are no place for it.
    frozen = int8 and job.target.compile is not None

    def call(arrays: Arrays) -> dict[str, Array]:
        with torch.no_grad(), torch._inductor.config.patch(freezing=True) if frozen else nullcontext():
            return as_arrays(job.spec, module(*as_tensors(job.spec, arrays)))

    return Loaded(call, engine)


def look(job: LoadJob, program: torch.export.ExportedProgram, arrays: Arrays) -> Inside:
    """The saved program, node by node, in eager mode."""
    saved = torch.export.load(str(job.folder / _ARTIFACT))
    note = "" if job.target.compile is None else "the program was run without torch.compile"
    return Inside(eager_steps(program, job.spec, arrays), run_recorded(unlifted(saved), job.spec, arrays), note)


FORMAT = Format(
    name="exported",
    artifact=_ARTIFACT,
    summary="torch.export program, run eager or through torch.compile",
    export=export,
    load=load,
    precisions=("fp32", "int8"),
    compile_modes=COMPILE_MODES,
    look=look,
    workbench=workbench,
    int8_modules=MODULES,
)
