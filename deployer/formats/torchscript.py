"""TorchScript: `torch.jit.trace` + freeze; scripted where tracing would lose control flow.

Deprecated by PyTorch since 2.11 and kept for those who need it. Tracing records one path through the model. Where the
tracer says that a tensor's value decided it and torch.export confirms that the graph depends on it, or where the trace
is not the model at another size, the model is scripted instead, or refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import torch

from deployer.checkpoint.eager import named_outputs, run_eager
from deployer.errors import ExportError, first_line
from deployer.formats.record import ExportJob, Format, Loaded, LoadJob
from deployer.formats.refusals import reason_in
from deployer.formats.traceable import Traceable, as_arrays, as_tensors, example_tensors, export_program
from deployer.formats.trail import Inside, eager_steps
from deployer.samples import sized_inputs
from deployer.spec import Array, Arrays

_ARTIFACT = "model.pt"


def export(job: ExportJob) -> dict[str, Any]:
    """Write `model.pt`. Raises ExportError when the model can neither be traced faithfully nor scripted."""
    inlined: list[str] = []
    try:
        module, branches = _trace(job, inlined)
        lost = (_refused_by_export(job) if branches else None) or _fails_at_other_sizes(module, job)
    except ExportError as error:
        lost = error
    if lost is not None:
        module, inlined = _script(job, lost), []
    try:
        torch.jit.save(torch.jit.freeze(module), str(job.folder / _ARTIFACT))
    except Exception as error:  # what the serializer does not know, it says at the last moment
        raise ExportError(
            f"torch.jit cannot save the model: {first_line(error)}", reason="unsupported_python"
        ) from error
    details: dict[str, Any] = {"method": "trace" if lost is None else "script"}
    return details | ({"inlined": inlined} if inlined else {})


def _trace(job: ExportJob, inlined: list[str]) -> tuple[Any, bool]:
    """The traced module, and whether the tracer saw a tensor's value decide something.

    The fast path of nn.TransformerEncoder is off meanwhile: it holds the example's padding as a constant of the trace.
    """
    examples = example_tensors(job.spec, job.samples)
    fast = torch.backends.mha.get_fastpath_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad(), _functions_inlined(inlined):
                module: Any = torch.jit.trace(  # type: ignore[no-untyped-call]
                    Traceable(job.model, job.spec).eval(), examples, check_trace=False
                )
        except Exception as error:  # the tracer raises anything that the model raises
            conditional = "dynamo-optimized function" in str(error)  # torch.cond and its like, in the tracer's words
            raise ExportError(
                f"torch.jit.trace failed with {type(error).__name__}: {first_line(error)}",
                reason="unsupported_operator" if conditional else reason_in(error),
            ) from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
    return module, any("Python boolean" in str(warning.message) for warning in caught)


@contextmanager
def _functions_inlined(names: list[str]) -> Iterator[None]:
    """torch.autograd.Functions run as plain calls of their forward: a trace keeps them as calls of Python, which it
    cannot save. `names` gets those that were met."""

    def apply(kind: Any, *args: Any, **options: Any) -> Any:
        if kind.__name__ not in names:
            names.append(kind.__name__)
        own_context = kind.setup_context is torch.autograd.Function.setup_context
        return kind.forward(*((_Context(),) if own_context else ()), *args, **options)

    original = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


class _Context:
    """Takes what a Function's forward keeps for its backward, which never comes."""

    needs_input_grad = ()

    def save_for_backward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass


