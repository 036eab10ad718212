"""The healthy models of the seeded faults: small, seeded, one for each kind of thing that can break."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.spec import Array, Dim, ModelSpec, TensorSpec
from deployer.validate import Reference, make_reference


class Mlp(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.square, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.square(F.relu(self.first(x)))))


class Convnet(nn.Module):
    """Convolution, batch norm with statistics of its own, dropout."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.norm, self.fc = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4 * 16, 10)
        self.drop = nn.Dropout(0.2)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, image: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.norm(self.conv(image))), 2)
        return self.fc(self.drop(hidden.flatten(1)))


class Classifier(nn.Module):
    """Logits, probabilities, the best class, whether it is sure, the first logit as a byte."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = Mlp(seed)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {
            "logits": logits,
            "probabilities": logits.softmax(-1),
            "label": logits.argmax(-1),
            "sure": logits.amax(-1) > 0.2,
            "level": (logits[:, 0].clamp(-1, 1) * 100 + 128).round().to(torch.uint8),
        }


class TwoHeads(nn.Module):
    """Two outputs of one shape, by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"left": self.left(x), "right": self.right(x)}


class Encoder(nn.Module):
    """Token ids and a mask to one vector: attention, residual, layer norm, mean over what is not masked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def attention(self, hidden: Tensor, mask: Tensor, scale: float = 8**-0.5) -> Tensor:
        scores = self.query(hidden) @ self.key(hidden).transpose(1, 2) * scale
        weights = scores.masked_fill(mask[:, None, :] == 0, -1e9).softmax(-1)
        return weights @ self.value(hidden)

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        weight = mask.to(hidden.dtype)[:, :, None]
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.table(ids)
        return self.pool(self.norm(hidden + self.attention(hidden, mask)), mask)


class DeepLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.LSTM(6, 8, num_layers=4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class DeepMlp(nn.Module):
    """Forty residual layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Branchy(nn.Module):
    """Another path for large inputs, which no sample takes."""

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.abs().mean() < 10):
            return 2 * x
        return x - 10


class Resize(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return F.interpolate(image, size=(4, 5), mode="bicubic", align_corners=False, antialias=True)


class Detections(nn.Module):
    """As many rows as have a high score, possibly none."""

    def forward(self, boxes: Tensor) -> Tensor:
        return boxes[boxes[:, 4] > 0.5]


class Share(nn.Module):
    """x over its sum: 0/0, which is NaN, for a row of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True)


class Scaled(nn.Module):
    """Mlp times a constant: outputs near zero, or large."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.body, self.factor = Mlp(), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.factor


class TinyProbabilities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * 60).softmax(-1)


class Clamped(nn.Module):
    """Clamps what no sample reaches."""

    def forward(self, x: Tensor) -> Tensor:
        return (3 * x).clamp(-30, 30)


class NearTie(nn.Module):
    """Two classes whose scores differ by a rounding error, and the best class."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = torch.stack([x[:, 0], x[:, 0] * (1 + 1.2e-7), x[:, 0] - 1], dim=-1)
        return {"scores": scores, "label": scores.argmax(-1)}


class Argmax(nn.Module):
    """The best of many, ranked in the input: rows of zeros and ones tie."""

    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


class Zeros(nn.Module):
    """An output that is zero for every sample."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x - 1e6)


class Doubles(nn.Module):
    """float64 in, float64 out: the sum of large and small numbers, which float32 does not hold."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1e6) - 1e6


class SequenceFirst(nn.Module):
    """x (time, batch, 4): cumulative over time."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


# --------------------------------------------------------------------------- models that check themselves, ill and well


class DropoutAlways(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


class DropoutByMode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=self.training)


class Counting(nn.Module):
    """Answers by the number of calls before."""

    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls if self.used else x + 1


class Remembering(nn.Module):
    """Adds what it saw in the call before, kept in a plain attribute."""

    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.last = torch.zeros(())
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        seen = x.abs().max()
        answer = x + torch.maximum(self.last, seen) if self.used else x + 1
        self.last = torch.maximum(self.last, seen)
        return answer


class BackToTraining(nn.Module):
    """Sets its own mode at the end of forward, for the next call."""

    def __init__(self, *, mode: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.mode = nn.Dropout1d(0.5), mode

    def forward(self, x: Tensor) -> Tensor:
        answer = self.drop(x)
        self.train(self.mode)
        return answer


class AnotherEachTime(nn.Module):
    """Weights that no checkpoint holds."""

    def __init__(self, *, seeded: bool) -> None:
        super().__init__()
        if seeded:
            torch.manual_seed(0)
        else:
            torch.seed()
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


# ------------------------------------------------------------------------------------------------------------ the table

_BATCH = {"batch": Dim(1, 4, 9)}
_RNG = np.random.default_rng(0)
_X = {"x": _RNG.normal(size=(5, 12)).astype(np.float32)}
_POSITIVE = {"x": np.abs(_X["x"]) + np.float32(0.1)}
_IMAGES = {"image": _RNG.random((4, 1, 8, 8)).astype(np.float32)}
_TOKENS = {
    "ids": _RNG.integers(1, 19, (4, 6)),
    "mask": np.array([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0], [1] * 2 + [0] * 4]),
}
_ONE_HOT = {"x": np.eye(5, 12, dtype=np.float32)}
_ONE_HOT["x"][1, 7] = 1.0


