"""Fifty-odd ways to be wrong, each beside a healthy twin that looks much like it.

A row is (what, how it is broken, what the twin does instead, the twin). `test_faults.py` runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deployer.runtime import Runner
from deployer.spec import Array
from tests.faults import attempts as put
from tests.faults.attempts import Attempt, Unchecked
from tests.faults.models import Classifier, Convnet, Encoder, Mlp


class Row(NamedTuple):
    fault: str
    broken: Attempt
    twin: str
    healthy: Attempt


def half(array: Array) -> Array:
    with np.errstate(over="ignore"):
        return array.astype(np.float16).astype(array.dtype)


def through_float(array: Array) -> Array:
    """The model `doubles`, computed in float32."""
    million = np.float32(1e6)
    return ((array.astype(np.float32) + million) - million).astype(np.float64)


def rms(array: Array) -> np.float32:
    return np.float32(np.sqrt(np.mean(array.astype(np.float64) ** 2)))


def softmax(array: Array, axis: int) -> Array:
    powers = np.exp(array.astype(np.float64) - array.max(axis, keepdims=True))
    return (powers / powers.sum(axis, keepdims=True)).astype(array.dtype)


def at(array: Array, place: int, value: float) -> Array:
    """`array` with one element of its last row changed."""
    changed = array.copy()
    if len(changed) > 1:
        changed[-1, place] = value
    return changed


def flipped(weight: Tensor, bit: int) -> None:
    """One bit of the largest weight."""
    flat = weight.data.view(-1)
    place = int(flat.abs().argmax())
    bits = flat[place : place + 1].view(torch.int32)
    bits.bitwise_xor_(1 << bit)


def load_other(kind: type[nn.Module], seed: int) -> Any:
    def alter(model: nn.Module) -> None:
        torch.manual_seed(seed)
        model.load_state_dict(kind(seed=seed).state_dict())

    return alter


class FusedConvnet(nn.Module):
    """The batch norm folded into the convolution, as exporters do it."""

    def __init__(self, model: Convnet) -> None:
        super().__init__()
        self.conv, self.fc = torch.nn.utils.fuse_conv_bn_eval(model.conv, model.norm), model.fc

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(F.max_pool2d(F.relu(self.conv(image)), 2).flatten(1))


class OtherEncoder(nn.Module):
    """Encoder with one part replaced."""

    def __init__(self, model: Encoder, **parts: Any) -> None:
        super().__init__()
        self.model, self.parts = model, parts

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        model, parts = self.model, self.parts
        hidden = model.table(ids)
        attend = parts.get("attention", model.attention)
        mixed = attend(hidden, mask)
        hidden = mixed if parts.get("no_residual") else mixed + hidden
        return parts.get("pool", model.pool)(parts.get("norm", model.norm)(hidden), mask)


def fused_attention(model: Encoder) -> nn.Module:
    def attention(hidden: Tensor, mask: Tensor) -> Tensor:
        allowed = torch.where(mask[:, None, :] == 0, -1e9, 0.0)
        return F.scaled_dot_product_attention(model.query(hidden), model.key(hidden), model.value(hidden), allowed)

    return OtherEncoder(model, attention=attention)


def norm_by_hand(model: Encoder, eps: float) -> nn.Module:
    def norm(hidden: Tensor) -> Tensor:
        centred = hidden - hidden.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred * torch.rsqrt(variance + eps) * model.norm.weight + model.norm.bias

    return OtherEncoder(model, norm=norm)


def pool_by_loop(model: Encoder, *, of_nothing: bool) -> nn.Module:
    """Mean over what is not masked; of a wholly masked row zero, or (wrongly) the mean of everything."""

    def pool(hidden: Tensor, mask: Tensor) -> Tensor:
        rows = []
        for row, keep in zip(hidden, mask, strict=True):
            kept = row[keep == 1]
            rows.append(kept.mean(0) if len(kept) else (row.mean(0) if of_nothing else torch.zeros(row.shape[-1])))
        return torch.stack(rows)

    return OtherEncoder(model, pool=pool)


class Recurrent(nn.Module):
    """DeepLstm step by step, the gates in this order."""

    def __init__(self, model: Any, gates: str) -> None:
        super().__init__()
        self.rnn, self.gates = model.rnn, gates

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(self.rnn.num_layers):
            weights = [
                getattr(self.rnn, f"{kind}_l{layer}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            hidden = cell = torch.zeros(len(x), self.rnn.hidden_size)
            steps = []
            for step in x.unbind(1):
                mixed = F.linear(step, weights[0], weights[2]) + F.linear(hidden, weights[1], weights[3])
                parts = dict(zip(self.gates, mixed.chunk(4, -1), strict=True))
                cell = parts["f"].sigmoid() * cell + parts["i"].sigmoid() * parts["g"].tanh()
                hidden = parts["o"].sigmoid() * cell.tanh()
                steps.append(hidden)
            x = torch.stack(steps, 1)
        return x


def quantized(model: nn.Module) -> None:
    """Every weight rounded to 127 steps, as a careless int8 would."""
    for weight in model.parameters():
        step = weight.abs().max() / 127
        weight.copy_((weight / step).round() * step)


def rounded_to_half(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.copy_(weight.half().float())


class InHalf(nn.Module):
    """The model in torch's own half precision, answered in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.half()).float()


