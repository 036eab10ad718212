"""What leaves a float model as it is: smoothing, equalisation; and the arithmetic of bias correction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deployer.quantize.transforms import Smoothed, bias_error, equalize, round_weight, smooth


def program_of(model: nn.Module, example: Tensor) -> Any:
    batch = torch.export.Dim("batch", min=1, max=64)
    return torch.export.export(model, (example,), dynamic_shapes=({0: batch},)).module(check_guards=False)


class Chain(nn.Module):
    """Every kind of pair: a norm between, none, a depthwise layer, pooling; and a branch, which is no pair."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, groups=8)
        self.wide = nn.Conv2d(8, 12, 1)
        self.left = nn.Conv2d(12, 4, 1)
        self.right = nn.Conv2d(12, 4, 1, bias=False)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.depth(torch.relu(self.norm(self.first(x)))))
        x = nn.functional.max_pool2d(torch.relu(self.wide(x)), 2)
        return self.left(x) + self.right(x)


def test_equalised_is_the_same_function_with_equal_ranges_on_both_sides() -> None:
    model = Chain()
    with torch.no_grad():
        model.depth.weight *= torch.logspace(0, 3, 8).reshape(8, 1, 1, 1)
    example = torch.randn(4, 3, 12, 12)
    expected = model(example).detach()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert equalize(model, program_of(copy.deepcopy(model), example)) == ["first.weight", "depth.weight"]
    torch.testing.assert_close(model(example), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    depth, wide = model.depth.weight.abs().amax((1, 2, 3)), model.wide.weight.abs().amax((0, 2, 3))
    torch.testing.assert_close(depth, wide, rtol=1e-2, atol=0)
    for name in ("left.weight", "right.weight", "first.weight", "norm.running_var"):  # a branch; the norm took it
        torch.testing.assert_close(model.state_dict()[name], before[name])


def test_a_weight_that_two_layers_use_is_left_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.last = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.layer(torch.relu(self.layer(x)))))

    model = Twice().eval()
    assert equalize(model, program_of(copy.deepcopy(model), torch.randn(3, 4))) == []


class Attention(nn.Module):
    """Two layers on one input, one on another; a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.query, self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.norm.weight[3] = 1000.0
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        return self.head(x + self.out(torch.tanh(self.query(x) * self.key(x))))


def test_smoothed_is_the_same_function_and_its_outlier_is_in_the_weight() -> None:
    model = Attention()
    batches = [(torch.randint(0, 20, (4, 5)),) for _ in range(3)]
    expected = model(*batches[0]).detach()
    embedding = model.embedding.weight.clone()
    assert smooth(model, batches, 0.5) == ["query", "key", "out"]
    torch.testing.assert_close(model(*batches[0]), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(model.embedding.weight, embedding)
    query, key = model.query, model.key
    assert isinstance(query, Smoothed)
    torch.testing.assert_close(query.inverse, key.inverse)  # they share their input
    # sqrt(max|x| / max|W|) in closed form, for the outlier's channel
    seen = max(float(model.norm(model.embedding(ids))[..., 3].abs().max()) for (ids,) in batches)
    scale = float(1 / query.inverse[3])
    weight = max(float(query.weight[:, 3].abs().max()), float(key.weight[:, 3].abs().max())) / scale
    assert scale == pytest.approx((seen / weight) ** 0.5, rel=1e-4)


def test_smoothing_keeps_a_channel_that_is_always_zero() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    x = torch.tensor([[1.0, 0.0, -2.0, 3.0]])
    expected = model(x)
    smooth(model, [(x,)], 0.6)
    assert float(model[0].inverse[1]) == 1
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_bias_error_is_the_mean_difference_that_rounding_makes(groups: int) -> None:
    torch.manual_seed(1)
    layer = nn.Conv2d(4, 8, 3, groups=groups)
    x = torch.randn(64, 4, 1, 1).expand(64, 4, 6, 6) + torch.arange(4.0).reshape(1, 4, 1, 1)  # no border in the mean
    rounded = round_weight(layer.weight, 7)
    difference = nn.functional.conv2d(x, rounded - layer.weight, groups=groups).mean((0, 2, 3))
    torch.testing.assert_close(bias_error(layer.weight, rounded, x.mean((0, 2, 3))), difference, rtol=1e-3, atol=1e-4)


def test_weights_are_rounded_per_channel_however_small() -> None:
    weight = torch.tensor([[1.0, -0.5, 0.26], [1e-9, -5e-10, 2.6e-10], [0.0, 0.0, 0.0]])
    rounded = round_weight(weight, 127)
    torch.testing.assert_close(rounded[0], torch.tensor([1.0, -64 / 127, 33 / 127]))
    torch.testing.assert_close(rounded[1] * 1e9, rounded[0])
    assert not rounded[2].any()


def test_a_layer_that_is_the_whole_model_or_is_called_by_name_is_smoothed() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    for model in (ByName().eval(), nn.Linear(4, 2).eval()):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
        expected = model(x).detach()
        assert smooth(model, [(x,), (x[0],)], 0.5) == ["layer" if isinstance(model, ByName) else ""]
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model(x[0]), expected[0], rtol=1e-5, atol=1e-6)
