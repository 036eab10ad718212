"""The model checked against itself, before anything is compared with it.

A model that answers one input in two ways has no answer to hold an artifact to; a model that carries state from one
call to the next answers users by what others asked before. Both are refused, with the modules and lines at fault. What
does no harm (an input written into, an output that is the input, a counter that no answer depends on) is recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deployer.checkpoint.eager import call_on_tensors, named_outputs, output_arrays
from deployer.errors import DeployerError, GateError
from deployer.spec import Array, Arrays, ModelSpec
from deployer.userlines import UserLine, innermost_user_line, stack_depth
from deployer.validate.compare import difference, rms

_ROUNDING = 1e-6  # of an output's scale: less between two runs is the order of a sum, not another answer
_LISTED = 5

#: modules that answer otherwise in train mode
_BY_MODE = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d)


class ModelFacts(msgspec.Struct, frozen=True):
    """What the self-checks saw and let pass. Names of inputs, of outputs (and the input or weight that they share
    memory with), of buffers and parameters, of modules. `unstable_outputs` change their shape or their NaNs when the
    samples move by one unit in the last place."""

    mutated_inputs: tuple[str, ...] = ()
    aliased_outputs: dict[str, str] = {}
    changed_tensors: tuple[str, ...] = ()
    train_mode_modules: tuple[str, ...] = ()
    unused_inputs: tuple[str, ...] = ()
    unstable_outputs: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        """One plain line for each fact."""
        lines = []
        if self.mutated_inputs:
            lines.append(f"forward writes into its input {_names(self.mutated_inputs)}; every call gets a copy")
        for output, source in self.aliased_outputs.items():
            lines.append(f"output '{output}' shares memory with {source}; every answer is a copy")
        if self.changed_tensors:
            lines.append(f"forward changes {_names(self.changed_tensors)}; no answer was seen to depend on it")
        if self.train_mode_modules:
            lines.append(f"{_names(self.train_mode_modules)} stay in train mode after eval()")
        if self.unused_inputs:
            lines.append(f"no answer depends on input {_names(self.unused_inputs)}; it stays in the signature")
        if self.unstable_outputs:
            lines.append(
                f"output {_names(self.unstable_outputs)} changes its shape or its NaNs when the samples move by one "
                "unit in the last place; an artifact that rounds otherwise may fail there"
            )
        return lines


def _names(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(f"'{name}'" for name in names[:_LISTED]) + more


@dataclass(frozen=True)
class Observed:
    """One call: the outputs, the inputs that were written into, what outputs share memory with."""

    outputs: dict[str, Array]
    mutated_inputs: tuple[str, ...]
    aliased_outputs: dict[str, str]


def observe(model: nn.Module, spec: ModelSpec, arrays: Arrays) -> Observed:
    """Run the eager model once on copies of `arrays` and see what it does to them."""
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    value = call_on_tensors(model, tensors)
    owners = {tensor.untyped_storage().data_ptr(): f"input '{name}'" for name, tensor in tensors.items()}
    owners |= {tensor.untyped_storage().data_ptr(): f"'{name}' of the model" for name, tensor in _state(model)}
    owners.pop(0, None)  # tensors without memory of their own
    aliased = {
        name: owners[tensor.untyped_storage().data_ptr()]
        for name, tensor in named_outputs(value, spec).items()
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in owners
    }
    mutated = tuple(
        name for name, tensor in tensors.items() if not np.array_equal(tensor.numpy(), arrays[name], equal_nan=False)
    )
    return Observed(output_arrays(value, spec), mutated, aliased)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def changed_tensors(model: nn.Module, untouched: nn.Module) -> tuple[str, ...]:
    """Names of parameters and buffers, non-persistent ones too, in which two models differ."""
    one, other = dict(_state(model)), dict(_state(untouched))
    changed = sorted(one.keys() ^ other.keys())
    changed += [name for name in one.keys() & other.keys() if not _same(one[name], other[name])]
    return tuple(sorted(changed))


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    with torch.no_grad():
        if bool(torch.equal(one, other)):
            return True
        return one.is_floating_point() and bool(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)))


def check_builds(one: nn.Module, other: nn.Module) -> None:
    """Two builds of the checkpoint must hold the same weights: the reference is one of them, each artifact is made of
    another. Raises GateError."""
    if different := changed_tensors(one, other):
        raise GateError(
            f"the model is built with other weights each time: {_names(different)} differ between two builds; give a "
            "checkpoint that holds them, or seed the factory",
            reason="nondeterministic",
        )


def modules_in_train_mode(model: nn.Module) -> dict[str, nn.Module]:
    """Modules below the root whose `training` is still True, by name ("model" is the root)."""
    return {name or "model": module for name, module in model.named_modules() if module.training}


def check_modes(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules left in train mode, outermost first. Raises GateError where a module among them answers
    otherwise for it: batch norm by its batch, dropout at random."""
    found = modules_in_train_mode(model)
    harmful = [
        f"{type(module).__name__} '{name}'"
        for name, module in found.items()
        if isinstance(module, _BY_MODE)
        and getattr(module, "p", 1.0) != 0
        and getattr(module, "track_running_stats", True)  # a norm without statistics is the same in both modes
    ]
    if harmful:
        more = f" and {len(harmful) - _LISTED} more" if len(harmful) > _LISTED else ""
        raise GateError(
            f"the model stays in train mode after eval(): {', '.join(harmful[:_LISTED])}{more}; forward or an own "
            "train() method sets it back, remove that",
            reason="train_mode",
        )
    return tuple(found)


