"""INT8 for TensorRT: the workbench of format `trt`, by TensorRT-RTX from an ONNX file with QuantizeLinear nodes.

TensorRT takes symmetric activations alone, and adds biases in float. A GPU sums products in 32 bits, so weights have
all 8 bits. What is tried and what goes through the gate without a GPU is the same ONNX file in ONNX Runtime.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from deployer.errors import ExportError
from deployer.formats import trt
from deployer.formats.onnx_int8 import SMOOTH_STATIC, OnnxWorkbench
from deployer.quantize.config import OBSERVERS, Int8Method, StaticInt8
from deployer.quantize.workbench import Trial

log = logging.getLogger(__name__)


class TrtWorkbench(OnnxWorkbench):
    """See `quantize.workbench.Workbench`."""

    session_options = trt.AS_WRITTEN

    def methods(self) -> Sequence[Int8Method]:
        plain = [StaticInt8(observer, reduce_range=False, symmetric=True) for observer in OBSERVERS]
        if self.mostly_convolutions():
            return [*plain, StaticInt8("min-max", reduce_range=False, symmetric=True, correct_bias=True)]
        smooth = [
            StaticInt8(observer, reduce_range=False, symmetric=True, smooth=SMOOTH_STATIC)
            for observer in ("min-max", "mse")
        ]
        return [*smooth, *plain]

    def attempt(self, method: Int8Method, kept_float: Collection[str] = ()) -> Trial:
        if not isinstance(method, StaticInt8) or not method.symmetric:
            raise ExportError(f"{method}: TensorRT takes ranges that are fixed and symmetric, and nothing else")
        return super().attempt(method, kept_float)

    def write(self, trial: Trial) -> dict[str, Any]:
        """The engine, and beside it the ONNX file that it was built from."""
        chosen = trt.choose(self.job.target)
        log.info("trt: builder %s (%s)", chosen["builder"], chosen["builder_reason"])
        facts = trt.build(self.job, self.write_file(trial), chosen["gpu_archs"])
        layers = facts["layers"].get("INT8", 0)
        if not layers:
            counted = ", ".join(f"{count} {name}" for name, count in facts["layers"].items()) or "none"
            raise ExportError(f"{trial.method}: no layer of the engine computes in INT8 (layers: {counted})")
        return {**chosen, **self.details, **facts, "int8": {"layers": layers, "exact_on": "any"}}
