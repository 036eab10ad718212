"""Small models whose answers are arithmetic, and checkpoints of them without files."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.spec import Array, Dim, ModelSpec, TensorSpec

BATCH = {"batch": Dim(1, 4, 16)}


class Scale(nn.Module):
    """x (batch, 3) → 2·x."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class ManyOutputs(nn.Module):
    """Named outputs of every dtype that formats carry, in an order that is not alphabetical."""

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        total = (ids * mask).sum(1)
        return {"total": total, "any": mask.bool().any(1), "nested": {"mean": total.float() / mask.sum(1)}}


class ScalarOutput(nn.Module):
    """A vector and a scalar in, rows and a scalar out: 0-dimensional arrays pass every border as they are."""

    def forward(self, x: Tensor, gain: Tensor) -> dict[str, Tensor]:
        return {"x": x * gain, "total": x.sum()}


class SequenceFirst(nn.Module):
    """x (5, batch, 4) → cumulative sum over axis 0: batching along axis 0 would mix requests."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


class BakedBatch(nn.Module):
    """Reads the batch size as a Python number, as careless models do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(int(x.shape[0]), 1).repeat(1, x.shape[1])


class Branch(nn.Module):
    """Sums above 10 take another branch: 2·x below, x − 10 above."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 10 if x.sum() > 10 else 2 * x


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


class MixesRows(nn.Module):
    """Subtracts the mean over the batch: a row's answer depends on its neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Detections(nn.Module):
    """Rows whose first column exceeds 0.5: no batch axis, as many rows as were found."""

    def forward(self, boxes: Tensor) -> Tensor:
        return boxes[boxes[:, 0] > 0.5]


class Mutates(nn.Module):
    """Writes into its input and returns it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        return x, x + 1


_X = TensorSpec("x", "float32", ("batch", 3))
_ROWS = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)}

#: class → (spec without outputs, samples)
MODELS: dict[type[nn.Module], tuple[ModelSpec, dict[str, Array]]] = {
    Scale: (ModelSpec("scale", (_X,), dims=BATCH, batch="batch"), _ROWS),
    ManyOutputs: (
        ModelSpec(
            "many",
            (TensorSpec("ids", "int64", ("batch", "length")), TensorSpec("mask", "int64", ("batch", "length"))),
            dims=BATCH | {"length": Dim(1, 5, 12)},
            batch="batch",
        ),
        {"ids": np.arange(1, 13).reshape(3, 4), "mask": np.tril(np.ones((3, 4), np.int64))},
    ),
    SequenceFirst: (
        ModelSpec("sequence_first", (TensorSpec("x", "float32", (5, "batch", 4)),), dims=BATCH, batch="batch"),
        {"x": np.arange(60, dtype=np.float32).reshape(5, 3, 4)},
    ),
    ScalarOutput: (
        ModelSpec("scalar", (_X, TensorSpec("gain", "float32", ())), dims=BATCH, batch="batch"),
        {**_ROWS, "gain": np.array(3, np.float32)},
    ),
    BakedBatch: (ModelSpec("baked", (_X,), dims=BATCH, batch="batch"), _ROWS),
    Branch: (ModelSpec("branch", (_X,), dims=BATCH, batch="batch"), _ROWS),
    Noisy: (ModelSpec("noisy", (_X,), dims=BATCH, batch="batch"), _ROWS),
    MixesRows: (ModelSpec("mixes", (_X,), dims=BATCH, batch="batch"), _ROWS),
    Detections: (
        ModelSpec("detections", (TensorSpec("boxes", "float32", ("rows", 5)),), dims={"rows": Dim(1, 4, 16)}),
        {"boxes": np.array([[0.9, 1, 2, 3, 4], [0.1, 1, 2, 3, 4], [0.8, 5, 6, 7, 8]], np.float32)},
    ),
    Mutates: (ModelSpec("mutates", (_X,), dims=BATCH, batch="batch"), _ROWS),
}


def checkpoint_of(kind: type[nn.Module]) -> Checkpoint:
    """A Checkpoint of one of MODELS; the factory is the class itself."""
    spec, samples = MODELS[kind]
    return load_checkpoint(model=f"{__file__}:{kind.__name__}", spec=spec, samples=samples)
