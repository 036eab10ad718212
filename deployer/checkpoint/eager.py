"""Running the user's model in eager mode with named arrays: the reference that everything is held against."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deployer.errors import ModelError, SpecError, first_line, nearest
from deployer.spec import Array, Arrays, ModelSpec
from deployer.userlines import failing_user_line


def flatten_outputs(value: Any) -> dict[str, Tensor]:
    """What forward returned, as named tensors in a stable order.

    A tensor is `output`; a tuple or list gives `output_0`, `output_1`, …; mappings, dataclasses and named tuples give
    their own names, nested ones joined by `.`; None is left out. Anything else raises ModelError naming the place.
    """
    if isinstance(value, Tensor):
        return {"output": value}
    if _fields(value) is None and isinstance(value, tuple | list):
        value = {f"output_{position}": item for position, item in enumerate(value)}
    tensors = dict(_walk(value, ()))
    if not tensors:
        raise ModelError(f"the model returned a {type(value).__name__} without a tensor in it")
    return tensors


def _fields(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()  # type: ignore[no-any-return]
    return None


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield ".".join(path), value
        return
    items = _fields(value)
    if items is None and isinstance(value, tuple | list):
        items = {str(position): item for position, item in enumerate(value)}
    if items is not None:
        for name, item in items.items():
            yield from _walk(item, (*path, str(name)))
    elif value is not None:
        raise ModelError(
            f"the model returned a {type(value).__name__} as output '{'.'.join(path)}'; return tensors only"
        )


def named_outputs(value: Any, spec: ModelSpec) -> dict[str, Tensor]:
    """Outputs under the names and in the order of the spec: by position where forward returned a tensor or a tuple,
    by name where it returned names. Raises SpecError when they do not cover each other."""
    tensors = flatten_outputs(value)
    names = [tensor.name for tensor in spec.outputs]
    positional = isinstance(value, Tensor) or (_fields(value) is None and all("." not in name for name in tensors))
    if positional:
        if len(tensors) != len(names):
            raise SpecError(
                f"the model returned {len(tensors)} outputs, the spec names {len(names)}: {', '.join(names)}"
            )
        return dict(zip(names, tensors.values(), strict=True))
    if sorted(tensors) != sorted(names):
        raise SpecError(f"the model returned the outputs {sorted(tensors)}, the spec names {sorted(names)}")
    return {name: tensors[name] for name in names}


def check_signature(model: nn.Module, spec: ModelSpec) -> None:
    """Every input of the spec must be a parameter of forward. Raises SpecError with the nearest name."""
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for tensor in spec.inputs:
        if tensor.name not in parameters:
            raise SpecError(
                f"{type(model).__name__}.forward has no parameter '{tensor.name}'{nearest(tensor.name, parameters)}"
            )


def call_model(model: nn.Module, arrays: Arrays) -> Any:
    """One forward pass, gradients off, on copies of the inputs (a model that writes into them harms nobody)."""
    return call_on_tensors(model, {name: torch.tensor(array) for name, array in arrays.items()})


def call_on_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> Any:
    """One forward pass, gradients off, on these very tensors. Raises ModelError naming the line of the user's code."""
    try:
        with torch.no_grad():
            return model(**tensors)
    except (Exception, SystemExit) as error:
        shapes = ", ".join(f"{name}{list(tensor.shape)}" for name, tensor in tensors.items())
        line = failing_user_line(error)
        where = f" ({line})" if line is not None else ""
        raise ModelError(
            f"the model failed on {shapes} with {type(error).__name__}: {first_line(error)}{where}"
        ) from error


def run_eager(model: nn.Module, spec: ModelSpec, arrays: Arrays) -> dict[str, Array]:
    """Named arrays in, named arrays out, in the order of the spec."""
    return output_arrays(call_model(model, arrays), spec)


def output_arrays(value: Any, spec: ModelSpec) -> dict[str, Array]:
    """What forward returned, as numpy arrays of their own memory, in the order of the spec."""
    outputs = named_outputs(value, spec)
    return {name: tensor.detach().cpu().contiguous().clone().numpy() for name, tensor in outputs.items()}
