"""AOTInductor: the model compiled ahead of time to machine code in a `.pt2` package.

It loads with no compiler and no Python model code. The package checks nothing of what it is fed (a batch beyond the
declared range answers wrongly); the runtime's own checks stand before it.
"""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stderr
from typing import Any

import torch

from deployer.errors import ExportError, first_line
from deployer.formats.exported import require_compiler
from deployer.formats.record import ExportJob, Format, Loaded, LoadJob
from deployer.formats.traceable import as_arrays, as_tensors, export_program
from deployer.spec import Array, Arrays

log = logging.getLogger(__name__)

_ARTIFACT = "model.pt2"


def export(job: ExportJob) -> dict[str, Any]:
    """Compile and write `model.pt2`. Raises ExportError, or MachineError without a C++ compiler."""
    require_compiler()
    program = export_program(job)
    # Freezing (constant folding, packed weights) silently does nothing unless gradients are off while lowering.
    options = {"freezing": True, "max_autotune": job.target.compile == "max-autotune"}
    try:
        with torch.no_grad(), torch._inductor.config.patch(options), redirect_stderr(io.StringIO()) as chatter:
            torch._inductor.aoti_compile_and_package(program, package_path=str(job.folder / _ARTIFACT))
    except Exception as error:  # inductor raises anything from its own errors to CalledProcessError of the compiler
        raise ExportError(f"AOTInductor failed with {type(error).__name__}: {first_line(error)}") from error
    log.debug("%s", chatter.getvalue())  # the autotuner prints its tables to stderr whatever its log level
    return {"inductor": options}


def load(job: LoadJob) -> Loaded:
    module = torch._inductor.aoti_load_package(str(job.folder / _ARTIFACT))

    def call(arrays: Arrays) -> dict[str, Array]:
        with torch.no_grad():
            return as_arrays(job.spec, module(*as_tensors(job.spec, arrays)))

    return Loaded(call, "AOTInductor CPU")


FORMAT = Format(
    name="aoti",
    artifact=_ARTIFACT,
    summary="compiled ahead of time by AOTInductor; loads with no compiler and no Python model code",
    export=export,
    load=load,
    compile_modes=("default", "max-autotune"),
    native_code=True,
)
