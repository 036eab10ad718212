"""Weights into a model: strictly, with an account of every key, and without a second copy in memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from deployer.checkpoint.coverage import Coverage
from deployer.checkpoint.keys import Fit, fit_keys, refuse_flat_parameters, suggest
from deployer.checkpoint.sets import Weights, WeightSet
from deployer.checkpoint.tensors import MemoryTensor, StoredTensor, equal_values, read_tensor, stored
from deployer.errors import CheckpointError

log = logging.getLogger(__name__)

COUNTER = "num_batches_tracked"
_COUNTER_REASON = (
    "a counter of training steps, which checkpoints from before torch 0.4.1 lack and evaluation never reads: it "
    "keeps the value of a new model"
)


@dataclass(frozen=True)
class Plan:
    """Which tensor of the file goes where; `coverage` tells people."""

    tensors: Mapping[str, StoredTensor]
    coverage: Coverage


def plan_set(model: nn.Module, chosen: WeightSet, source: str, aliases: Mapping[str, str]) -> Plan:
    """As `load_weights` would, nothing loaded."""
    plan = plan_load(model, chosen.weights, source, aliases)
    if chosen.whole is not None and not plan.coverage.fits:
        other = plan_load(model, chosen.whole, source, aliases)
        plan = other if other.coverage.fits else plan
    return plan


def own_tensors(model: nn.Module) -> dict[str, Any]:
    """The model's state by key; tensors that are tied are the same objects."""
    return dict(model.state_dict(keep_vars=True))


def plan_load(
    model: nn.Module,
    weights: Mapping[str, StoredTensor | Tensor],
    source: str,
    aliases: Mapping[str, str] | None = None,
) -> Plan:
    """Meet the keys of `weights` with those of `model`. `aliases` are names that the file stores under another name.

    Raises CheckpointError for a flat FSDP shard and for two keys that mean the same; keys without a partner are in
    the coverage.
    """
    refuse_flat_parameters(weights, source)
    own = own_tensors(model)
    files: Weights = {name: stored(tensor) for name, tensor in weights.items()}
    aliased = {name: kept for name, kept in (aliases or {}).items() if kept in files and name not in files}
    given = {**files, **{name: files[kept] for name, kept in aliased.items()}}
    skipped = _counter_of_averages(given, own)
    fit = fit_keys([name for name in given if name not in skipped], own)
    tensors = {target: given[name] for name, target in fit.targets.items()}
    skipped |= _not_needed(model, own, given, fit, skipped)
    tied = {fit.targets[name]: kept for name, kept in aliased.items() if name in fit.targets}
    tied |= _fill_tied(own, tensors, source)
    defaulted = {
        key: _COUNTER_REASON
        for key in own
        if key not in tensors and key.rsplit(".", 1)[-1] == COUNTER and _sibling(key, "running_mean") in tensors
    }
    missing = tuple(sorted(set(own) - set(tensors) - set(defaulted)))
    unexpected = tuple(sorted(set(given) - set(fit.targets) - set(skipped)))
    coverage = Coverage(
        loaded=len(tensors), renamed=fit.renamed, rules=fit.rules, tied=tied, defaulted=defaulted, skipped=skipped,
        casts=_casts(tensors, own), missing=missing, unexpected=unexpected,
        suggestions=suggest(unexpected, missing or own),
    )  # fmt: skip
    return Plan(tensors, coverage)


def _sibling(key: str, name: str) -> str:
    return ".".join([*key.split(".")[:-1], name])


def _counter_of_averages(given: Weights, own: Mapping[str, Any]) -> dict[str, str]:
    """`n_averaged`, which torch.optim.swa_utils.AveragedModel puts beside its module."""
    name = "n_averaged"
    return {name: "the counter of an AveragedModel"} if name in given and name not in own else {}


