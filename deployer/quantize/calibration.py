"""Calibration data: real inputs that fix the ranges of activations, checked before anything is quantized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deployer.spec import Arrays


@dataclass(frozen=True)
class Calibration:
    """Legal inputs of one model, as several named sets of arrays that may differ in size (sentences of several
    lengths); `count` is the number of samples (rows along the batch axis; sets, for a model without one).

    `source` and `sha256` tell where they came from and what they were; `held_out` are every fifth of them, kept from
    the observers so that methods are compared on inputs that they did not see.
    """

    source: str
    sha256: str
    count: int
    batches: tuple[Arrays, ...]
    held_out: tuple[Arrays, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Arrays]:
        return iter(self.batches)
