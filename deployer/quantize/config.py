"""How to quantize: one small type a method. All are int8 with symmetric, per-channel weights."""

from __future__ import annotations

import msgspec

#: how the range of an activation is taken from calibration data
OBSERVERS = ("min-max", "percentile", "mse", "entropy")


class StaticInt8(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="static", tag_field="method"):
    """Activations' ranges fixed from calibration data.

    `observer`         one of OBSERVERS
    `reduce_range`     weights in 7 bits, so that a sum of two products of 8 bits fits into 16: exact on every x86 CPU.
                       Without it the artifact is exact where products are summed in 32 bits (VNNI) alone
    `symmetric`        activations symmetric around zero (TensorRT takes nothing else)
    `smooth`           SmoothQuant's migration strength alpha (0 to 1), None: off
    `equalize`         cross-layer equalisation of neighbouring convolution and linear layers
    `correct_bias`     biases corrected by the mean error that quantized weights make on the calibration data
    """

    observer: str = "min-max"
    reduce_range: bool = True
    symmetric: bool = False
    smooth: float | None = None
    equalize: bool = False
    correct_bias: bool = False

    def __str__(self) -> str:
        parts = ["static", self.observer]
        parts += [f"smooth {self.smooth:g}"] if self.smooth is not None else []
        parts += [word for word, used in (("equalized", self.equalize), ("bias-corrected", self.correct_bias)) if used]
        return " ".join(parts)


class DynamicInt8(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="dynamic", tag_field="method"):
    """Activations' ranges taken at run time; linear layers (and recurrent ones) alone.

    `reduce_range` and `smooth` as in StaticInt8; with `smooth`, calibration data fix what channels are divided by.
    """

    reduce_range: bool = True
    smooth: float | None = None

    def __str__(self) -> str:
        return "dynamic" if self.smooth is None else f"dynamic smooth {self.smooth:g}"


class WeightOnlyInt8(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="weight-only", tag_field="method"):
    """Weights stored in int8 and computed with in float."""

    def __str__(self) -> str:
        return "weight-only"


Int8Method = StaticInt8 | DynamicInt8 | WeightOnlyInt8
