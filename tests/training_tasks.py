"""Small training tasks shared by the tests of `deployer.training`. Sizes are odd, so that nothing divides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from deployer.training import Datasets, Task


class Block(nn.Module):
    """A residual layer, the unit that FSDP wraps and that checkpointing computes again."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))  # type: ignore[no-any-return]


class Perceptron(nn.Module):
    def __init__(self, dropout: float, *, normalised: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, dropout) for _ in range(2))
        self.norm = nn.BatchNorm1d(8) if normalised else nn.Identity()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Rows(Task):
    """Classification of 37 rows; `dropout` and `normalised` are the model's. Row `nan_row` gives a loss of NaN."""

    def __init__(self, dropout: float = 0.0, nan_row: int = -1, *, normalised: bool = False) -> None:
        self.dropout, self.nan_row, self.normalised = dropout, nan_row, normalised

    def build_model(self) -> nn.Module:
        return Perceptron(self.dropout, normalised=self.normalised)

    def datasets(self) -> Datasets:
        generator = torch.Generator().manual_seed(7)
        x, y = torch.randn(37, 8, generator=generator), torch.randint(3, (37,), generator=generator)
        if self.nan_row >= 0:
            x[self.nan_row] = torch.nan
        return Datasets(TensorDataset(x, y), TensorDataset(x[:11].nan_to_num(), y[:11]))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])


class Tokens(Rows):
    """The loss is a mean over unmasked tokens, of which rows have very different numbers."""

    def datasets(self) -> Datasets:
        generator = torch.Generator().manual_seed(8)
        x, y = torch.randn(37, 5, 8, generator=generator), torch.randint(3, (37, 5), generator=generator)
        y[torch.arange(5) > torch.randint(5, (37, 1), generator=generator)] = -100
        return Datasets(TensorDataset(x, y))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100, reduction="sum")
        return total, (batch[1] != -100).sum()
