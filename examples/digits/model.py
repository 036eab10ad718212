"""A small convolutional network for scikit-learn's 8 × 8 digits."""

import torch
from torch import Tensor, nn


class DigitsNet(nn.Module):
    """image (batch, 1, 8, 8) float32 in 0..1 → logits (batch, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(0.2)
        self.classify = nn.Linear(4 * width * 4, 10)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        features = torch.flatten(self.features(image), 1)
        return {"logits": self.classify(self.dropout(features))}


def build(width: int = 16) -> DigitsNet:
    return DigitsNet(width)
