"""The user's model in the one shape that all exporters take: tensors in spec order in, a tuple in spec order out."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deployer.checkpoint.eager import named_outputs
from deployer.errors import ExportError, first_line
from deployer.formats.provenance import watched_axes
from deployer.formats.record import ExportJob
from deployer.formats.refusals import explain_export_error
from deployer.formats.rewrites import Rewrites
from deployer.samples import sized_inputs
from deployer.spec import Arrays, ModelSpec

log = logging.getLogger(__name__)


class Traceable(nn.Module):
    """Positional tensors in the order of `spec.inputs` → tuple of tensors in the order of `spec.outputs`."""

    def __init__(self, model: nn.Module, spec: ModelSpec, rewrites: Rewrites | None = None) -> None:
        super().__init__()
        self.model = model
        self._spec = spec
        self._rewrites = rewrites

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        names = [tensor.name for tensor in self._spec.inputs]
        if self._rewrites is None:
            result = self.model(**dict(zip(names, tensors, strict=True)))
        else:
            with self._rewrites:
                result = self.model(**dict(zip(names, tensors, strict=True)))
        return tuple(named_outputs(result, self._spec).values())


class Positional(nn.Module):
    """A graph that already takes tensors in spec order and answers a tuple."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.model = graph

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.model(*tensors))


def example_sizes(spec: ModelSpec) -> dict[str, int]:
    """A size for each Dim to trace with: at least 2 (exporters specialise on 0 and 1), no two alike, and unlike any
    fixed size of the model, so that no exporter takes two axes for one. Falls back to what the range allows."""
    taken = {size for tensor in (*spec.inputs, *spec.outputs) for size in tensor.shape if isinstance(size, int)}
    sizes: dict[str, int] = {}
    for name, dim in spec.dims.items():
        lowest = max(dim.min, min(4, dim.max))
        candidates = [*range(lowest, min(dim.max, lowest + 64) + 1), *range(max(dim.min, 2), lowest), dim.max]
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


@dataclass(frozen=True)
class Mode:
    """One way to trace.

    `size_oblivious` keeps torch's own shortcuts for sizes 0 and 1 (broadcasting, contiguity) out of the graph.
    `rewritten` replaces functions that torch.export ties to the example's sizes (deployer.formats.rewrites).
    `strict` reads the model's bytecode, and so follows int(x.shape[0]) where plain tracing takes a number.
    """

    size_oblivious: bool = False
    rewritten: bool = False
    strict: bool = False

    def __str__(self) -> str:
        names = [name.replace("_", "-") for name, used in vars(self).items() if used]
        return " and ".join(names) or "plain"


@dataclass(frozen=True)
class Program:
    """A `torch.export` program and, under `details`, how it came about where that was not the plain way."""

    program: torch.export.ExportedProgram
    details: dict[str, Any]
    mode: Mode = Mode()


MODES = (
    Mode(),
    Mode(size_oblivious=True),
    Mode(rewritten=True),
    Mode(size_oblivious=True, rewritten=True),
    Mode(strict=True),
    Mode(size_oblivious=True, strict=True),
)
#: what another way of tracing cannot mend
_FINAL = ("data_dependent_control_flow", "unsupported_operator")


def export_program(job: ExportJob, modes: Sequence[Mode] = MODES) -> Program:
    """`torch.export` with every Dim of the spec declared dynamic. Raises ExportError in plain words.

    Where plain tracing fails for a reason that another mode may mend, the others are tried in turn; the mode that
    succeeded is recorded under `tracing` and announced. The error is that of the plain attempt.
    """
    first: ExportError | None = None
    for mode in modes:
        try:
            program, used = _export(job, mode)
            _check_corners(program, job)
        except ExportError as error:
            log.debug("%s tracing: %s", mode, error)
            first = first or error
            if error.reason in _FINAL:
                break
            continue
        if first is None:
            return Program(program, {})
        replaced = f" ({', '.join(used)})" if used else ""
        note = f"exported in {mode} mode{replaced}; plain tracing was refused: {first}"
        details = {"tracing": str(mode), "notes": [note]} | ({"rewritten": used} if used else {})
        return Program(program, details, mode)
    assert first is not None  # noqa: S101 - every way out of the loop without a program has set it
    raise first


def export_again(module: nn.Module, job: ExportJob, mode: Mode) -> torch.export.ExportedProgram:
    """`torch.export` of a graph that was made from the program of a job (`mode`: of that program): same inputs, same
    axes. Raises ExportError."""
    again = replace(job, model=module)
    program, _ = _export(again, Mode(size_oblivious=mode.size_oblivious), Positional(module))
    _check_corners(program, again)
    return program


def _export(
    job: ExportJob, mode: Mode, traceable: nn.Module | None = None
) -> tuple[torch.export.ExportedProgram, list[str]]:
    """One attempt: the program, and the names of the functions that were rewritten."""
    dims = {
        name: torch.export.Dim(re.sub(r"\W", "_", name), min=dim.min, max=dim.max)
        for name, dim in job.spec.dims.items()
        if dim.min < dim.max
    }
    shapes = tuple(
        {axis: dims[size] for axis, size in enumerate(tensor.shape) if isinstance(size, str) and size in dims}
        for tensor in job.spec.inputs
    )
    rewrites = Rewrites() if mode.rewritten else None
    oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=mode.size_oblivious)  # type: ignore[attr-defined]
    with watched_axes() as provenance, oblivious:
        try:
            # torch.export prints the graph so far to stderr when it gives up, whatever its log level
            with torch.no_grad(), redirect_stderr(io.StringIO()) as chatter:
                program = torch.export.export(
                    traceable or Traceable(job.model, job.spec, rewrites),
                    example_tensors(job.spec, job.samples),
                    dynamic_shapes={"tensors": shapes},
                    strict=mode.strict,
                )
        except Exception as error:  # torch.export raises a dozen classes
            raise explain_export_error(error, job.spec, provenance) from error
        finally:
            log.debug("torch.export: %s", chatter.getvalue())
    if rewrites is not None and not rewrites.used:
        raise ExportError("nothing in the model was there to rewrite", reason="specialized_axis")
    return program, rewrites.used if rewrites else []


def _check_corners(program: torch.export.ExportedProgram, job: ExportJob) -> None:
    """torch.export keeps some conditions on sizes inside the program instead of refusing: one that fails at the ends of
    the declared ranges, where the model ran, is not the model there. Raises ExportError naming the condition."""
    if program.graph_signature.buffers_to_mutate:
        return  # a run here would change the buffers that go into the artifact
    module = program.module()
    for turn in (0, 1, -1):  # the smallest sizes, the second smallest, the largest
        sizes = {name: (dim.sizes() * 2)[turn] for name, dim in job.spec.dims.items()}
        tensors = as_tensors(job.spec, sized_inputs(job.spec, job.samples, sizes))
        try:
            with torch.no_grad():
                module(*tensors)
        except Exception as error:  # a guard's AssertionError, or what the graph's operators raise
            at = " ".join(f"{name}={size}" for name, size in sizes.items())
            raise ExportError(
                f"torch.export made a program that does not hold at {at} ({first_line(error)}); "
                "declare that range in dims, or give all sizes one path",
                reason="specialized_axis",
            ) from error
