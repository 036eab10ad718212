"""The zoo: small models of many architectures, each with a spec and inputs; scripts/coverage exports all of them.

`ENTRIES` holds them by name. `build(name)` is the factory that checkpoints of the zoo refer to.
"""

from __future__ import annotations

from torch import nn

from tests.zoo import audio, decoders, encoders, layers, networks, operators, real, refusals, vision
from tests.zoo.entry import ENTRIES, Entry, build_seeded

__all__ = ["ENTRIES", "Entry", "build"]

MODULES = (layers, networks, operators, encoders, decoders, vision, audio, real, refusals)


def build(name: str) -> nn.Module:
    """The model called `name`, the same weights every time."""
    return build_seeded(name)
