"""A workbench over linear and convolution layers whose int8 rounding is done for real; a format of pickled modules.

Weights are rounded per channel, activations per tensor to 8 bits with a zero point; products are then summed in
float32, which holds them exactly for the sizes of these tests. Nothing here is faster than float.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deployer.checkpoint.eager import run_eager
from deployer.errors import ExportError
from deployer.formats import ExportJob, Format, Loaded, LoadJob
from deployer.quantize.calibration import Calibration
from deployer.quantize.config import DynamicInt8, Int8Method, StaticInt8, WeightOnlyInt8
from deployer.quantize.workbench import Trial
from deployer.spec import Array, Arrays

_LAYERS = (nn.Linear, nn.Conv2d)


class Rounded(nn.Module):
    """A layer with its weight, and its input where `activations`, rounded to 8 bits. `low` None: ranges at run time."""

    def __init__(self, layer: nn.Module, low: float | None, high: float | None, *, activations: bool) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        weight = self.layer.weight
        axes = tuple(range(1, weight.ndim))
        scale = weight.detach().abs().amax(axes, keepdim=True).clamp_min(1e-12) / 127
        weight.data = (weight.data / scale).round().clamp(-127, 127) * scale
        self.low, self.high, self.activations = low, high, activations

    def forward(self, x: Tensor) -> Tensor:
        if not self.activations:
            return self.layer(x)
        low = min(float(x.min()) if self.low is None else self.low, 0.0)
        high = max(float(x.max()) if self.high is None else self.high, 0.0)
        scale = max(high - low, 1e-12) / 255
        zero = round(-low / scale)
        steps = ((x / scale).round() + zero).clamp(0, 255)
        return self.layer((steps - zero) * scale)


class FakeBench:
    """Static (min-max and percentile), dynamic and weight-only, in that order, unless told otherwise."""

    def __init__(self, job: ExportJob, calibration: Calibration, methods: Sequence[Int8Method] = ()) -> None:
        self.job = job
        self.calibration = calibration
        self.asked: list[tuple[Int8Method, frozenset[str]]] = []
        self._methods = methods or (StaticInt8(), StaticInt8("percentile"), DynamicInt8(), WeightOnlyInt8())
        self._inputs: dict[str, list[Tensor]] = {}
        self._observe()

    def _observe(self) -> None:
        handles = [
            module.register_forward_pre_hook(partial(self._keep, name))
            for name, module in self.job.model.named_modules()
            if isinstance(module, _LAYERS)
        ]
        for batch in self.calibration:
            run_eager(self.job.model, self.job.spec, batch)
        for handle in handles:
            handle.remove()

    def _keep(self, name: str, _module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._inputs.setdefault(name, []).append(arguments[0].detach().flatten())

    def methods(self) -> Sequence[Int8Method]:
        return self._methods

    def attempt(self, method: Int8Method, kept_float: Collection[str] = ()) -> Trial:
        self.asked.append((method, frozenset(kept_float)))
        model = copy.deepcopy(self.job.model)
        layers = [name for name in self._inputs if name not in kept_float]
        if not layers:
            raise ExportError("nothing is left to quantize")
        for name in layers:
            low, high = self._range(method, name)
            parent, _, child = name.rpartition(".")
            rounded = Rounded(model.get_submodule(name), low, high, activations=not isinstance(method, WeightOnlyInt8))
            setattr(model.get_submodule(parent), child, rounded)
        return _Kept(method, frozenset(kept_float), tuple(layers), partial(run_eager, model, self.job.spec), (), model)

    def _range(self, method: Int8Method, name: str) -> tuple[float | None, float | None]:
        if not isinstance(method, StaticInt8):
            return None, None
        values = torch.cat(self._inputs[name])
        if method.observer == "min-max":
            return float(values.min()), float(values.max())
        low, high = np.percentile(values.numpy(), [0.5, 99.5])
        return float(low), float(high)

    def write(self, trial: Trial) -> dict[str, Any]:
        assert isinstance(trial, _Kept)
        torch.save(trial.model, self.job.folder / "model.bin")
        return {"int8": {"layers": len(trial.layers), "exact_on": "any"}}


@dataclass(frozen=True)
class _Kept(Trial):
    model: nn.Module = None  # type: ignore[assignment]


def _export(job: ExportJob) -> dict[str, Any]:
    torch.save(job.model, job.folder / "model.bin")
    return {}


def _load(job: LoadJob) -> Loaded:
    model = torch.load(job.folder / "model.bin", weights_only=False)

    def call(arrays: Arrays) -> dict[str, Array]:
        return run_eager(model, job.spec, arrays)

    return Loaded(call, "pickled module")


FORMAT = Format(
    name="fake",
    artifact="model.bin",
    summary="a pickled module, for tests",
    export=_export,
    load=_load,
    precisions=("fp32", "int8"),
    workbench=FakeBench,
)
