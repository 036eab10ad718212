"""How the keys of a file met those of a model, and where weights came from: records for people and manifests."""

from __future__ import annotations

import msgspec


class Coverage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of every key.

    `renamed`      key of the file → key of the model; `rules` says by which rule, key by key
    `tied`         key of the model that the file stores once, under another name → that name
    `defaulted`    key of the model that keeps the value of a new model → why that is right
    `skipped`      key of the file that the model needs not → why
    `casts`        "float16→float32" → number of tensors
    `missing`, `unexpected`   what is left; weights with either are refused. `suggestions` gives the nearest names
    """

    loaded: int = 0
    renamed: dict[str, str] = {}
    rules: dict[str, str] = {}
    tied: dict[str, str] = {}
    defaulted: dict[str, str] = {}
    skipped: dict[str, str] = {}
    casts: dict[str, int] = {}
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    suggestions: dict[str, str] = {}

    @property
    def fits(self) -> bool:
        return not self.missing and not self.unexpected


class Intake(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where weights came from. `weight_sets` are the places of all sets in the file, `weight_set` the name by which
    one was chosen; `allowed_globals` and `trusted_pickle` are what the user opened."""

    kind: str
    path: str
    sha256: str
    weight_set: str = "raw"
    weight_sets: tuple[str, ...] = ()
    allowed_globals: tuple[str, ...] = ()
    trusted_pickle: bool = False
    coverage: Coverage | None = None
