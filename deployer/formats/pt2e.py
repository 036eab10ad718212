"""INT8 of the formats that come from torch.export: torchao's PT2E, lowered by inductor to oneDNN's int8 kernels.

`exported` and `aoti` share this bench and differ in how the quantized program is written. Weight-only int8 is not among
the methods: inductor's x86 lowerings know it for bfloat16 activations alone, and a float32 program that unpacks int8
weights is slower than one without. Recurrent layers stay in float: inductor has no int8 kernel for them. Only where a
sequence of any length makes a scan of one (formats.rewrites) are the products with its inputs linear layers.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from deployer.errors import ExportError, MachineError, nearest
from deployer.formats.record import ExportJob
from deployer.formats.traceable import Mode, Traceable, as_arrays, as_tensors, export_again, export_program
from deployer.machine import cpu_features
from deployer.quantize.calibration import Calibration
from deployer.quantize.config import DynamicInt8, Int8Method, StaticInt8
from deployer.quantize.observe import grid, observe
from deployer.quantize.observers import Spread
from deployer.quantize.transforms import bias_error, equalizable, equalize, round_weight, smooth
from deployer.quantize.workbench import Trial
from deployer.samples import sized_inputs
from deployer.spec import Array, Arrays

log = logging.getLogger(__name__)

MODULES = ("torchao",)
#: CPU features with which oneDNN sums products of 8 bits in 32; without one of them sums of two saturate at 16 bits.
#: AVX2's own VNNI is not among them: held to it (ONEDNN_MAX_CPU_ISA=AVX2_VNNI), a convolution answers 32.4 for 64
EXACT_FEATURES = ("avx512_vnni", "amx_int8")
_FULL, _REDUCED = 127, 63
_FACTOR, _FLOOR = 2.0, 0.02

#: (job, quantized program) → details; writes the artifact
Writer = Callable[[ExportJob, torch.export.ExportedProgram], dict[str, Any]]
#: (job, details) → the artifact, opened
Opener = Callable[[ExportJob, dict[str, Any]], Callable[[Arrays], dict[str, Array]]]


def register_lowerings() -> None:
    """What torch.compile needs to turn a quantized program into int8 kernels. Raises MachineError without torchao."""
    if importlib.util.find_spec("torchao") is None:
        raise MachineError(
            "int8 through torch.compile needs torchao, which this machine lacks", install="pip install 'deployer[int8]'"
        )
    with _quiet():
        importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")


@contextmanager
def _quiet() -> Iterator[None]:
    """torchao warns about every GPU library of its own that it cannot load."""
    noisy = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in noisy]
    for logger in noisy:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)


#: calls of oneDNN's int8 kernels in the code that inductor writes, C++ and Python
_KERNEL = re.compile(r"(?:aoti_torch_cpu__|torch\.ops\.onednn\.)q(?:linear|conv\w*?)_pointwise\w*(?:\.\w+)?\(")


def count_kernels(code: str) -> int:
    """How many int8 convolutions and linear layers the code of a compiled program calls."""
    return len(_KERNEL.findall(code))


@dataclass(frozen=True)
class _Quantized:
    """A program in which `calls` operators with weights, of `layers`, are int8."""

    program: fx.GraphModule
    layers: tuple[str, ...]
    calls: int
    notes: tuple[str, ...]


@dataclass
class _Base:
    """The float program of one set of transforms, ready to be quantized, and what calibration saw in it."""

    program: fx.GraphModule
    mode: Mode
    details: dict[str, Any]
    seen: dict[str, Spread] = field(default_factory=dict)


class Bench:
    """The workbench of a torch.export format (deployer.quantize.workbench)."""

    def __init__(self, job: ExportJob, calibration: Calibration, write: Writer, open_written: Opener) -> None:
        register_lowerings()
        self._job = job
        self._batches = [as_tensors(job.spec, arrays) for arrays in calibration]
        self._write = write
        self._open = open_written
        self._bases: dict[tuple[float | None, bool], _Base] = {}
        self._reduce = not set(EXACT_FEATURES) & set(cpu_features())

    def methods(self) -> Sequence[Int8Method]:
        """Convolutional networks: static, equalised where layers neighbour. Networks of linear layers: static smoothed,
        static, dynamic. A kind's variants are many, since attempts are cheap and the error decides."""
        from deployer.quantize import x86

        program = self._base(None, False).program
        linear = len(x86.layers_of(program, static=False))
        convolutions = len(x86.layers_of(program, static=True)) - linear
        reduce = self._reduce
        plain = [StaticInt8(observer, reduce) for observer in ("min-max", "mse", "percentile", "entropy")]
        if linear > convolutions:
            smoothed = [
                StaticInt8(observer, reduce, smooth=alpha)
                for alpha, observer in ((0.6, "min-max"), (0.6, "mse"), (0.75, "min-max"))
            ]
            return [*smoothed, *plain, DynamicInt8(reduce), DynamicInt8(reduce, smooth=0.6)]
        equal = equalizable(program)
        mended = [StaticInt8(observer, reduce, equalize=equal, correct_bias=True) for observer in ("min-max", "mse")]
        return [*plain, *mended, *([DynamicInt8(reduce)] if linear else [])]

    def attempt(self, method: Int8Method, kept_float: Collection[str] = ()) -> Trial:
        """A simulation: the program with quantize and dequantize operators, run in float. Raises ExportError."""
        kept = frozenset(kept_float)
        made = self._quantize(method, kept)
        spec = self._job.spec

        def call(arrays: Arrays) -> dict[str, Array]:
            with torch.no_grad():
                return as_arrays(spec, made.program(*as_tensors(spec, arrays)))

        return Trial(method, kept, made.layers, call, made.notes)

    def write(self, trial: Trial) -> dict[str, Any]:
        """Raises ExportError when what was written is not int8 or not what the trial was."""
        made = self._quantize(trial.method, trial.kept_float)
        base = self._base(*_transforms(trial.method))
        details = self._write(self._job, export_again(made.program, self._job, base.mode))
        counted = int(details["int8"]["layers"])
        if counted == 0:
            raise ExportError(
                f"the artifact was written without a single int8 kernel, {made.calls} were asked for",
                reason="not_quantized",
            )
        notes = [*base.details.get("notes", ()), *details.get("notes", ()), *made.notes]
        if counted < made.calls:
            notes.append(f"{counted} of {made.calls} operators compute in int8, the others in float")
        if wrong := self._differs(trial, base, details):
            raise ExportError(f"the int8 artifact is not the quantized program: {wrong}", reason="miscompiled")
        exact = "any" if _weight_limit(trial.method) == _REDUCED else EXACT_FEATURES
        int8 = {"exact_on": exact, **details["int8"], "method": str(trial.method), "quantized": list(made.layers)}
        return {**base.details, **details, "int8": int8, **({"notes": notes} if notes else {})}

    def _base(self, alpha: float | None, equalized: bool) -> _Base:
        """The float program after transforms; made once for each set of them."""
        from deployer.quantize import x86

        key = (alpha, equalized)
        if key not in self._bases:
            job = self._job
            if alpha is not None or equalized:
                job = replace(job, model=_copied(job.model))
                traceable = Traceable(job.model, job.spec)
                done = smooth(traceable, self._batches, alpha) if alpha is not None else []
                if equalized:
                    plain = export_program(job).program.module(check_guards=False)
                    done += equalize(job.model, plain, "model.")
                if not done:
                    raise ExportError("the model has nothing to smooth or equalize", reason="not_quantized")
            exported = export_program(job)
            program = exported.program.module(check_guards=False)
            _merge_smoothing(program)
            x86.fold_norms(program)
            x86.straighten(program)
            self._bases[key] = _Base(program, exported.mode, exported.details)
        return self._bases[key]

    def _quantize(self, method: Int8Method, kept: frozenset[str]) -> _Quantized:
        from deployer.quantize import x86

        if not isinstance(method, StaticInt8 | DynamicInt8):
            raise ExportError(f"'{self._job.target.format}' has no {method} INT8", reason="not_quantized")
        base = self._base(*_transforms(method))
        found = x86.layers_of(base.program, static=isinstance(method, StaticInt8))
        for name in kept:
            if name not in found.values():
                raise ExportError(f"no layer '{name}' to keep in float{nearest(name, found.values())}")
        nodes = {node: layer for node, layer in found.items() if layer not in kept}
        notes = []
        if thin := x86.one_channel(base.program, nodes):
            # Frozen with a dynamic batch, inductor takes such an input's layout for another: answers off by their own
            # size, with no error.
            nodes = _without(nodes, thin)
            notes.append(f"kept in float, since their input has one channel: {', '.join(thin)}")
        grids = None
        if isinstance(method, StaticInt8):
            seen = self._statistics(base, x86.tensors_of(base.program, nodes))
            if dead := x86.fed_by(base.program, nodes, {name for name, held in seen.items() if held.low == held.high}):
                nodes = _without(nodes, dead)
                notes.append(f"kept in float, since calibration gives them nothing but zeros: {', '.join(dead)}")
            grids = {
                name: grid(seen[name], method.observer, symmetric=method.symmetric)
                for name in x86.tensors_of(base.program, nodes)
                if seen[name].low < seen[name].high
            }
        if not nodes:
            raise ExportError(
                f"nothing is left to quantize: all {len(found)} layers that int8 takes are kept in float"
                if found
                else "nothing in the model becomes int8: it has no convolution or linear layer in float32 whose "
                "weight is a parameter",
                reason="not_quantized",
            )
        program = copy.deepcopy(base.program)
        limit = _weight_limit(method)
        if isinstance(method, StaticInt8) and method.correct_bias:
            _correct_biases(program, nodes, base.seen, limit)
        layers = tuple(dict.fromkeys(nodes.values()))
        return _Quantized(x86.quantized(program, nodes, grids, limit), layers, len(nodes), tuple(notes))

    def _statistics(self, base: _Base, wanted: Mapping[str, int]) -> Mapping[str, Spread]:
        """What calibration saw: all that any choice of layers may ask for, the first time that one does."""
        from deployer.quantize import x86

        if not set(wanted) <= set(base.seen):
            all_layers = x86.layers_of(base.program, static=True)
            choices = [all_layers, *({node: layer} for node, layer in all_layers.items())]
            axes = {name: axis for choice in choices for name, axis in x86.tensors_of(base.program, choice).items()}
            missing = {name: axis for name, axis in (axes | dict(wanted)).items() if name not in base.seen}
            base.seen |= observe(copy.deepcopy(base.program), missing, self._batches)
        return {name: base.seen[name] for name in wanted}

    def _differs(self, trial: Trial, base: _Base, details: dict[str, Any]) -> str:
        """Where the artifact is farther from the float model than twice the trial, or "". Kernels round where the
        simulation does not, so that the two are never quite equal; garbage is off by its own size."""
        spec = self._job.spec
        call = self._open(self._job, details)
        dims = spec.dims
        for turn in (0, 2, -1):
            sizes = {name: dim.typical if turn == -1 else (dim.sizes() * 3)[turn] for name, dim in dims.items()}
            arrays = sized_inputs(spec, self._job.samples, sizes)
            with torch.no_grad():
                program = copy.deepcopy(base.program)
                expected = as_arrays(spec, program(*as_tensors(spec, arrays)))
            got, simulated = call(arrays), trial.call(arrays)
            for name, array in expected.items():
                if array.dtype.kind != "f":
                    continue
                allowed = _FACTOR * _rms(simulated[name] - array) + _FLOOR * _rms(array)
                off = _rms(got[name] - array)
                if not off <= allowed:  # NaN too
                    at = " ".join(f"{dim}={size}" for dim, size in sizes.items())
                    return (
                        f"'{name}' is off by {off:.3g} (root mean square) at {at}, "
                        f"the program by {_rms(simulated[name] - array):.3g}"
                    )
        return ""


