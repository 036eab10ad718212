"""TorchScript: `torch.jit.trace` + freeze; scripted where tracing would lose control flow.

Deprecated by PyTorch since 2.11 and kept for those who need it. Tracing records one path through the model. Where the
tracer says that a tensor's value decided it and torch.export confirms that the graph depends on it, or where the trace
is not the model at another size, the model is scripted instead, or refused.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from deployer.checkpoint.eager import named_outputs, run_eager
from deployer.errors import ExportError, first_line
from deployer.formats.record import ExportJob, Format, Loaded, LoadJob
from deployer.formats.traceable import Traceable, as_arrays, as_tensors, example_tensors, export_program
from deployer.samples import sized_inputs
from deployer.spec import Array, Arrays

_ARTIFACT = "model.pt"


def export(job: ExportJob) -> dict[str, Any]:
    """Write `model.pt`. Raises ExportError when the model can neither be traced faithfully nor scripted."""
    examples = example_tensors(job.spec, job.samples)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.no_grad():
                module: Any = torch.jit.trace(  # type: ignore[no-untyped-call]
                    Traceable(job.model, job.spec).eval(), examples, check_trace=False
                )
        except Exception as error:  # the tracer raises anything that the model raises
            raise ExportError(f"torch.jit.trace failed with {type(error).__name__}: {first_line(error)}") from error
    method = "trace"
    branches = any("Python boolean" in str(warning.message) for warning in caught)
    if why := (_refused_by_export(job) if branches else "") or _fails_at_other_sizes(module, job):
        method = "script"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = torch.jit.script(job.model.eval())
        except Exception as error:
            raise ExportError(
                f"tracing loses part of the model ({why}) and scripting failed: {first_line(error)}"
            ) from error
    torch.jit.save(torch.jit.freeze(module), str(job.folder / _ARTIFACT))
    return {"method": method}


def _refused_by_export(job: ExportJob) -> str:
    try:
        export_program(job)
    except ExportError as error:
        return str(error)
    return ""


def _fails_at_other_sizes(module: Any, job: ExportJob) -> str:
    """Why the traced module is not the model at each Dim's smallest size, or nothing: a size that the model reads as a
    Python number is a constant of the trace. The gate compares exactly; here the shape and the rough value tell."""
    smallest = {name: dim.min for name, dim in job.spec.dims.items()}
    arrays = sized_inputs(job.spec, job.samples, smallest)
    expected = run_eager(job.model, job.spec, arrays)
    try:
        with torch.no_grad():
            got = as_arrays(job.spec, module(*as_tensors(job.spec, arrays)))
    except RuntimeError as error:
        return f"the trace fails at {smallest}: {first_line(error)}"
    for name, array in expected.items():
        if got[name].shape != array.shape or not np.allclose(got[name], array, rtol=1e-2, atol=1e-3, equal_nan=True):
            return f"the trace gives another '{name}' than the model at {smallest}"
    return ""


def load(job: LoadJob) -> Loaded:
    module: Any = torch.jit.load(str(job.folder / _ARTIFACT), map_location="cpu")  # type: ignore[no-untyped-call]
    scripted = job.details["method"] == "script"
    names = [tensor.name for tensor in job.spec.inputs]

    def call(arrays: Arrays) -> dict[str, Array]:
        tensors = as_tensors(job.spec, arrays)
        with torch.no_grad():
            if scripted:
                result = named_outputs(module(**dict(zip(names, tensors, strict=True))), job.spec)
                return as_arrays(job.spec, result.values())
            return as_arrays(job.spec, module(*tensors))

    return Loaded(call, "torch.jit CPU")


FORMAT = Format(
    name="torchscript",
    artifact=_ARTIFACT,
    summary="traced and frozen; scripted where tracing would lose control flow; deprecated by PyTorch",
    export=export,
    load=load,
)
