"""Which weights a file holds: the trained ones, averaged ones (EMA, SWA), or those of several networks.

A set is a mapping of names to tensors somewhere in the file. Its name is its place there (`model`, `ema.state_dict`);
`raw` and `ema` are short for the one trained and the one averaged set. A place may go on into the names themselves:
`state_dict.generator` is what stands below `generator.` in the set `state_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from deployer.checkpoint.pickles import StandIn, is_module, module_tensors
from deployer.checkpoint.tensors import StoredTensor, is_tensor, stored
from deployer.errors import CheckpointError, nearest

Weights = dict[str, StoredTensor]

RAW, EMA = "raw", "ema"
_DEPTH = 4

#: places under which training scripts keep the trained weights
_RAW_PLACES = frozenset({
    "state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params", "model_state",
    "state", "student", "generator_state_dict", "app",
})  # fmt: skip
#: a place or the beginning of a name that says "averaged"
_AVERAGED = re.compile(
    r"(^|[._-])(ema|swa|averaged?|shadow|teacher)([._-]|$)|_ema$|^ema_|(^|_)(ema|swa|averaged?)_model"
)
#: what stands beside weights and holds tensors of its own
_OTHER = re.compile(
    r"optim|sched|scaler|rng|random_state|loops|callbacks|amp|grad_|gradient|history|metric|sampler|lr_", re.I
)


@dataclass(frozen=True)
class WeightSet:
    """`whole` is the set before averaged copies were split off by their names: a model may really have such a part."""

    place: str
    averaged: bool
    weights: Weights
    whole: Weights | None = None

    def describe(self) -> str:
        return f"'{self.place}' ({len(self.weights)} tensors{', averaged' if self.averaged else ''})"


@dataclass(frozen=True)
class Found:
    sets: tuple[WeightSet, ...]
    step: int | None = None
    stand_ins: tuple[str, ...] = ()
    modules: tuple[str, ...] = field(default_factory=tuple)


def find_sets(tree: Any) -> Found:
    """Every weight set of what a file held, and the training step where it is told."""
    sets = [split for place, weights in _walk(tree, "", 0, set()) for split in _split(place, weights)]
    if not sets and isinstance(tree, Mapping) and (loose := _loose(tree)):
        sets = _split("", loose)
    modules = tuple(dict.fromkeys(value.kind for value in _children(tree, top=True).values() if is_module(value)))
    stand_ins = tuple(sorted(value.kind for value in _children(tree, top=True).values() if isinstance(value, StandIn)))
    return Found(tuple(sets), _step(tree), stand_ins, modules)


def _children(value: Any, *, top: bool = False) -> dict[str, Any]:
    if isinstance(value, StandIn):
        children = {} if is_module(value) and not top else value.fields()
        return {"": value, **children} if top else children
    return dict(value) if isinstance(value, Mapping) else {}


def _walk(value: Any, place: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Weights]]:
    if depth > _DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):  # --trust-pickle built it
        value = value.state_dict()
    elif is_module(value):
        value = dict(module_tensors(value))
    if _is_state_dict(value):
        yield place, {name: stored(tensor) for name, tensor in value.items() if is_tensor(tensor)}
        return
    for name, child in _children(value).items():
        if isinstance(name, str) and name != "param_groups" and not _OTHER.search(name):
            yield from _walk(child, f"{place}.{name}" if place else name, depth + 1, seen)


def _is_state_dict(value: Any) -> bool:
    """Names to tensors; the `_extra_state` of some modules may be anything."""
    if not isinstance(value, Mapping) or not any(is_tensor(item) for item in value.values()):
        return False
    return all(
        isinstance(name, str) and (is_tensor(item) or name.endswith("_extra_state")) for name, item in value.items()
    )


def _loose(tree: Mapping[Any, Any]) -> Weights:
    """Tensors that lie between other things at the top of a file."""
    return {name: stored(item) for name, item in tree.items() if isinstance(name, str) and is_tensor(item)}


def _split(place: str, weights: Weights) -> list[WeightSet]:
    """One set, or two where some names begin with a part that says "averaged" and the others do not."""
    averaged_place = bool(_AVERAGED.search(place)) or "n_averaged" in weights
    heads = {name: _averaged_head(name) for name in weights}
    prefixes = {head for head in heads.values() if head}
    if averaged_place or not prefixes:
        return [WeightSet(place, averaged_place, weights)]
    rest = {name: tensor for name, tensor in weights.items() if not heads[name]}
    parts = [WeightSet(place, False, rest, whole=weights)] if rest else []
    for prefix in sorted(prefixes):
        below = {name[len(prefix) + 1 :]: tensor for name, tensor in weights.items() if heads[name] == prefix}
        joined = f"{place}.{prefix}" if place else prefix
        parts.append(WeightSet(joined, True, below, whole=None if rest else weights))
    return parts


def _averaged_head(name: str) -> str:
    """The leading parts of a name up to the one that says "averaged", among its first two, else ""."""
    parts = name.split(".")[:-1][:2]
    for count, part in enumerate(parts, start=1):
        if _AVERAGED.search(part):
            return ".".join(parts[:count])
    return ""


def _step(tree: Any) -> int | None:
    if isinstance(tree, Mapping):
        for name in ("global_step", "step", "iteration", "iter", "epoch"):
            if type(value := tree.get(name)) is int:
                return value
    return None


def choose_set(sets: Sequence[WeightSet], wanted: str | None, source: str) -> tuple[WeightSet, str]:
    """The set that `wanted` names and the name to record: by default the trained one (`raw`), else the only one.

    Raises CheckpointError that lists the sets where the choice is not clear.
    """
    listed = ", ".join(item.describe() for item in sets)
    if wanted is None:
        raw = _trained(sets)
        if len(raw) == 1:
            return raw[0], RAW
        if len(sets) == 1:
            return sets[0], EMA
        raise CheckpointError(
            f"{source} holds several sets of weights, and none is plainly the one to take: {listed}; "
            f"add --weights {sets[0].place} or another"
        )
    matching = {RAW: _trained(sets), EMA: [item for item in sets if item.averaged]}.get(wanted)
    named = [item for item in sets if item.place == wanted] or _below(sets, wanted)
    if named:
        return named[0], wanted
    if matching is not None and len(matching) == 1:
        return matching[0], wanted
    if matching:
        raise CheckpointError(f"{source} holds several sets that are {wanted}: {listed}; name one by its place")
    hint = nearest(wanted, [RAW, EMA, *(item.place for item in sets if item.place)])
    raise CheckpointError(f"{source} holds no weights '{wanted}'; it holds {listed}{hint if 'mean' in hint else ''}")


def _trained(sets: Sequence[WeightSet]) -> list[WeightSet]:
    """Trained sets; those at a usual place are preferred to any other (a loss with weights of its own)."""
    trained = [item for item in sets if not item.averaged]
    usual = [item for item in trained if item.place.rsplit(".", 1)[-1] in _RAW_PLACES]
    return usual if usual else trained


def _below(sets: Sequence[WeightSet], wanted: str) -> list[WeightSet]:
    """A part of a set: what stands below a prefix of its names."""
    for item in sets:
        start = f"{item.place}." if item.place else ""
        if wanted.startswith(start) and (prefix := wanted[len(start) :] + "."):
            weights = item.whole or item.weights
            part = {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}
            if part:
                return [WeightSet(wanted, item.averaged, part)]
    return []