def _without(nodes: Mapping[str, str], layers: Collection[str]) -> dict[str, str]:
    return {node: layer for node, layer in nodes.items() if layer not in layers}


def _merge_smoothing(program: fx.GraphModule) -> None:
    """Smoothed layers that share an input divide it by equal vectors, each by its own: one division for all of them,
    and so one quantization."""
    first: dict[fx.Node, list[Any]] = {}
    for node in list(program.graph.nodes):
        if node.target is not torch.ops.aten.mul.Tensor or not isinstance(node.args[1], fx.Node):
            continue
        arguments: tuple[Any, ...] = node.args
        value, factor = arguments
        if factor.op != "get_attr" or not factor.target.endswith(".inverse"):
            continue
        own = _attribute(program, factor.target)
        for other in first.setdefault(value, []):
            if torch.equal(_attribute(program, other.args[1].target), own):
                node.replace_all_uses_with(other)
                program.graph.erase_node(node)
                break
        else:
            first[value].append(node)
    program.graph.eliminate_dead_code()
    program.recompile()


def _attribute(program: fx.GraphModule, path: str) -> torch.Tensor:
    place, _, name = path.rpartition(".")
    return getattr(program.get_submodule(place), name)  # type: ignore[no-any-return]


def _correct_biases(program: fx.GraphModule, nodes: Mapping[str, str], seen: Mapping[str, Spread], limit: int) -> None:
    """Take off each bias what rounding the weight adds to the layer's answer on average."""
    for node in [node for node in program.graph.nodes if node.name in nodes]:
        arguments: tuple[Any, ...] = node.args
        value, weight_node, *rest = arguments
        weight = _attribute(program, weight_node.target).detach()
        mean = torch.tensor(seen[value.name].mean, dtype=torch.float32)
        error = bias_error(weight, round_weight(weight, limit), mean)
        old = _attribute(program, rest[0].target).detach() if rest and rest[0] is not None else torch.zeros_like(error)
        name = f"corrected_bias_{node.name}"
        program.register_parameter(name, torch.nn.Parameter(old - error, requires_grad=False))
        with program.graph.inserting_before(node):
            bias = program.graph.get_attr(name)
        node.args = (value, weight_node, bias, *rest[1:])
    program.recompile()


def _transforms(method: Int8Method) -> tuple[float | None, bool]:
    if isinstance(method, StaticInt8):
        return method.smooth, method.equalize
    return (method.smooth, False) if isinstance(method, DynamicInt8) else (None, False)


def _weight_limit(method: Int8Method) -> int:
    return _REDUCED if isinstance(method, StaticInt8 | DynamicInt8) and method.reduce_range else _FULL


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a user's __deepcopy__, or a tensor that is no leaf
        raise ExportError(f"the model cannot be copied to be smoothed or equalized: {error}") from error


def _rms(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0