def one_layer_off(share: float) -> Any:
    def alter(model: Any) -> nn.Module:
        model.layers[3].weight.mul_(1 + share)
        return InHalf(model)

    return alter


def zero_deep_layer(model: Any) -> nn.Module:
    """Its weights scaled below the smallest number of half precision and back."""
    weight = model.layers[3].weight
    weight.copy_((weight * 1e-7).half().float() * 1e7)
    return model  # type: ignore[no-any-return]


class InDouble(nn.Module):
    """The model computed in float64, answered in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.double()).float()


def transpose_square(model: Mlp) -> None:
    model.square.weight.copy_(model.square.weight.T.clone())


class TransposedTwice(nn.Module):
    """The weight stored transposed and used transposed."""

    def __init__(self, model: Mlp) -> None:
        super().__init__()
        self.model, self.stored = model, model.square.weight.T.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        model = self.model
        return model.last(F.relu(F.relu(model.first(x)) @ self.stored + model.square.bias))


class GeluNet(nn.Module):
    """Not the model of the table but its ReLU by another formula."""

    def __init__(self, model: Mlp, activation: Any) -> None:
        super().__init__()
        self.model, self.activation = model, activation

    def forward(self, x: Tensor) -> Tensor:
        model = self.model
        return model.last(self.activation(model.square(self.activation(model.first(x)))))


class Stateful:
    """Adds a little more at each call."""

    def __init__(self, step: float) -> None:
        self.step, self.calls = step, 0

    def __call__(self, array: Array) -> Array:
        self.calls += 1
        return array + np.float32(self.step * self.calls) * rms(array)


def to_external_data(folder: Path) -> None:
    import onnx

    loaded = onnx.load(folder / "model.onnx")
    onnx.save(loaded, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)


def truncate_external_data(folder: Path) -> None:
    to_external_data(folder)
    data = (folder / "model.onnx.data").read_bytes()
    (folder / "model.onnx.data").write_bytes(data[: len(data) // 2])


def change_initializer(share: float) -> Any:
    """One weight of an ONNX file times 1 + share."""

    def spoil(folder: Path) -> None:
        import onnx
        from onnx import numpy_helper

        loaded = onnx.load(folder / "model.onnx")
        tensor = max(loaded.graph.initializer, key=lambda entry: numpy_helper.to_array(entry).size)
        array = numpy_helper.to_array(tensor).copy()
        place = np.unravel_index(np.abs(array).argmax(), array.shape)
        array[place] *= 1 + share
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        onnx.save(loaded, folder / "model.onnx")

    return spoil


def zero_layer(model: Mlp) -> None:
    model.square.weight.zero_()


def stale_statistics(model: Convnet) -> None:
    model.norm.running_mean.zero_()


def refilled_statistics(model: Convnet) -> None:
    model.norm.running_mean.copy_(model.norm.running_mean.clone())
    model.norm.num_batches_tracked.add_(7)  # nothing depends on it in eval mode


VALUES = [
    Row(
        "scale 1.001", put.output("mlp", lambda y: y * np.float32(1.001)),
        "scale 1 + 1e-6", put.output("mlp", lambda y: y * np.float32(1 + 1e-6)),
    ),
    Row(
        "bias off by a visible step", put.output("mlp", lambda y: y + np.float32(4e-4) * rms(y)),
        "bias off by one ulp", put.output("mlp", lambda y: np.nextafter(y, np.float32(np.inf))),
    ),
    Row(
        "outputs swapped", put.answers("two heads", lambda y, _: {"left": y["right"], "right": y["left"]}),
        "outputs in another order", put.answers("two heads", lambda y, _: dict(reversed(y.items()))),
    ),
    Row(
        "an output missing", put.answers("two heads", lambda y, _: {"left": y["left"]}),
        "outputs as views", put.answers("two heads", lambda y, _: {name: array[:] for name, array in y.items()}),
    ),
    Row(
        "frozen batch", put.output("mlp", lambda y: np.resize(y, (4, 10))),
        "any batch", put.artifact("mlp", "torchscript"),
    ),
    Row(
        "softmax over the wrong axis",
        put.answers("classifier", lambda y, _: y | {"probabilities": softmax(y["logits"], 0)}),
        "softmax in float64", put.answers("classifier", lambda y, _: y | {"probabilities": softmax(y["logits"], 1)}),
    ),
    Row(
        "softmax not applied", put.answers("classifier", lambda y, _: y | {"probabilities": y["logits"]}),
        "softmax of shifted logits",
        put.answers("classifier", lambda y, _: y | {"probabilities": softmax(y["logits"] + np.float32(5), 1)}),
    ),
    Row(
        "argmax over the wrong dimension",
        put.answers("classifier", lambda y, _: y | {"label": np.resize(y["logits"].argmax(0), len(y["label"]))}),
        "argmax by sorting",
        put.answers("classifier", lambda y, _: y | {"label": (-y["logits"]).argsort(1, kind="stable")[:, 0]}),
    ),
    Row(
        "class index off by one", put.answers("classifier", lambda y, _: y | {"label": y["label"] + 1}),
        "logits off by rounding",
        put.answers("classifier", lambda y, _: y | {"logits": y["logits"] * np.float32(1 + 2e-7)}),
    ),
    Row(
        "index that is no tie", put.output("argmax", lambda y: np.where(y == 0, 7, y)),
        "index of an equal score",
        put.answers("argmax", lambda y, x: 11 - x["x"][:, ::-1].argmax(1)),
    ),
    Row(
        "near tie decided against its own scores",
        put.answers("near tie", lambda y, _: y | {"label": np.full_like(y["label"], 2)}),
        "near tie decided the other way",
        put.answers("near tie", lambda y, x: {
            "scores": y["scores"][:, [0, 0, 2]], "label": np.zeros_like(y["label"]),
        }),
    ),
    Row(
        "bool inverted", put.answers("classifier", lambda y, _: y | {"sure": ~y["sure"]}),
        "bool recomputed", put.answers("classifier", lambda y, _: y | {"sure": y["logits"].max(1) > np.float32(0.2)}),
    ),
    Row(
        "bytes truncated, not rounded",
        put.answers("classifier", lambda y, _: y | {
            "level": (y["logits"][:, 0].clip(-1, 1) * 100 + 128).astype(np.uint8),
        }),
        "bytes rounded",
        put.answers("classifier", lambda y, _: y | {
            "level": (y["logits"][:, 0].clip(-1, 1) * np.float32(100) + np.float32(128)).round().astype(np.uint8),
        }),
    ),
    Row(
        "NaN at one row", put.output("mlp", lambda y: at(y, 3, np.nan)),
        "NaN where eager has it", put.output("share", lambda y: y.copy()),
    ),
    Row(
        "NaN answered as zero", put.output("share", lambda y: np.nan_to_num(y)),
        "NaN of another sign bit", put.output("share", lambda y: np.where(np.isnan(y), -np.float32(np.nan), y)),
    ),
    Row(
        "infinity for a number", put.output("mlp", lambda y: at(y, 0, np.inf)),
        "minus zero for zero", put.output("zeros", lambda y: -y),
    ),
    Row(
        "zeros for an answer", put.output("mlp", np.zeros_like),
        "zeros that are the answer", put.output("zeros", np.zeros_like),
    ),
    Row(
        "dtype changed", put.output("mlp", lambda y: y.astype(np.float64)),
        "computed in float64, answered in float32", put.module("deep mlp", InDouble),
    ),
    Row(
        "output through half precision", put.output("mlp", half),
        "output through double precision", put.output("mlp", lambda y: y.astype(np.float64).astype(np.float32)),
    ),
    Row(
        "half precision overflows", put.output("large", half, "fp16"),
        "half precision within its range", put.output("mlp", half, "fp16"),
    ),
    Row(
        "half precision underflows to zero",
        put.output("near zero", lambda y: half(y * np.float32(1e-2)) * 100, "fp16"),
        "weights in half precision", put.module("mlp", rounded_to_half, "fp16"),
    ),
    Row(
        "fp16 off by a percent", put.output("mlp", lambda y: half(y) * np.float32(1.01), "fp16"),
        "fp16 off by 1e-3", put.output("mlp", lambda y: half(y) * np.float32(1 + 1e-3), "fp16"),
    ),
    Row(
        "half precision with one layer of many off by 2 %", put.module("deep mlp", one_layer_off(0.02), "fp16"),
        "half precision through many layers", put.module("deep mlp", InHalf, "fp16"),
    ),
    Row(
        "half precision flushed to zero in a layer of many",
        put.module("deep mlp", lambda m: InHalf(zero_deep_layer(m)), "fp16"),
        "half precision through a recurrent net", put.module("deep lstm", InHalf, "fp16"),
    ),
    Row(
        "double through float", put.output("doubles", through_float),
        "double by another order", put.answers("doubles", lambda y, x: (x["x"] - 1e6) + 1e6),
    ),
    Row(
        "outputs near zero off by their own size", put.output("near zero", lambda y: y + np.float32(1e-9)),
        "outputs near zero", put.output("near zero", lambda y: y * np.float32(1 + 1e-6)),
    ),
    Row(
        "large outputs off by 1e-3", put.output("large", lambda y: y * np.float32(0.999)),
        "large outputs", put.output("large", lambda y: y * np.float32(1 - 1e-6)),
    ),
    Row(
        "probabilities below 1e-3 dropped",
        put.output("tiny probabilities", lambda y: np.where(y < 1e-3, 0, y).astype(np.float32)),
        "probabilities below 1e-30 dropped",
        put.output("tiny probabilities", lambda y: np.where(y < 1e-30, 0, y).astype(np.float32)),
    ),
    Row(
        "state carried over", put.output("mlp", Stateful(3e-4)),
        "calls counted, not answered", put.output("mlp", Stateful(0.0)),
    ),
]  # fmt: skip

SHAPES = [
    Row(
        "batch of one squeezed", put.output("mlp", lambda y: y[0] if len(y) == 1 else y),
        "batch of one reshaped and back", put.output("mlp", lambda y: y.ravel().reshape(len(y), -1)),
    ),
    Row(
        "batch of one answered otherwise", put.output("mlp", lambda y: -y if len(y) == 1 else y),
        "rows computed one by one", put.output("mlp", lambda y: np.concatenate([y[i : i + 1] for i in range(len(y))])),
    ),
    Row(
        "wrong axis transposed", put.output("resize", lambda y: np.ascontiguousarray(y.swapaxes(2, 3))),
        "transposed and back", put.output("resize", lambda y: np.ascontiguousarray(y.swapaxes(2, 3)).swapaxes(2, 3)),
    ),
    Row(
        "rows in reverse", put.output("mlp", lambda y: y[::-1]),
        "rows at negative strides", put.output("mlp", lambda y: y[::-1].copy()[::-1]),
    ),
    Row(
        "rows at the end repeat the first",
        put.output("mlp", lambda y: y[np.minimum(np.arange(len(y)), 7)]),
        "every row its own", put.output("mlp", lambda y: y[np.arange(len(y))]),
    ),
    Row(
        "batch on the wrong axis", put.answers("sequence first", lambda y, x: x["x"].cumsum(1)),
        "batch on axis one", put.artifact("sequence first", "exported"),
    ),
    Row(
        "detections cut at two", put.output("detections", lambda y: y[:2]),
        "detections, none included", put.artifact("detections", "onnx"),
    ),
    Row(
        "last step of a sequence dropped", put.output("deep lstm", lambda y: np.concatenate([y[:, :1], y[:, :-1]], 1)),
        "sequences of every length", put.artifact("deep lstm", "torchscript"),
    ),
    Row(
        "sizes and dtypes unchecked", put.behind(Unchecked, "mlp"),
        "sizes and dtypes refused", put.behind(Runner, "mlp"),
    ),
    Row(
        "ids beyond the table unchecked", put.behind(Unchecked, "encoder"),
        "ids beyond the table refused", put.behind(Runner, "encoder"),
    ),
]  # fmt: skip

INPUTS = [
    Row(
        "ids off by one", put.inputs("encoder", lambda x: x | {"ids": np.minimum(x["ids"] + 1, 19)}),
        "ids through int32", put.inputs("encoder", lambda x: x | {"ids": x["ids"].astype(np.int32).astype(np.int64)}),
    ),
    Row(
        "mask ignored", put.inputs("encoder", lambda x: x | {"mask": np.ones_like(x["mask"])}),
        "attention with masks", put.artifact("encoder", "onnx"),
    ),
    Row(
        "mask inverted", put.inputs("encoder", lambda x: x | {"mask": 1 - x["mask"]}),
        "attention with masks, traced", put.artifact("encoder", "torchscript"),
    ),
    Row(
        "wholly masked row answered by a mean", put.module("encoder", lambda m: pool_by_loop(m, of_nothing=True)),
        "wholly masked row answered by zero", put.module("encoder", lambda m: pool_by_loop(m, of_nothing=False)),
    ),
    Row(
        "absolute value of inputs, the samples being positive",
        put.inputs("mlp on positives", lambda x: {"x": np.abs(x["x"])}),
        "positive samples", put.artifact("mlp on positives", "exported"),
    ),
    Row(
        "large inputs clipped", put.inputs("mlp", lambda x: {"x": x["x"].clip(-100, 100)}),
        "inputs copied", put.inputs("mlp", lambda x: {"x": x["x"].copy()}),
    ),
    Row(
        "clamp lost", put.answers("clamped", lambda y, x: 3 * x["x"]),
        "clamp by min and max",
        put.answers("clamped", lambda y, x: np.minimum(np.maximum(3 * x["x"], np.float32(-30)), np.float32(30))),
    ),
    Row(
        "small inputs flushed to zero",
        put.inputs("clamped", lambda x: {"x": np.where(np.abs(x["x"]) < 1e-4, 0, x["x"])}),
        "denormals flushed to zero",
        put.inputs("clamped", lambda x: {"x": np.where(np.abs(x["x"]) < 1e-38, 0, x["x"])}),
    ),
    Row(
        "branch lost by tracing", put.traced("branchy"),
        "branch kept by scripting", put.exported("branchy", "torchscript"),
    ),
]  # fmt: skip

WEIGHTS = [
    Row(
        "batch norm in train mode", put.module("convnet", lambda m: m.train()),
        "batch norm folded into the convolution", put.module("convnet", FusedConvnet),
    ),
    Row(
        "dropout left on", put.module("convnet", lambda m: m.drop.train() and None),
        "dropout left on at probability 0", put.module("convnet", lambda m: setattr(m.drop.train(), "p", 0.0)),
    ),
    Row(
        "one flipped bit of the exponent", put.module("mlp", lambda m: flipped(m.square.weight, 23)),
        "one flipped last bit of the mantissa", put.module("mlp", lambda m: flipped(m.square.weight, 0)),
    ),
    Row(
        "one flipped sign", put.module("convnet", lambda m: flipped(m.conv.weight, 31)),
        "weights copied", put.module("convnet", lambda m: m.load_state_dict(m.state_dict()) and None),
    ),
    Row(
        "stale buffer", put.module("convnet", stale_statistics),
        "buffer nobody reads changed", put.module("convnet", refilled_statistics),
    ),
    Row(
        "other model's weights under the same spec", put.module("mlp", load_other(Mlp, 1)),
        "the same weights built again", put.module("mlp", load_other(Mlp, 0)),
    ),
    Row(
        "other model's weights, of many outputs", put.artifact("classifier", "exported", load_other(Classifier, 3)),
        "many outputs of many dtypes", put.artifact("classifier", "exported"),
    ),
    Row(
        "a layer of zeros", put.module("mlp", zero_layer),
        "a layer multiplied out", put.module("mlp", lambda m: m.square.weight.mul_(2).div_(2) is None or None),
    ),
    Row(
        "transposed weight", put.module("mlp", transpose_square),
        "weight stored transposed, used so", put.module("mlp", TransposedTwice),
    ),
    Row(
        "many layers with weights of 8 bits", put.module("deep mlp", quantized),
        "many layers", put.artifact("deep mlp", "onnx"),
    ),
    Row(
        "missing residual", put.module("encoder", lambda m: OtherEncoder(m, no_residual=True)),
        "residual in the other order", put.module("encoder", OtherEncoder),
    ),
    Row(
        "wrong eps", put.module("encoder", lambda m: norm_by_hand(m, 1e-3)),
        "layer norm by hand", put.module("encoder", lambda m: norm_by_hand(m, 1e-5)),
    ),
    Row(
        "attention unscaled",
        put.module("encoder", lambda m: OtherEncoder(m, attention=lambda h, mask: m.attention(h, mask, 1.0))),
        "fused attention", put.module("encoder", fused_attention),
    ),
    Row(
        "gates of a recurrent net in another order", put.module("deep lstm", lambda m: Recurrent(m, "igfo")),
        "recurrent net step by step", put.module("deep lstm", lambda m: Recurrent(m, "ifgo")),
    ),
    Row(
        "ReLU replaced by a smooth one", put.module("mlp", lambda m: GeluNet(m, lambda x: F.softplus(x, beta=50))),
        "ReLU as a maximum", put.module("mlp", lambda m: GeluNet(m, lambda x: torch.maximum(x, torch.zeros(())))),
    ),
    Row(
        "resize without anti-aliasing",
        put.answers("resize", lambda y, x: F.interpolate(
            torch.tensor(x["image"]), size=(4, 5), mode="bicubic", antialias=False).numpy()),
        "anti-aliased resize", put.artifact("resize", "onnx"),
    ),
]  # fmt: skip

FILES = [
    Row(
        "external data truncated", put.artifact("mlp", "onnx", spoil=truncate_external_data),
        "external data whole", put.artifact("mlp", "onnx", spoil=to_external_data),
    ),
    Row(
        "one weight of the file changed", put.artifact("mlp", "onnx", spoil=change_initializer(0.05)),
        "one weight of the file off by an ulp", put.artifact("mlp", "onnx", spoil=change_initializer(1.2e-7)),
    ),
]  # fmt: skip

MODELS = [
    Row(
        "dropout that ignores eval()", put.reference("dropout always"),
        "dropout that heeds it", put.reference("dropout by mode"),
    ),
    Row(
        "a counter in the answer", put.reference("counter in the answer"),
        "a counter beside it", put.reference("counter beside it"),
    ),
    Row(
        "the largest input so far in the answer", put.reference("memory in the answer"),
        "the largest input so far beside it", put.reference("memory beside it"),
    ),
    Row(
        "train() in forward", put.reference("train() in forward"),
        "eval() in forward", put.reference("eval() in forward"),
    ),
    Row(
        "weights drawn anew each time", put.reference("unseeded factory"),
        "weights drawn from a seed", put.reference("seeded factory"),
    ),
]  # fmt: skip

ROWS = [*VALUES, *SHAPES, *INPUTS, *WEIGHTS, *FILES, *MODELS]
