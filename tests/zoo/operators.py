"""Operators that exporters stumble over, each in a small model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.entry import floats, image, integers, model, unit


class Spectrum(nn.Module):
    """Real FFT and back, filtered in between; the power is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(17))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(x, dim=-1)
        return torch.fft.irfft(spectrum * self.filter, n=32, dim=-1), spectrum.abs().square()


@model("fft", "operator", floats("x", "batch", 32))
def fft() -> nn.Module:
    return Spectrum()


class Stft(nn.Module):
    """Log-mel-like features of a waveform through torch.stft."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.register_buffer("bank", torch.rand(33, 8))

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = torch.stft(wave, 64, 32, window=self.window, return_complex=True)
        return (spectrum.abs().square().transpose(1, 2) @ self.bank + 1e-6).log()


@model("stft", "operator", floats("wave", "batch", "samples"))
def stft() -> nn.Module:
    return Stft()


class Warp(nn.Module):
    """Spatial transformer: affine_grid from a predicted matrix, then grid_sample."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Linear(48, 6)
        nn.init.normal_(self.locate.weight, std=0.05)
        self.locate.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])

    def forward(self, picture: Tensor) -> Tensor:
        matrix = self.locate(F.adaptive_avg_pool2d(picture, 4).flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(matrix, list(picture.shape), align_corners=False)
        return F.grid_sample(picture, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


@model("grid_sample", "operator", image("batch", 3, 16, 16, name="picture"))
def grid_sample() -> nn.Module:
    return Warp()


class DeformableGather(nn.Module):
    """Bilinear reads at learnt offsets, spelt with floor, clamp and gather, as deformable convolutions do."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, picture: Tensor) -> Tensor:
        batch, channels, height, width = picture.shape
        offset = self.offset(picture)
        y = (torch.arange(height)[:, None] + offset[:, 0]).clamp(0, height - 1)
        x = (torch.arange(width)[None, :] + offset[:, 1]).clamp(0, width - 1)
        flat = picture.flatten(2)
        out = torch.zeros_like(picture)
        for dy in (0, 1):
            for dx in (0, 1):
                row, column = (y.floor() + dy).clamp(max=height - 1), (x.floor() + dx).clamp(max=width - 1)
                weight = (1 - (y - y.floor() - dy).abs()) * (1 - (x - x.floor() - dx).abs())
                index = (row * width + column).long().view(batch, 1, -1).expand(-1, channels, -1)
                out = out + flat.gather(2, index).view_as(picture) * weight[:, None]
        return out


@model("deformable_gather", "operator", image("batch", 3, 12, 10, name="picture"))
def deformable_gather() -> nn.Module:
    return DeformableGather()


class InPlace(nn.Module):
    """Slices, masks and index_put written in place, on a copy and on the input itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 1:3] *= 2
        y[:, 0].add_(1).clamp_(min=0)
        y[y < -1] = -1
        x.mul_(0.5)
        y[:, -1] = x.sum(1)
        return y.sub_(x)


@model("in_place", "operator", floats("x", "batch", 6))
def in_place() -> nn.Module:
    return InPlace()


class Counting(nn.Module):
    """Keeps a number of calls in a buffer that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table.view(1, -1).expand_as(x)


@model("buffer_expand", "operator", floats("x", "batch", 4))
def buffer_expand() -> nn.Module:
    return Counting()


class Nested(nn.Module):
    """Nested dict and tuple outputs in an order that is not alphabetical."""

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"z": x + 1, "a": {"y": x * 2, "b": x.sum(1)}, "m": (x - 1, x > 0)}


@model("nested_outputs", "operator", floats("x", "batch", 3))
def nested_outputs() -> nn.Module:
    return Nested()


class Scans(nn.Module):
    """cumsum, cumprod, flip, roll, diff, cummax."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        largest, _ = x.cummax(1)
        return x.cumsum(1), (1 + x / 10).cumprod(1), x.flip(1).roll(1, dims=1).diff(dim=1, prepend=x[:, :1]), largest


@model("scans", "operator", floats("x", "batch", "sequence"))
def scans() -> nn.Module:
    return Scans()


class Orders(nn.Module):
    """sort, argsort, topk, argmax, median of an odd number."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        values, order = x.sort(dim=1, descending=True)
        top, where = x.topk(3, dim=1)
        return {"values": values, "order": order, "top": top, "where": where, "best": x.argmax(1), "least": x.argmin(1)}


@model("sort_topk", "operator", floats("x", "batch", 9))
def sort_topk() -> nn.Module:
    return Orders()


class Scatters(nn.Module):
    """scatter, scatter_add, scatter_reduce, index_select, take_along_dim, one_hot."""

    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        zeros = x.new_zeros(x.shape[0], 5)
        added = zeros.scatter_add(1, index, x)
        largest = zeros.scatter_reduce(1, index, x, reduce="amax", include_self=True)
        return added, largest, added.take_along_dim(index, 1), F.one_hot(index, 5).sum(1)


@model("scatter", "operator", floats("x", "batch", "sequence"), integers("index", "batch", "sequence", high=5))
def scatter() -> nn.Module:
    return Scatters()


class PadResize(nn.Module):
    """Constant, reflect, replicate and circular padding; nearest and anti-aliased bilinear resize."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        padded = F.pad(F.pad(x, (1, 2, 0, 1), value=0.5), (1, 1, 1, 1), mode="reflect")
        ring = F.pad(F.pad(x, (2, 1, 0, 0), mode="replicate"), (1, 2, 2, 1), mode="circular")
        return padded, ring, F.interpolate(x, scale_factor=1.5, mode="nearest")


@model("pad_resize", "operator", image("batch", 2, 8, 6, name="x"))
def pad_resize() -> nn.Module:
    return PadResize()


class AntiAliased(nn.Module):
    """Anti-aliased bilinear resize to a fixed size."""

    def forward(self, picture: Tensor) -> Tensor:
        return F.interpolate(picture, size=(8, 8), mode="bilinear", antialias=True, align_corners=False)


@model("antialiased_resize", "operator", image("batch", 3, 20, 24, name="picture"))
def antialiased_resize() -> nn.Module:
    return AntiAliased()


class Unfolded(nn.Module):
    """unfold, fold, pixel_unshuffle and as_strided-like windows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        patches = F.unfold(x, 3, padding=1)
        return F.fold(patches, (8, 8), 3, padding=1), F.pixel_unshuffle(x, 2), x.unfold(3, 4, 2).mean(-1)


@model("unfold_fold", "operator", image("batch", 2, 8, 8, name="x"))
def unfold_fold() -> nn.Module:
    return Unfolded()


class Linalg(nn.Module):
    """Batched matrix products, norms, determinant-free solves: baddbmm, cdist, cosine similarity, triangular masks."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        product = torch.baddbmm(a @ a.mT, a, b.mT, alpha=0.5)
        return (
            product.triu(1),
            torch.cdist(a, b),
            F.cosine_similarity(a, b, dim=-1),
            torch.linalg.vector_norm(a, dim=-1),
        )


@model("matrix_ops", "operator", floats("a", "batch", 4, 6), floats("b", "batch", 4, 6))
def matrix_ops() -> nn.Module:
    return Linalg()


class Integers(nn.Module):
    """Integer and bool arithmetic: floor division and remainder of negatives, shifts, where, isin, bucketize."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.tensor([-3, 0, 2, 5]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "quotient": x // 3,
            "remainder": x % 3,
            "bits": (x.abs() << 1) ^ 5,
            "bucket": torch.bucketize(x, self.edges),
            "chosen": torch.where((x > 0) & ~(x == 2), x, -x),
            "any": (x > 4).any(-1),
        }


@model("integer_ops", "operator", integers("x", "batch", 7, low=-6, high=7))
def integer_ops() -> nn.Module:
    return Integers()


class Doubles(nn.Module):
    """float64 in, float64 and float32 out."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x.double() ** 2).sum(-1).sqrt()
        return y, (y / 3).float()


@model("float64", "operator", floats("x", "batch", 5))
def float64() -> nn.Module:
    return Doubles()


class Bytes(nn.Module):
    """uint8 pictures, normalised inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, picture: Tensor) -> Tensor:
        return self.conv((picture.float() / 255 - 0.45) / 0.22).amax((2, 3))


@model("uint8_picture", "operator", integers("picture", "batch", 3, 8, 8, high=256, dtype="uint8"))
def uint8_picture() -> nn.Module:
    return Bytes()


class SizeArithmetic(nn.Module):
    """Sizes as Python numbers in the ways that export well: views, ranges, a mean by length, chunks."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        position = torch.arange(length, dtype=x.dtype) / length
        halves = (x + position[None, :, None]).reshape(batch * length, 2, width // 2)
        return halves.flip(1).reshape(batch, length, width).sum(1) / length


@model("size_arithmetic", "operator", floats("x", "batch", "sequence", 6))
def size_arithmetic() -> nn.Module:
    return SizeArithmetic()


class SizeAsInt(nn.Module):
    """Reads the batch with int(), as careless models do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(int(x.shape[0]), 1).cumsum(0).mul(0).add(1).repeat(1, x.shape[1])


@model("size_as_int", "operator", floats("x", "batch", 3))
def size_as_int() -> nn.Module:
    return SizeAsInt()


class FoundRows(nn.Module):
    """Only the rows whose score exceeds a threshold: as many as there are."""

    def forward(self, boxes: Tensor) -> Tensor:
        return boxes[boxes[:, 0] > 0.5]


@model("found_rows", "operator", unit("boxes", "rows", 5), batch=None)
def found_rows() -> nn.Module:
    return FoundRows()


class Conditional(nn.Module):
    """torch.cond: both branches are in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v - 1, (x,))


@model("torch_cond", "operator", floats("x", "batch", 3))
def torch_cond() -> nn.Module:
    return Conditional()


class Specials(nn.Module):
    """erf, expm1, logsumexp, atan2, lerp, nan_to_num, softmax over several axes, std and var."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ratio = torch.nan_to_num(torch.log(x), nan=-1.0, neginf=-2.0)
        return (
            torch.erf(x) + torch.expm1(y) + ratio,
            torch.logsumexp(x, (1, 2)),
            torch.lerp(torch.atan2(x, y), y, 0.3),
            torch.cat((x.std(1), y.var(2, unbiased=False)), 1),
        )


@model("special_functions", "operator", floats("x", "batch", 4, 4), floats("y", "batch", 4, 4))
def special_functions() -> nn.Module:
    return Specials()
