"""The user's model in the one shape that all exporters take: tensors in spec order in, a tuple in spec order out."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from deployer.checkpoint.eager import named_outputs
from deployer.errors import ExportError, first_line
from deployer.formats.provenance import Provenance, watched_axes
from deployer.formats.record import ExportJob
from deployer.samples import sized_inputs
from deployer.spec import Arrays, ModelSpec


class Traceable(nn.Module):
    """Positional tensors in the order of `spec.inputs` → tuple of tensors in the order of `spec.outputs`."""

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self.model = model
        self._spec = spec

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        names = [tensor.name for tensor in self._spec.inputs]
        result = self.model(**dict(zip(names, tensors, strict=True)))
        return tuple(named_outputs(result, self._spec).values())


def example_sizes(spec: ModelSpec) -> dict[str, int]:
    """A size for each Dim to trace with: at least 2 (exporters specialise on 0 and 1), no two alike, and unlike any
    fixed size of the model, so that no exporter takes two axes for one. Falls back to what the range allows."""
    taken = {size for tensor in (*spec.inputs, *spec.outputs) for size in tensor.shape if isinstance(size, int)}
    sizes: dict[str, int] = {}
    for name, dim in spec.dims.items():
        lowest = max(dim.min, min(4, dim.max))
        candidates = [*range(lowest, min(dim.max, lowest + 64) + 1), dim.max, dim.min]
        sizes[name] = next((size for size in candidates if size not in taken), candidates[0])
        taken.add(sizes[name])
    return sizes


def example_tensors(spec: ModelSpec, samples: Arrays) -> tuple[Tensor, ...]:
    """Real inputs at `example_sizes`, in spec order."""
    arrays = sized_inputs(spec, samples, example_sizes(spec))
    return tuple(torch.tensor(arrays[tensor.name]) for tensor in spec.inputs)


def as_tensors(spec: ModelSpec, arrays: Arrays) -> tuple[Tensor, ...]:
    """Fresh tensors in spec order: an artifact that writes into its inputs does not reach the caller's arrays."""
    return tuple(torch.tensor(arrays[tensor.name]) for tensor in spec.inputs)


def as_arrays(spec: ModelSpec, tensors: Any) -> dict[str, Any]:
    """Outputs in spec order as named numpy arrays."""
    return {
        tensor.name: value.detach().cpu().contiguous().numpy()
        for tensor, value in zip(spec.outputs, tensors, strict=True)
    }


def export_program(job: ExportJob) -> torch.export.ExportedProgram:
    """`torch.export` with every Dim of the spec declared dynamic. Raises ExportError in plain words."""
    dims = {
        name: torch.export.Dim(_dim_name(name), min=dim.min, max=dim.max)
        for name, dim in job.spec.dims.items()
        if dim.min < dim.max
    }
    shapes = tuple(
        {axis: dims[size] for axis, size in enumerate(tensor.shape) if isinstance(size, str) and size in dims}
        for tensor in job.spec.inputs
    )
    with watched_axes() as provenance:
        try:
            with torch.no_grad():
                return torch.export.export(
                    Traceable(job.model, job.spec),
                    example_tensors(job.spec, job.samples),
                    dynamic_shapes={"tensors": shapes},
                    strict=False,
                )
        except Exception as error:  # torch.export raises a dozen classes
            raise ExportError(explain_export_error(error, job.spec, provenance)) from error


def _dim_name(name: str) -> str:
    return re.sub(r"\W", "_", name)


def explain_export_error(error: Exception, spec: ModelSpec, provenance: Provenance | None = None) -> str:
    """torch.export's refusal in one line: what it means for the model and where it happened.

    `provenance` is what was seen of the axes while exporting; it knows the line that torch's message lacks.
    """
    text = str(error)
    where = _user_line(text)
    if "data-dependent" in text.lower() or "DataDependent" in type(error).__name__:
        return (
            f"torch.export cannot follow control flow that depends on tensor values{where}; "
            "use torch.where or torch.cond, or --format torchscript, which scripts it"
        )
    seen = provenance or Provenance()
    if found := re.search(r"(?:inferred to be a constant|specialized it to be a constant)\s*\((\d+)\)", text):
        fixed = seen.of(spec, constant=True)
        axis = (fixed and fixed.dim(spec)) or _named_axis(text, spec) or "an axis"
        place = f" ({fixed.line})" if fixed else where
        return (
            f"the model fixes the dynamic axis '{axis}' to {found[1]}{place}: its size is used as a Python number; "
            "use x.shape or a size of -1 in its place"
        )
    if found := re.search(r"in the specified range .*? satisfy the generated guard (.+)", text):
        cut = seen.of(spec, constant=False)
        axis = (cut and cut.dim(spec)) or _named_axis(text, spec) or "an axis"
        place = f" ({cut.line})" if cut else where
        condition = re.sub(r"L\['\w+'\](?:\[\d+\])?\.size\(\)\[\d+\]", axis, found[1]).strip()
        return (
            f"the model takes one path for some sizes of the dynamic axis '{axis}' and another for the rest{place}: "
            f"the program would hold only while {condition}; declare that range in dims, or give all sizes one path"
        )
    return f"torch.export refused the model with {type(error).__name__}: {first_line(error)}{where}"


def _named_axis(text: str, spec: ModelSpec) -> str | None:
    return next((name for name in spec.dims if re.search(rf"\b{re.escape(_dim_name(name))}\b", text)), None)


def _user_line(text: str) -> str:
    """` (file.py:12)` for the innermost line of the user's model that the message quotes, or nothing."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', text) + re.findall(r"#\s*([\w/.\-]+\.py):(\d+) in", text)
    own = [(file, line) for file, line in frames if "/torch/" not in file and "/deployer/" not in file]
    return f" ({own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]})" if own else ""
