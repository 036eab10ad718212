"""What a model of the zoo is made of: a builder, its inputs with their dynamic axes, and a maker of values for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.samples import check_samples
from deployer.spec import Array, Dim, ModelSpec, TensorSpec

Maker = Callable[[np.random.Generator, tuple[int, ...]], Array]

#: small, all different, so that an axis taken for another shows
DIMS = {
    "batch": Dim(1, 3, 6),
    "sequence": Dim(1, 7, 12),
    "words": Dim(2, 7, 12),
    "samples": Dim(400, 640, 800),
    "height": Dim(24, 40, 56),
    "width": Dim(24, 32, 48),
    "rows": Dim(1, 5, 9),
}


@dataclass(frozen=True)
class Input:
    """One input: its place in the spec, the maker of its values, and the range that the spec declares, if it does."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    make: Maker
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class Entry:
    """One model. `refused` names the class of reason with which it must end in every format but those of `taken_by`;
    `batch` is the Dim along which requests stack, None where there is none."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: tuple[Input, ...]
    refused: str = ""
    taken_by: tuple[str, ...] = ()
    batch: str | None = "batch"
    read: Callable[[Path], Checkpoint] | None = None

    def spec(self) -> ModelSpec:
        used = {size for tensor in self.inputs for size in tensor.shape if isinstance(size, str)}
        return ModelSpec(
            self.name,
            tuple(TensorSpec(each.name, each.dtype, each.shape, each.low, each.high) for each in self.inputs),
            dims={name: dim for name, dim in DIMS.items() if name in used},
            batch=self.batch if self.batch in used else None,
        )

    def arrays(self, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, Array]:
        """Inputs drawn from `seed`, each Dim at its typical size or at the one given."""
        rng = np.random.default_rng(seed)
        chosen = {name: dim.typical for name, dim in DIMS.items()} | dict(sizes or {})
        return {
            tensor.name: tensor.make(rng, tuple(chosen[n] if isinstance(n, str) else n for n in tensor.shape)).astype(
                tensor.dtype
            )
            for tensor in self.inputs
        }

    def checkpoint(self, workspace: Path) -> Checkpoint:
        """The model as `deployer export` takes it; real checkpoints are made once, in `workspace`."""
        if self.read is not None:
            return self.read(workspace)
        spec = self.spec()
        return load_checkpoint(
            model="tests.zoo:build", args={"name": self.name}, spec=spec, samples=check_samples(spec, self.arrays(0))
        )


ENTRIES: dict[str, Entry] = {}


def model(
    name: str,
    family: str,
    *inputs: Input,
    refused: str = "",
    taken_by: tuple[str, ...] = (),
    batch: str | None = "batch",
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register the decorated builder under `name`."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        if name in ENTRIES:
            raise ValueError(f"two models of the zoo are called '{name}'")
        ENTRIES[name] = Entry(name, family, build, inputs, refused, taken_by, batch)
        return build

    return register


def build_seeded(name: str) -> nn.Module:
    """The model called `name`, with the same random weights and statistics every time, none of them trivial."""
    torch.manual_seed(sum(map(ord, name)))
    module = ENTRIES[name].build()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is not None:
            nn.init.normal_(part.running_mean, std=0.1)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    return module.eval()


# --- makers ----------------------------------------------------------------------------------------------------------


def floats(name: str, *shape: int | str, scale: float = 1.0) -> Input:
    return Input(name, "float32", shape, lambda rng, size: rng.normal(0, scale, size))


def unit(name: str, *shape: int | str) -> Input:
    """Values in 0..1."""
    return Input(name, "float32", shape, lambda rng, size: rng.uniform(0, 1, size))


def image(*shape: int | str, name: str = "pixel_values") -> Input:
    return floats(name, *shape)


def ids(name: str, *shape: int | str, high: int = 60) -> Input:
    """Ids from 3 up: 0, 1 and 2 are padding and its like in most vocabularies."""
    return Input(name, "int64", shape, lambda rng, size: rng.integers(3, high, size))


def integers(name: str, *shape: int | str, low: int = 0, high: int = 8, dtype: str = "int64") -> Input:
    return Input(name, dtype, shape, lambda rng, size: rng.integers(low, high, size))


def declared(tensor: Input, low: int, high: int) -> Input:
    """`tensor` with its smallest and largest value in the spec: indices, of which -1 is the last to some formats."""
    return replace(tensor, low=low, high=high)


def right_padded(name: str = "attention_mask", dtype: str = "int64", length: str = "sequence") -> Input:
    """1 for the first tokens of each row, 0 for its padding; no row is empty."""

    def make(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
        lengths = rng.integers(math.ceil(size[1] / 2), size[1] + 1, size[0])
        return np.arange(size[1])[None, :] < lengths[:, None]

    return Input(name, dtype, ("batch", length), make)


TOKENS = (ids("input_ids", "batch", "sequence"), right_padded())