def check_repeats(model: nn.Module, fresh: nn.Module, spec: ModelSpec, samples: Arrays) -> Observed:
    """Two runs on one input must agree. `fresh` is an unused twin, which tells chance from state.

    Raises GateError that names what is drawn at random and where, or what is carried over.
    """
    first, second = observe(model, spec, samples), observe(model, spec, samples)
    name, apart = most_apart(first.outputs, second.outputs)
    if not name:
        return first
    drawn = random_draws(model, spec, samples)
    if not drawn and _is_rounding(first.outputs[name], apart):
        return first
    twin = observe(fresh, spec, samples)
    if not most_apart(first.outputs, twin.outputs)[0] and not drawn:
        raise _carries_state(name, apart, changed_tensors(model, fresh))
    left = modules_in_train_mode(model)
    hints = [f"drawn at random: {'; '.join(drawn[:_LISTED])}"] if drawn else []
    hints += [f"in train mode: {_names(list(left))}"] if left else []
    hints = hints or ["look for dropout called without `training=self.training`, or noise drawn in forward"]
    raise GateError(
        f"the model is not deterministic in eval mode: output '{name}' differs by up to {apart:.3g} between two runs "
        f"on one input; {', '.join(hints)}",
        reason="nondeterministic",
    )


def check_stateless(model: nn.Module, spec: ModelSpec, samples: Arrays, first: Arrays, fresh: nn.Module) -> None:
    """After other inputs, the first input must still get its first answer. Raises GateError."""
    again = observe(model, spec, samples).outputs
    name, apart = most_apart(first, again)
    if name and not _is_rounding(first[name], apart):
        raise _carries_state(name, apart, changed_tensors(model, fresh))


def _carries_state(name: str, apart: float, changed: tuple[str, ...]) -> GateError:
    where = f"it changes {_names(changed)}" if changed else "it keeps something outside its buffers"
    return GateError(
        f"the model carries state between calls: output '{name}' to one input differs by up to {apart:.3g} after other "
        f"calls ({where} in forward); pass the state in and out as inputs and outputs",
        reason="stateful",
    )


def _is_rounding(expected: Array, apart: float) -> bool:
    return expected.dtype.kind in "fc" and apart <= _ROUNDING * rms(expected)


def most_apart(one: Arrays, other: Arrays) -> tuple[str, float]:
    """Name of the output in which two answers differ most, and by how much; ("", 0) where they are equal."""
    apart = {
        name: difference(one[name], other[name]) if one[name].shape == other[name].shape else float("inf")
        for name in one
    }
    name = max(apart, key=lambda key: apart[key])
    return (name, apart[name]) if apart[name] > 0 else ("", 0.0)


# -------------------------------------------------------------------------------------------------------------- chance


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator that draws random numbers, the module that called it and the line of the user's code."""

    def __init__(self, model: nn.Module, below: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(module): name for name, module in model.named_modules() if name}
        self._below = below
        self.seen: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args, kwargs or {}):
            self.seen[self._described(func)] = None
        return func(*args, **(kwargs or {}))

    def _described(self, func: Any) -> str:
        line: UserLine | None = innermost_user_line(self._below)
        module = self._module()
        place = f" in '{module}'" if module else ""
        return f"{func.overloadpacket.__name__}{place}" + (f" ({line})" if line is not None else "")

    def _module(self) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if name := self._names.get(id(frame.f_locals.get("self"))):
                return str(name)
            frame = frame.f_back
        return ""


def _draws_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention is tagged as random for the sake of a dropout that is 0 in eval mode."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            return not (args[position] if position < len(args) else kwargs.get(argument.name, 0.0))
    return False


def random_draws(model: nn.Module, spec: ModelSpec, arrays: Arrays) -> list[str]:
    """Operators that draw random numbers in one forward pass, each with module and line, in order of appearance."""
    draws = _Draws(model, stack_depth())
    try:
        with draws:
            observe(model, spec, arrays)
    except DeployerError:  # a model that cannot run under the mode keeps the plain hint
        return []
    return list(draws.seen)
