"""Models that must be refused, each with a class of reason, in every format but those that can take them rightly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.entry import floats, model


class Branch(nn.Module):
    """Another formula where the sum is large."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 10 if x.sum() > 1 else 2 * x


@model("branch_on_values", "to refuse", floats("x", "batch", 3), refused="data_dependent_control_flow",
       taken_by=("torchscript",), batch=None)  # fmt: skip
def branch_on_values() -> nn.Module:
    return Branch()


class EarlyExit(nn.Module):
    """Layers until the answer is confident."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            if bool(x.abs().max() > 0.5):
                break
        return x


@model("early_exit", "to refuse", floats("x", "batch", 4), refused="data_dependent_control_flow",
       taken_by=("torchscript",))  # fmt: skip
def early_exit() -> nn.Module:
    return EarlyExit()


class Halve(nn.Module):
    """Loops while a value is large."""

    def forward(self, x: Tensor) -> Tensor:
        while x.abs().max() > 0.5:
            x = x / 2
        return x


@model("while_on_values", "to refuse", floats("x", "batch", 4), refused="data_dependent_control_flow",
       taken_by=("torchscript",))  # fmt: skip
def while_on_values() -> nn.Module:
    return Halve()


class SizeByBranch(nn.Module):
    """Another formula for a batch of one, decided by the size."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 3 if x.shape[0] == 5 else x * 2


@model("branch_on_size", "to refuse", floats("x", "batch", 4), refused="specialized_axis",
       taken_by=("torchscript",))  # fmt: skip
def branch_on_size() -> nn.Module:
    return SizeByBranch()


class AlwaysDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


@model("dropout_left_on", "to refuse", floats("x", "batch", 6), refused="nondeterministic")
def dropout_left_on() -> nn.Module:
    return AlwaysDropout()


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@model("random_noise", "to refuse", floats("x", "batch", 6), refused="nondeterministic")
def random_noise() -> nn.Module:
    return Noise()


class ComplexOutput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


@model("complex_output", "to refuse", floats("x", "batch", 8), refused="unsupported_output")
def complex_output() -> nn.Module:
    return ComplexOutput()


class ThroughNumpy(nn.Module):
    """Leaves torch in the middle of forward: a trace holds what numpy gave, strict torch.export follows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().clip(-1, 1)) * 2


@model(
    "through_numpy",
    "to refuse",
    floats("x", "batch", 4),
    refused="specialized_axis",
    taken_by=("exported", "onnx", "aoti"),
)
def through_numpy() -> nn.Module:
    return ThroughNumpy()
