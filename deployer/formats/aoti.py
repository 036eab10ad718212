"""AOTInductor: the model compiled ahead of time to machine code in a `.pt2` package.

It loads with no compiler and no Python model code. The package checks nothing of what it is fed (a batch beyond the
declared range answers wrongly); the runtime's own checks stand before it.
"""

from __future__ import annotations

import io
import logging
import tempfile
import zipfile
from contextlib import redirect_stderr
from typing import Any

import numpy as np
import torch
from torch import fx

from deployer.checkpoint.eager import run_eager
from deployer.errors import ExportError, first_line
from deployer.formats.exported import require_compiler
from deployer.formats.pt2e import MODULES, Bench, count_kernels
from deployer.formats.record import ExportJob, Format, Loaded, LoadJob
from deployer.formats.refusals import operator_in, reason_in
from deployer.formats.traceable import as_arrays, as_tensors, export_program
from deployer.formats.trail import Inside, eager_steps, unlifted
from deployer.quantize.calibration import Calibration
from deployer.samples import sized_inputs
from deployer.spec import Array, Arrays

log = logging.getLogger(__name__)

_ARTIFACT = "model.pt2"
_PLAIN = 1e-2  # a difference, relative to the output's root mean square, that no rounding explains


def export(job: ExportJob) -> dict[str, Any]:
    """Compile and write `model.pt2`. Raises ExportError, or MachineError without a C++ compiler.

    Freezing has been seen to compile some models into wrong ones, with no error. So the package is run once, and one
    that is not the model is compiled again without freezing; the manifest and a note say so.
    """
    require_compiler()
    exported = export_program(job)
    options = {"freezing": True, "max_autotune": job.target.compile == "max-autotune"}
    _compile(job, exported.program, options)
    wrong = _differs(job)
    if not wrong:
        return {"inductor": options, **exported.details}
    options = options | {"freezing": False}
    _compile(job, exported.program, options)
    note = f"compiled without freezing, which made a package that is not the model: {wrong}"
    return {"inductor": options, **exported.details, "notes": [*exported.details.get("notes", ()), note]}


def _compile(job: ExportJob, program: torch.export.ExportedProgram, options: dict[str, Any]) -> None:
    # Freezing (constant folding, packed weights) silently does nothing unless gradients are off while lowering.
    try:
        with torch.no_grad(), torch._inductor.config.patch(options), redirect_stderr(io.StringIO()) as chatter:
            torch._inductor.aoti_compile_and_package(program, package_path=str(job.folder / _ARTIFACT))
    except Exception as error:  # inductor raises anything from its own errors to CalledProcessError of the compiler
        operator = operator_in(error)
        named = f" at {operator}" if operator else ""
        raise ExportError(
            f"AOTInductor failed{named} with {type(error).__name__}: {first_line(error)}", reason=reason_in(error)
        ) from error
    log.debug("%s", chatter.getvalue())  # the autotuner prints its tables to stderr whatever its log level


def workbench(job: ExportJob, calibration: Calibration) -> Bench:
    """INT8. Raises MachineError without torchao or a C++ compiler."""
    require_compiler()
    return Bench(job, calibration, _write_int8, lambda job, details: _opened(job, details).call)


def _write_int8(job: ExportJob, program: torch.export.ExportedProgram) -> dict[str, Any]:
    options = {"freezing": True, "max_autotune": job.target.compile == "max-autotune"}
    _compile(job, program, options)
    with zipfile.ZipFile(job.folder / _ARTIFACT) as package:
        sources = [package.read(name).decode() for name in package.namelist() if name.endswith(".cpp")]
    return {"inductor": options, "int8": {"layers": sum(map(count_kernels, sources))}}


def _opened(job: ExportJob, details: dict[str, Any]) -> Loaded:
    return load(LoadJob(job.folder, job.spec, job.target, details))


def _differs(job: ExportJob) -> str:
    """Where the package plainly departs from the model at typical sizes, or "". The gate compares exactly."""
    sizes = {name: dim.typical for name, dim in job.spec.dims.items()}
    arrays = sized_inputs(job.spec, job.samples, sizes)
    expected = run_eager(job.model, job.spec, arrays)
    got = _opened(job, {}).call(arrays)
    for name, array in expected.items():
        if array.dtype.kind != "f":
            continue
        scale = float(np.sqrt(np.mean(np.square(array[np.isfinite(array)], dtype=np.float64)))) if array.size else 0.0
        if not np.allclose(got[name], array, rtol=_PLAIN, atol=_PLAIN * scale, equal_nan=True):
            return f"'{name}' is off by up to {np.nanmax(np.abs(got[name] - array)):.3g}"
    return ""


def load(job: LoadJob) -> Loaded:
    module = torch._inductor.aoti_load_package(str(job.folder / _ARTIFACT))

    def call(arrays: Arrays) -> dict[str, Array]:
        with torch.no_grad():
            return as_arrays(job.spec, module(*as_tensors(job.spec, arrays)))

    return Loaded(call, "AOTInductor CPU")


def look(job: LoadJob, program: torch.export.ExportedProgram, arrays: Arrays) -> Inside:
    """The program compiled once more with every operator's value as an output: the package itself shows nothing.

    Raises ExportError when it does not compile so.
    """
    steps = eager_steps(program, job.spec, arrays)
    exposed = unlifted(program)
    nodes = {node.name: node for node in exposed.graph.nodes}
    single = [step.name for step in steps if isinstance(nodes[step.name].meta.get("val"), torch.Tensor)]
    output = next(node for node in exposed.graph.nodes if node.op == "output")
    output.args = (tuple(nodes[name] for name in single),)
    exposed.graph._codegen = torch.fx.graph.CodeGen()  # the old one packs the old outputs
    exposed.recompile()
    module = fx.GraphModule(exposed, exposed.graph)
    tensors = as_tensors(job.spec, arrays)
    options = job.details.get("inductor", {})
    try:
        with torch.no_grad(), torch._inductor.config.patch(options), tempfile.TemporaryDirectory() as place:
            again = torch.export.export(module, tensors, strict=False)
            path = torch._inductor.aoti_compile_and_package(again, package_path=f"{place}/look.pt2")
            results = torch._inductor.aoti_load_package(path)(*tensors)
    except Exception as error:  # inductor raises anything
        raise ExportError(f"AOTInductor failed to expose its operators: {first_line(error)}") from error
    values = {name: (value.contiguous().numpy(),) for name, value in zip(single, results, strict=True)}
    return Inside(steps, values, "the program was compiled once more, every operator exposed and every size fixed")


FORMAT = Format(
    name="aoti",
    artifact=_ARTIFACT,
    summary="compiled ahead of time by AOTInductor; loads with no compiler and no Python model code",
    export=export,
    load=load,
    precisions=("fp32", "int8"),
    compile_modes=("default", "max-autotune"),
    native_code=True,
    look=look,
    workbench=workbench,
    int8_modules=MODULES,
)
