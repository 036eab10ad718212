"""Fitting the names in a checkpoint to the names of a model.

Training wraps models, and wrappers leave parts in the keys: `module.` (DDP), `_orig_mod.` (torch.compile),
`_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`, Lightning's `model.`. What is a wrapper and what is a part of
the model is decided by the model's own keys: of several readings of the names the one is taken that meets them all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from deployer.errors import CheckpointError

#: parts that torch and its relatives add and that nobody gives to a module of their own
_CERTAIN = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module",
                      "_forward_module", "_wrapped_module"})  # fmt: skip
#: those, and the one that is a usual name as well
_WRAPPERS = _CERTAIN | {"module"}

_FLAT = ("_flat_param", "flat_param")
_PREFIX_DEPTH = 4


@dataclass(frozen=True)
class Fit:
    """key of the file → key of the model, for the keys that are met; and the rule for each that was renamed."""

    targets: dict[str, str]
    rules: dict[str, str]

    @property
    def renamed(self) -> dict[str, str]:
        return {key: self.targets[key] for key in self.rules}


def flat_parameters(keys: Collection[str]) -> str:
    """What to say of the weights that one rank of FSDP saved for itself, a slice of all without their names; or ""."""
    flat = sorted(key for key in keys if key.rsplit(".", 1)[-1] in _FLAT)
    if not flat:
        return ""
    return (
        f"an FSDP flat-parameter shard of one rank (keys {', '.join(flat[:3])}), which holds neither all weights nor "
        "their names; save a FULL state dict (get_model_state_dict with full_state_dict=True) or a sharded-DCP one "
        "(torch.distributed.checkpoint), and give that"
    )


def refuse_flat_parameters(keys: Collection[str], source: str) -> None:
    """Raises CheckpointError for one rank's flat parameters."""
    if fault := flat_parameters(keys):
        raise CheckpointError(f"{source} is {fault}")


def fit_keys(keys: Collection[str], expected: Collection[str]) -> Fit:
    """The reading of `keys` that meets most of `expected`; of equals, the one that changes least.

    Raises CheckpointError when two keys mean the same key of the model.
    """
    wanted = set(expected)
    best: dict[str, str] = {}
    clash: CheckpointError | None = None
    for reading in _readings(list(keys), wanted):
        met = {key: target for key, target in reading.items() if target in wanted}
        try:
            _refuse_clashes(met)
        except CheckpointError as error:
            clash = clash or error
            continue
        if len(met) > len(best):
            best = met
        if len(met) == len(wanted) == len(keys):
            break
    if not best and clash:
        raise clash
    return Fit(best, {key: _rule(key, target) for key, target in best.items() if key != target})


def _refuse_clashes(met: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for key, target in met.items():
        if target in first:
            raise CheckpointError(f"two keys of the checkpoint mean '{target}': '{first[target]}' and '{key}'")
        first[target] = key


def _readings(keys: list[str], wanted: set[str]) -> Iterator[dict[str, str]]:
    """Ways to read the keys, the most literal first: as they are, without leading parts that all of them share,
    without wrapper parts, and with a prefix that all of the model's keys share."""
    yield {key: key for key in keys}
    for wrappers in (frozenset[str](), _CERTAIN, _WRAPPERS):
        plain = {key: _without(key, wrappers) for key in keys}
        by_plain = _unique_by_plain(wanted, wrappers)
        # A key that the model has stays as it is, unless the whole is read without its first part.
        yield {key: key if key in wanted else by_plain.get(name, name) for key, name in plain.items()}
        for shortened in _shortened(plain):
            yield {
                key: name if name in wanted and not wrappers else by_plain.get(name, name)
                for key, name in shortened.items()
            }
        for part in _parts(plain):
            yield {key: by_plain.get(short, short) if short else name for key, (name, short) in part.items()}
        for prefix in _shared_prefixes(wanted):
            yield {key: by_plain.get(f"{prefix}{name}", name) for key, name in plain.items()}


def _without(key: str, wrappers: frozenset[str]) -> str:
    return ".".join(part for part in key.split(".") if part not in wrappers) if wrappers else key


def _unique_by_plain(wanted: set[str], wrappers: frozenset[str]) -> dict[str, str]:
    """name without wrappers → the one key of the model that it can mean."""
    found: dict[str, list[str]] = {}
    for key in wanted:
        found.setdefault(_without(key, wrappers), []).append(key)
    return {name: keys[0] for name, keys in found.items() if len(keys) == 1}


def _shortened(names: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The names without their first part, then without the first two, …, as long as all share it."""
    for depth in range(1, _PREFIX_DEPTH + 1):
        heads = {tuple(name.split(".")[:depth]) for name in names.values()}
        if len(heads) != 1 or any(name.count(".") < depth for name in names.values()):
            return
        yield {key: name.split(".", depth)[depth] for key, name in names.items()}


def _parts(names: Mapping[str, str]) -> Iterator[dict[str, tuple[str, str]]]:
    """For each first part that some names share: (name, name without it, or "" where it has another)."""
    for head in dict.fromkeys(name.split(".")[0] for name in names.values() if "." in name):
        start = f"{head}."
        yield {key: (name, name[len(start) :] if name.startswith(start) else "") for key, name in names.items()}


def _shared_prefixes(wanted: set[str]) -> Iterator[str]:
    """`net.` where every key of the model begins with it, then `net.encoder.`, …"""
    for shortened in _shortened({key: key for key in wanted}):
        key = next(iter(wanted))
        yield key[: len(key) - len(shortened[key])]


def _rule(key: str, target: str) -> str:
    """What was done to `key`, in words."""
    if target.endswith(f".{key}"):
        return f"prefix '{target[: -len(key)]}' added"
    if key.endswith(f".{target}"):
        prefix = key[: -len(target)]
        only_wrappers = all(part in _WRAPPERS for part in prefix.rstrip(".").split("."))
        return f"{'wrapper' if only_wrappers else 'prefix'} '{prefix}' removed"
    removed = list(key.split("."))
    for part in target.split("."):
        if part in removed:
            removed.remove(part)
    return f"wrappers {', '.join(f'{part!r}' for part in dict.fromkeys(removed))} removed"


def suggest(names: Collection[str], valid: Collection[str], limit: int = 5) -> dict[str, str]:
    """The nearest valid name for the first few of `names`."""
    pool = list(valid)[:2000]  # comparing is quadratic
    found = ((name, get_close_matches(name, pool, n=1)) for name in list(names)[:limit])
    return {name: close[0] for name, close in found if close}
