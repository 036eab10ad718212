"""Whole networks written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.entry import declared, floats, image, integers, model, unit


def conv_bn(inputs: int, outputs: int, stride: int = 1, groups: int = 1, size: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)
    )


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_bn(inputs, outputs, stride), nn.ReLU(inplace=True), conv_bn(outputs, outputs))
        self.skip = conv_bn(inputs, outputs, stride, size=1) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x), inplace=True)


@model("resnet", "network", image("batch", 3, 32, 32, name="input"))
def resnet() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 8, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Residual(8, 8, 1), Residual(8, 16, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


class InvertedResidual(nn.Module):
    """Depthwise separable block with squeeze-excite and hard swish."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand, self.depthwise = conv_bn(width, 4 * width, size=1), conv_bn(4 * width, 4 * width, groups=4 * width)
        self.squeeze, self.excite = nn.Conv2d(4 * width, width, 1), nn.Conv2d(width, 4 * width, 1)
        self.project = conv_bn(4 * width, width, size=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.hardswish(self.depthwise(F.relu6(self.expand(x))))
        scale = F.hardsigmoid(self.excite(F.relu(self.squeeze(hidden.mean((2, 3), keepdim=True)))))
        return x + self.project(hidden * scale)


@model("mobilenet_like", "network", image("batch", 3, 32, 32, name="input"))
def mobilenet_like() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 8, 2), nn.Hardswish(), InvertedResidual(8), InvertedResidual(8), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 10),
    )  # fmt: skip


class UNet(nn.Module):
    """Two levels, bilinear upsampling to the size of the skip connection: any height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = conv_bn(3, 8), conv_bn(8, 16), conv_bn(16, 16)
        self.up2, self.up1, self.head = conv_bn(32, 8), conv_bn(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, picture: Tensor) -> Tensor:
        first = F.relu(self.down1(picture))
        second = F.relu(self.down2(F.max_pool2d(first, 2)))
        x = F.relu(self.bottom(F.max_pool2d(second, 2)))
        x = F.interpolate(x, size=second.shape[-2:], mode="bilinear", align_corners=False)
        x = F.relu(self.up2(torch.cat((x, second), 1)))
        x = F.interpolate(x, size=first.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(F.relu(self.up1(torch.cat((x, first), 1)))).sigmoid()


@model("unet", "network", image("batch", 3, "height", "width", name="picture"))
def unet() -> nn.Module:
    return UNet()


class Detector(nn.Module):
    """Single-shot detection head: boxes decoded against an anchor grid, the best class of each; dict outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv_bn(3, 8, 2), nn.ReLU(), conv_bn(8, 8, 2), nn.ReLU())
        self.boxes, self.scores = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 3, 1)

    def forward(self, picture: Tensor) -> dict[str, Tensor]:
        features = self.backbone(picture)
        height, width = features.shape[-2:]
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres = torch.stack((columns, rows), -1).reshape(1, -1, 2) * 4.0 + 2
        raw = self.boxes(features).flatten(2).transpose(1, 2)
        middle, size = centres + raw[..., :2] * 4, raw[..., 2:].clamp(max=4).exp() * 8
        boxes = torch.cat((middle - size / 2, middle + size / 2), -1)
        scores, labels = self.scores(features).flatten(2).transpose(1, 2).max(-1)
        return {"scores": scores.sigmoid(), "labels": labels, "boxes": boxes}


@model("detection_head", "network", image("batch", 3, 32, 32, name="picture"))
def detection_head() -> nn.Module:
    return Detector()


class TwoTowers(nn.Module):
    """Several inputs of several dtypes, several outputs; one input is optional and given."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.left, self.right = nn.Embedding(30, 8), nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, features: Tensor, item: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
        left, right = self.left(features), self.right(self.items(item))
        score = (left * right).sum(-1)
        if weight is not None:
            score = score * weight
        return {"score": score, "left": F.normalize(left, dim=-1), "chosen": (score > 0).to(torch.int32)}


@model(
    "two_towers", "network", floats("features", "batch", 6), integers("item", "batch", high=30), unit("weight", "batch")
)
def two_towers() -> nn.Module:
    return TwoTowers()


class SuperResolution(nn.Module):
    """Sub-pixel convolution, added to a bicubic upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, picture: Tensor) -> Tensor:
        sharp = F.pixel_shuffle(self.body(picture), 2)
        return sharp + F.interpolate(picture, scale_factor=2.0, mode="bicubic", align_corners=False)


@model("super_resolution", "network", image("batch", 1, "height", "width", name="picture"))
def super_resolution() -> nn.Module:
    return SuperResolution()


class Autoencoder(nn.Module):
    """Variational autoencoder that answers the mean in eval mode and samples in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(20, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encode(x).tanh()
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * (spread / 2).exp() if self.training else mean
        return self.decode(code), mean, spread


@model("autoencoder", "network", floats("x", "batch", 20))
def autoencoder() -> nn.Module:
    return Autoencoder()


class GraphConvolution(nn.Module):
    """Messages along the edges of one graph, added up at their targets by index_add; no batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(6, 6), nn.Linear(12, 6)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sent = self.message(nodes[edges[0]])
        gathered = torch.zeros_like(nodes).index_add(0, edges[1], sent)
        return self.update(torch.cat((nodes, gathered), -1)).relu()


@model(
    "graph_convolution",
    "network",
    floats("nodes", 8, 6),
    declared(integers("edges", 2, "rows", high=8), 0, 7),
    batch=None,
)
def graph_convolution() -> nn.Module:
    return GraphConvolution()


class MixtureOfExperts(nn.Module):
    """Soft top-2 routing, computed densely: every expert sees every row, the gate weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        dense = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, weights)
        return (torch.stack([expert(x) for expert in self.experts], -1) * dense[..., None, :]).sum(-1)


@model("mixture_of_experts", "network", floats("x", "batch", "sequence", 8))
def mixture_of_experts() -> nn.Module:
    return MixtureOfExperts()


class MlpMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.tokens = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
        self.channels = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 5)

    def forward(self, picture: Tensor) -> Tensor:
        x = self.patches(picture).flatten(2)
        x = (x + self.tokens(x)).transpose(1, 2)
        return self.head((x + self.channels(x)).mean(1))


@model("mlp_mixer", "network", image("batch", 3, 32, 32, name="picture"))
def mlp_mixer() -> nn.Module:
    return MlpMixer()