def _not_needed(
    model: nn.Module, own: Mapping[str, Any], given: Weights, fit: Fit, skipped: Mapping[str, str]
) -> dict[str, str]:
    """Keys that the model does without: counters of frozen statistics, and buffers that it computes by itself, if what
    it computes is what the file holds."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in own}
    prefix = _removed_prefix(fit)
    found = {}
    for name, tensor in given.items():
        key = name.removeprefix(prefix)
        if name in fit.targets or name in skipped:
            continue
        if key in buffers and equal_values(tensor, MemoryTensor(buffers[key])):
            found[name] = "a buffer that the model computes by itself, to the same values"
        elif key.rsplit(".", 1)[-1] == COUNTER and _sibling(key, "running_mean") in own:
            found[name] = "a counter of training steps; the model's statistics are frozen and keep none"
    return found


def _removed_prefix(fit: Fit) -> str:
    """The prefix that came off every key, or ""."""
    prefixes = {
        key[: -len(target)] if key.endswith(f".{target}") or key == target else "?"
        for key, target in fit.targets.items()
    }
    return prefixes.pop() if len(prefixes) == 1 else ""


def _tied_groups(own: Mapping[str, Any]) -> list[list[str]]:
    """Keys of the model that are one tensor."""
    groups: dict[Any, list[str]] = {}
    for key, tensor in own.items():
        if isinstance(tensor, Tensor) and not is_lazy(tensor) and tensor.numel():
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
            groups.setdefault(place, []).append(key)
    return [keys for keys in groups.values() if len(keys) > 1]


def _fill_tied(own: Mapping[str, Any], tensors: dict[str, StoredTensor], source: str) -> dict[str, str]:
    """Give every key of a tied group the tensor that one of them brought. Raises CheckpointError where the file holds
    two that differ: the model can keep one only."""
    filled = {}
    for keys in _tied_groups(own):
        present = [key for key in keys if key in tensors]
        for other in present[1:]:
            if tensors[other] != tensors[present[0]] and not equal_values(tensors[other], tensors[present[0]]):
                raise CheckpointError(
                    f"{source} holds different values for '{present[0]}' and '{other}', which are one tensor in the "
                    "model; build the model without tying them"
                )
        for key in keys:
            if present and key not in tensors:
                tensors[key] = tensors[present[0]]
                filled[key] = present[0]
    return filled


def _casts(tensors: Mapping[str, StoredTensor], own: Mapping[str, Any]) -> dict[str, int]:
    """`float16→float32` → how many tensors change their dtype on the way."""
    pairs = (
        (tensor.dtype, own[key].dtype)
        for key, tensor in tensors.items()
        if isinstance(own[key], Tensor) and not is_lazy(own[key])
    )
    return dict(Counter(f"{_short(one)}→{_short(other)}" for one, other in pairs if one != other))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_weights(
    model: nn.Module,
    weights: Mapping[str, StoredTensor | Tensor],
    source: str,
    *,
    aliases: Mapping[str, str] | None = None,
    whole: Mapping[str, StoredTensor | Tensor] | None = None,
) -> Coverage:
    """Fill `model` strictly; returns the account of the keys. Values are cast to the model's own dtypes.

    `whole` is `weights` with averaged copies among its names; it is taken where the model has such parts of its own.
    Raises CheckpointError listing missing and unexpected keys, shapes and kinds of dtype that differ, or tensors that
    hold NaN or infinity.
    """
    plan = plan_load(model, weights, source, aliases)
    if whole is not None and not plan.coverage.fits:
        other = plan_load(model, whole, source, aliases)
        plan, weights = (other, whole) if other.coverage.fits else (plan, weights)
    if _loads_itself(model):
        return _load_by_model(model, plan, weights, source)
    require_fit(plan.coverage, model, source)
    own = own_tensors(model)
    _require_same_kinds(plan, own, model, source)
    buffers = {key for key, tensor in own.items() if not isinstance(tensor, nn.Parameter)}
    broken, done = [], set[int]()
    for key, tensor in plan.tensors.items():
        if id(own[key]) in done:
            continue  # tied: filled already
        done.add(id(own[key]))
        if not _fill(own[key].detach(), tensor, constant=key in buffers):
            broken.append(key)
    if broken:
        raise CheckpointError(f"{source} holds NaN or infinity in: {listed(sorted(broken))}")
    return plan.coverage


def require_fit(coverage: Coverage, model: nn.Module | str, source: str) -> None:
    """Raises CheckpointError, one line, for keys that are missing or too many."""
    if coverage.fits:
        return
    name = model if isinstance(model, str) else type(model).__name__
    parts = [f"missing: {listed(coverage.missing)}"] if coverage.missing else []
    if coverage.unexpected:
        parts.append(f"unexpected: {listed(coverage.unexpected)}{_hint(coverage)}")
    raise CheckpointError(f"{source} does not fit {name}: {'; '.join(parts)}")


def _hint(coverage: Coverage) -> str:
    """Nearest names, or the part of the file that would fit by its name."""
    near = [f"'{right}'" if len(coverage.suggestions) == 1 else f"'{right}' for '{wrong}'"
            for wrong, right in list(coverage.suggestions.items())[:3] if right in coverage.missing]  # fmt: skip
    if near:
        return f"; did you mean {', '.join(near)}?"
    parts = {key.split(".")[0] for key in coverage.renamed}
    if not coverage.missing and len(parts) == 1:
        part = parts.pop()
        return f"; the part '{part}' fits alone: --weights PLACE.{part}, PLACE as `deployer inspect` lists it"
    return ""


def listed(names: tuple[str, ...] | list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _require_same_kinds(plan: Plan, own: Mapping[str, Any], model: nn.Module, source: str) -> None:
    wrong = [
        f"{key} is {list(tensor.shape)}, the model has {list(own[key].shape)}"
        for key, tensor in plan.tensors.items()
        if tensor.shape != tuple(own[key].shape)
    ]
    wrong += [
        f"{key} is {_short(tensor.dtype)}, the model has {_short(own[key].dtype)}"
        for key, tensor in plan.tensors.items()
        if _kind(tensor.dtype) != _kind(own[key].dtype)
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{source} does not fit {type(model).__name__}: {'; '.join(wrong[:5])}{more}")


def _kind(dtype: torch.dtype) -> str:
    """Values cross between dtypes of one kind only: an int8 weight is no float weight, it lacks its scale."""
    return (
        "float"
        if dtype.is_floating_point
        else "complex"
        if dtype.is_complex
        else "bool"
        if dtype is torch.bool
        else "int"
    )


def _fill(place: Tensor, source: StoredTensor, *, constant: bool) -> bool:
    """Copy `source` into `place` piece by piece; False where a value is not finite. In a buffer the infinities that a
    new model has at the same places (the constant mask of a decoder) are no fault."""
    target = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
    if target is not place:
        target.copy_(place)
    flat, done, finite = target.view(-1), 0, True
    for piece in source.pieces():
        values = piece.to(place.dtype)
        part = flat[done : done + len(piece)]
        done += len(piece)
        if not all_finite(values):
            finite = finite and constant and _same_infinities(part, values)
        part.copy_(values)
    if target is not place:
        place.copy_(target)
    return finite


def _same_infinities(own: Tensor, values: Tensor) -> bool:
    bad = ~values.isfinite()
    return torch.equal(own[bad], values[bad])


def all_finite(values: Tensor) -> bool:
    if values.dtype.itemsize == 1 and values.is_floating_point():
        values = values.float()  # torch compares no float8
    return not (values.is_floating_point() or values.is_complex()) or bool(values.isfinite().all())


def _loads_itself(model: nn.Module) -> bool:
    """Whether loading means more than copying by name: hooks, own loaders, extra state, parameters without a shape."""
    plain = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
    return any(
        type(module)._load_from_state_dict not in plain
        or type(module).load_state_dict is not nn.Module.load_state_dict
        or type(module).set_extra_state is not nn.Module.set_extra_state
        or module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or any(parameter is not None and is_lazy(parameter) for parameter in module._parameters.values())
        for module in model.modules()
    )


def _load_by_model(model: nn.Module, plan: Plan, weights: Mapping[str, StoredTensor | Tensor], source: str) -> Coverage:
    """For models that load in a way of their own: what they leave over is what does not fit."""
    coverage = plan.coverage
    named = {**plan.tensors, **{name: stored(weights[name]) for name in coverage.unexpected if name in weights}}
    state = {key: read_tensor(tensor) for key, tensor in named.items()}
    broken = sorted(key for key, tensor in state.items() if not all_finite(tensor))
    if broken:
        raise CheckpointError(f"{source} holds NaN or infinity in: {listed(broken)}")
    try:
        left = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}: {' '.join(str(error).split())}"
        ) from error
    missing = tuple(sorted(set(left.missing_keys) - set(coverage.defaulted)))
    unexpected = tuple(sorted(left.unexpected_keys))
    met = {key: "by the model's own loader" for key in coverage.unexpected if key not in unexpected}
    coverage = msgspec.structs.replace(
        coverage, missing=missing, unexpected=unexpected, loaded=len(state) - len(unexpected),
        rules=coverage.rules | met, suggestions=suggest(unexpected, missing),
    )  # fmt: skip
    require_fit(coverage, model, source)
    return coverage
