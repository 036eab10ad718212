"""`torch.export`: the model's graph as a `.pt2` file, run eager or through `torch.compile`."""

from __future__ import annotations

import shutil
from typing import Any

import torch

from deployer.errors import MachineError
from deployer.formats.record import COMPILE_MODES, ExportJob, Format, Loaded, LoadJob
from deployer.formats.traceable import as_arrays, as_tensors, export_program
from deployer.formats.trail import Inside, eager_steps, run_recorded, unlifted
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


def require_compiler() -> None:
    """`torch.compile` and AOTInductor build C++. Raises MachineError when there is no compiler."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise MachineError("torch.compile needs a C++ compiler", install="apt-get install g++")


def load(job: LoadJob) -> Loaded:
    """Open the program; with a compile mode it is compiled here, at its first run, for dynamic shapes."""
    if job.target.compile is not None:
        require_compiler()
    module: Any = torch.export.load(str(job.folder / _ARTIFACT)).module()
    engine = "torch.export eager CPU"
    if job.target.compile is not None:
        mode = None if job.target.compile == "default" else job.target.compile
        module = torch.compile(module, mode=mode, dynamic=True)
        engine = f"torch.compile ({job.target.compile}) CPU"

    def call(arrays: Arrays) -> dict[str, Array]:
        with torch.no_grad():
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
    compile_modes=COMPILE_MODES,
    look=look,
)