def _script(job: ExportJob, lost: ExportError) -> Any:
    """The scripted model: its control flow is kept. `lost` is what a trace would lose."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(job.model.eval())
    except Exception as error:  # the compiler raises anything from its own errors to OSError (no source)
        raise ExportError(
            f"a trace is not the model ({lost}) and scripting failed: {first_line(error)}", reason=lost.reason
        ) from error


def _refused_by_export(job: ExportJob) -> ExportError | None:
    try:
        export_program(job)
    except ExportError as error:
        return error
    return None


def _fails_at_other_sizes(module: Any, job: ExportJob) -> ExportError | None:
    """Why the traced module is not the model at each Dim's smallest size, or None: a size that the model reads as a
    Python number is a constant of the trace. The gate compares exactly; here the shape and the rough value tell."""
    smallest = {name: dim.min for name, dim in job.spec.dims.items()}
    arrays = sized_inputs(job.spec, job.samples, smallest)
    expected = run_eager(job.model, job.spec, arrays)
    at = " ".join(f"{name}={size}" for name, size in smallest.items())
    try:
        with torch.no_grad():
            got = as_arrays(job.spec, module(*as_tensors(job.spec, arrays)))
    except RuntimeError as error:
        return ExportError(f"the trace fails at {at}: {first_line(error)}", reason="specialized_axis")
    for name, array in expected.items():
        if got[name].shape != array.shape or not np.allclose(got[name], array, rtol=1e-2, atol=1e-3, equal_nan=True):
            return ExportError(f"the trace gives another '{name}' than the model at {at}", reason="specialized_axis")
    return None


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


def look(job: LoadJob, program: torch.export.ExportedProgram, arrays: Arrays) -> Inside:
    """The frozen graph run once with every tensor as an output, its operators matched to torch.export's in order.

    Raises ExportError where the graph has branches or reads attributes of its module: it cannot be taken apart then.
    """
    module: Any = torch.jit.load(str(job.folder / _ARTIFACT), map_location="cpu")  # type: ignore[no-untyped-call]
    graph = module.graph.copy()
    if next(graph.inputs()).uses() or any(list(node.blocks()) for node in graph.nodes()):
        raise ExportError("a scripted artifact with branches or module state cannot be taken apart; validate another")
    names = [value.debugName() for value in list(graph.inputs())[1:]]
    graph.eraseInput(0)
    kinds = _expose(graph)
    function = torch._C._create_function_from_graph("look", graph)
    ordered = as_tensors(job.spec, arrays)
    by_name = {tensor.name: value for tensor, value in zip(job.spec.inputs, ordered, strict=True)}
    scripted = job.details["method"] == "script"
    with torch.no_grad():
        results = function(*((by_name[name.rsplit(".", 1)[0]] for name in names) if scripted else ordered))
    values = [value.detach().contiguous().numpy() for value in results]
    steps = eager_steps(program, job.spec, arrays)
    eager, own = [_family(step.operator) for step in steps], [_family(kind) for kind in kinds]
    matched = SequenceMatcher(None, eager, own, autojunk=False).get_matching_blocks()
    pairs = [(steps[block.a + at].name, values[block.b + at]) for block in matched for at in range(block.size)]
    return Inside(steps, {name: (value,) for name, value in pairs})


def _family(operator: str) -> str:
    """TorchScript and torch.export call some operators by different names."""
    name = operator.removesuffix("_")
    return re.sub(r"^aten::(?:_convolution|conv(?:_transpose)?\dd|convolution)$", "aten::convolution", name)


def _expose(graph: Any) -> list[str]:
    """Make the graph return a copy of every operator's tensor, as one tuple; returns the operators' names in order.
    Copies, since a later operator may write into the tensor."""
    nothing = graph.create("prim::Constant")
    nothing.output().setType(torch._C.NoneType.get())
    graph.prependNode(nothing)
    kinds, copies = [], []
    for node in list(graph.nodes()):
        outputs = list(node.outputs())
        if not node.kind().startswith("aten::") or len(outputs) != 1 or outputs[0].type().kind() != "TensorType":
            continue
        copy = graph.create("aten::clone", [outputs[0], nothing.output()], 1)
        copy.insertAfter(node)
        copies.append(copy.output())
        kinds.append(node.kind())
    together = graph.create("prim::TupleConstruct", copies, 1)
    together.output().setType(torch._C.TupleType([torch._C.TensorType.get()] * len(copies)))
    graph.appendNode(together)
    for position in reversed(range(len(list(graph.outputs())))):
        graph.eraseOutput(position)
    graph.registerOutput(together.output())
    return kinds


FORMAT = Format(
    name="torchscript",
    artifact=_ARTIFACT,
    summary="traced and frozen; scripted where tracing would lose control flow; deprecated by PyTorch",
    export=export,
    load=load,
    look=look,
)
