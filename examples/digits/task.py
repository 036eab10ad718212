"""What is trained: the digits of scikit-learn, 80 % of them to learn from, 20 % to hold the network to.

deployer train examples/digits/train.yaml
"""

from collections.abc import Mapping

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from deployer.spec import Arrays, Dim, ModelSpec, TensorSpec
from deployer.training import Datasets, Task

_SAMPLES = 32


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Images (1, 8, 8) as they are read, half of the time moved by at most one pixel in each direction."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if torch.rand(()) < 0.5:
            top, left = (int(start) for start in torch.randint(3, (2,)))
            image = nn.functional.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
        return image, self.labels[index]


class Digits(Task):
    factory = "model.py:build"
    spec = ModelSpec(
        name="digits",
        inputs=(TensorSpec("image", "float32", ("batch", 1, 8, 8)),),
        dims={"batch": Dim(min=1, typical=8, max=64)},
        batch="batch",
        labels=tuple("0123456789"),
    )

    def __init__(self, width: int = 16) -> None:
        self.factory_args = {"width": width}
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)
        # as score.py divides them
        self.train, self.held_out = train_test_split(
            range(len(self.images)), test_size=0.2, random_state=0, stratify=digits.target
        )

    def datasets(self) -> Datasets:
        return Datasets(
            Shifted(self.images[self.train], self.labels[self.train]),
            TensorDataset(self.images[self.held_out], self.labels[self.held_out]),
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(image=images)["logits"], labels)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        images, labels = batch
        return {"accuracy": (model(image=images)["logits"].argmax(1) == labels).float().mean()}

    def samples(self) -> Arrays:
        return {"image": np.asarray(self.images[self.held_out[:_SAMPLES]])}
