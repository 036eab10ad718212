"""Layers written by hand: recurrent ones, norms, attention in several spellings, convolutions of every rank."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.entry import floats, ids, integers, model, right_padded


class Recurrent(nn.Module):
    """x (batch, sequence, 5) → last state of a bidirectional or stacked recurrent layer, and all its steps."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps, state = self.layer(x)
        last = state[0] if isinstance(state, tuple) else state
        return steps, last.transpose(0, 1)


@model("lstm", "layer", floats("x", "batch", "sequence", 5))
def lstm() -> nn.Module:
    return Recurrent(nn.LSTM(5, 8, num_layers=2, bidirectional=True, batch_first=True))


@model("gru", "layer", floats("x", "batch", "sequence", 5))
def gru() -> nn.Module:
    return Recurrent(nn.GRU(5, 8, num_layers=2, batch_first=True))


class TransformerStack(nn.Module):
    """nn.TransformerEncoder with its padding mask, which in eval mode takes a fast path of its own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.embed = nn.Embedding(64, 16)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(tokens), src_key_padding_mask=~mask)
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


@model("transformer_padding_mask", "layer", ids("tokens", "batch", "sequence"), right_padded("mask", "bool"))
def transformer_padding_mask() -> nn.Module:
    return TransformerStack()


class CausalTransformer(nn.Module):
    """nn.TransformerEncoder with a causal mask made in forward from the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embed(tokens), mask=causal, is_causal=True))


@model("transformer_causal", "layer", ids("tokens", "batch", "sequence"))
def transformer_causal() -> nn.Module:
    return CausalTransformer()


class Seq2Seq(nn.Module):
    """nn.Transformer, encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 1, 1, 24, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.transformer(source, target)


@model("transformer_seq2seq", "layer", floats("source", "batch", "sequence", 16), floats("target", "batch", "rows", 16))
def transformer_seq2seq() -> nn.Module:
    return Seq2Seq()


class SelfAttention(nn.Module):
    """nn.MultiheadAttention that also returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        attended, weights = self.attention(x, x, x, need_weights=True)
        return {"weights": weights, "attended": attended}


@model("multihead_attention", "layer", floats("x", "batch", "sequence", 16))
def multihead_attention() -> nn.Module:
    return SelfAttention()


class SdpaMasked(nn.Module):
    """scaled_dot_product_attention with a bool mask in which some rows may attend to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        allowed = mask[:, None, None, :] & causal
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed).transpose(1, 2).flatten(2)


@model("sdpa_masked", "layer", floats("x", "batch", "sequence", 16), right_padded("mask", "bool"))
def sdpa_masked() -> nn.Module:
    return SdpaMasked()


class SdpaGrouped(nn.Module):
    """Grouped-query causal attention: 4 heads of queries share 2 of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        key, value = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.key, self.value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


@model("sdpa_grouped", "layer", floats("x", "batch", "sequence", 16))
def sdpa_grouped() -> nn.Module:
    return SdpaGrouped()


class EinsumAttention(nn.Module):
    """Attention spelt with einsum, with a learnt relative position bias gathered by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, 36)
        self.bias = nn.Embedding(31, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).reshape(*x.shape[:2], 3, 3, 4).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(4)
        position = torch.arange(x.shape[1])
        distance = (position[None, :] - position[:, None]).clamp(-15, 15) + 15
        weights = (scores + self.bias(distance).permute(2, 0, 1)).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)


@model("einsum_attention", "layer", floats("x", "batch", "sequence", 12))
def einsum_attention() -> nn.Module:
    return EinsumAttention()


class RmsRotary(nn.Module):
    """RMS norm, rotary positions, SwiGLU: a block in the style of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(16), nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    @staticmethod
    def rotate(x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2])[:, None] * 10000 ** (-torch.arange(0, 8, 2) / 8)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack(
            (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()), -1
        ).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(self.rotate(query), self.rotate(key), value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@model("rms_rotary_swiglu", "layer", floats("x", "batch", "sequence", 16))
def rms_rotary_swiglu() -> nn.Module:
    return RmsRotary()


class Norms(nn.Module):
    """Group, instance, layer and batch norm, one after the other, and local response norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True), nn.BatchNorm2d(6), nn.LocalResponseNorm(3)
        )
        self.norm = nn.LayerNorm([6, 5, 4])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layers(x))


@model("norms", "layer", floats("x", "batch", 6, 5, 4))
def norms() -> nn.Module:
    return Norms()


@model("conv1d_dilated", "layer", floats("input", "batch", 4, "samples"))
def conv1d_dilated() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 8, 5, stride=4, padding=2), nn.GELU(), nn.Conv1d(8, 8, 3, dilation=2, padding=2), nn.ELU(),
        nn.AvgPool1d(2), nn.ConvTranspose1d(8, 4, 4, stride=4),
    )  # fmt: skip


@model("conv3d", "layer", floats("input", "batch", 2, 6, 8, 8))
def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.LeakyReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 4, 3),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


@model("conv_transposed", "layer", floats("input", "batch", 4, 5, 5))
def conv_transposed() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), nn.PReLU(6),
        nn.ConvTranspose2d(6, 2, 4, stride=2, groups=2), nn.Hardtanh(),
    )  # fmt: skip


class Pools(nn.Module):
    """Max (with indices, unpooled), average, adaptive and Lp pooling."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pooled, where = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(pooled, where, 2), F.adaptive_avg_pool2d(x, (3, 2)), F.avg_pool2d(x, 3, 2, ceil_mode=True)


@model("pools", "layer", floats("x", "batch", 3, 8, 6))
def pools() -> nn.Module:
    return Pools()


@model("activations", "layer", floats("input", "batch", 12))
def activations() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 12), nn.Hardswish(), nn.Linear(12, 12), nn.Mish(), nn.Linear(12, 12), nn.SELU(),
        nn.Linear(12, 12), nn.Softplus(), nn.CELU(), nn.GLU(), nn.Softsign(), nn.Tanhshrink(), nn.LogSoftmax(-1),
    )  # fmt: skip


class Bag(nn.Module):
    """EmbeddingBag over fixed-size bags, mean and max, with one table shared by two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(20, 6, mode="mean")
        self.largest = nn.EmbeddingBag(20, 6, mode="max")

    def forward(self, words: Tensor) -> Tensor:
        return torch.cat((self.mean(words), self.largest(words)), 1)


@model("embedding_bag", "layer", integers("words", "batch", 5, high=20))
def embedding_bag() -> nn.Module:
    return Bag()