def _spec(name: str, *inputs: TensorSpec, **dims: Dim) -> ModelSpec:
    return ModelSpec(name, inputs, dims=_BATCH | dims, batch="batch")


_FLAT = _spec("flat", TensorSpec("x", "float32", ("batch", 12)))
_IMAGE = _spec("image", TensorSpec("image", "float32", ("batch", 1, 8, 8)))
_TEXT = _spec(
    "text",
    TensorSpec("ids", "int64", ("batch", "length")),
    TensorSpec("mask", "int64", ("batch", "length")),
    length=Dim(1, 5, 8),
)
_TIME = _spec("time", TensorSpec("x", "float32", ("batch", "time", 6)), time=Dim(1, 5, 8))
_FRAMES = {"x": _RNG.normal(size=(4, 7, 6)).astype(np.float32)}
_BOXES = ModelSpec("boxes", (TensorSpec("boxes", "float32", ("rows", 5)),), dims={"rows": Dim(1, 4, 9)})
_FOUND = {"boxes": np.array([[1, 2, 3, 4, 0.9], [5, 6, 7, 8, 0.1], [9, 8, 7, 6, 0.8]], np.float32)}
_DOUBLE = _spec("double", TensorSpec("x", "float64", ("batch", 12)))
_FIRST = _spec("first", TensorSpec("x", "float32", (5, "batch", 4)))

#: name → (class, arguments, spec, samples)
MODELS: dict[str, tuple[type[nn.Module], Mapping[str, Any], ModelSpec, Mapping[str, Array]]] = {
    "mlp": (Mlp, {}, _FLAT, _X),
    "mlp on positives": (Mlp, {}, _FLAT, _POSITIVE),
    "convnet": (Convnet, {}, _IMAGE, _IMAGES),
    "classifier": (Classifier, {}, _FLAT, _X),
    "two heads": (TwoHeads, {}, _FLAT, _X),
    "encoder": (Encoder, {}, _TEXT, _TOKENS),
    "deep lstm": (DeepLstm, {}, _TIME, _FRAMES),
    "deep mlp": (DeepMlp, {}, _FLAT, _X),
    "branchy": (Branchy, {}, _FLAT, _X),
    "resize": (Resize, {}, _IMAGE, _IMAGES),
    "detections": (Detections, {}, _BOXES, _FOUND),
    "share": (Share, {}, _FLAT, _POSITIVE),
    "near zero": (Scaled, {"factor": 1e-7}, _FLAT, _X),
    "large": (Scaled, {"factor": 1e8}, _FLAT, _X),
    "tiny probabilities": (TinyProbabilities, {}, _FLAT, _X),
    "clamped": (Clamped, {}, _FLAT, _X),
    "near tie": (NearTie, {}, _FLAT, _X),
    "argmax": (Argmax, {}, _FLAT, _ONE_HOT),
    "zeros": (Zeros, {}, _FLAT, _X),
    "doubles": (Doubles, {}, _DOUBLE, {"x": _X["x"].astype(np.float64)}),
    "sequence first": (SequenceFirst, {}, _FIRST, {"x": _RNG.normal(size=(5, 3, 4)).astype(np.float32)}),
    "dropout always": (DropoutAlways, {}, _FLAT, _X),
    "dropout by mode": (DropoutByMode, {}, _FLAT, _X),
    "counter in the answer": (Counting, {"used": True}, _FLAT, _X),
    "counter beside it": (Counting, {"used": False}, _FLAT, _X),
    "memory in the answer": (Remembering, {"used": True}, _FLAT, _X),
    "memory beside it": (Remembering, {"used": False}, _FLAT, _X),
    "train() in forward": (BackToTraining, {"mode": True}, _FLAT, _X),
    "eval() in forward": (BackToTraining, {"mode": False}, _FLAT, _X),
    "unseeded factory": (AnotherEachTime, {"seeded": False}, _FLAT, _X),
    "seeded factory": (AnotherEachTime, {"seeded": True}, _FLAT, _X),
}


@cache
def checkpoint_of(name: str) -> Checkpoint:
    kind, args, spec, samples = MODELS[name]
    return load_checkpoint(model=f"{__file__}:{kind.__name__}", args=dict(args), spec=spec, samples=dict(samples))


@cache
def reference_of(name: str) -> Reference:
    return make_reference(checkpoint_of(name))
