"""From a PyTorch checkpoint to a served model, every step proved equal to the model it came from.

import deployer

checkpoint = deployer.load_checkpoint("examples/digits/checkpoint")
bundle, report = deployer.export(checkpoint, deployer.Target("onnx"), "build")
with deployer.open_bundle(bundle.path) as run:
    logits = run({"image": images})["logits"]
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deployer.bench import bench
    from deployer.checkpoint import load_checkpoint, save_checkpoint
    from deployer.export import export
    from deployer.formats import Target
    from deployer.int8 import Int8
    from deployer.package import package
    from deployer.quantize.calibration import read_calibration
    from deployer.quantize.score import load_metric
    from deployer.runtime import open_bundle
    from deployer.spec import Dim, ModelSpec, TensorSpec
    from deployer.validate import validate

__all__ = [
    "Dim",
    "Int8",
    "ModelSpec",
    "Target",
    "TensorSpec",
    "bench",
    "export",
    "load_checkpoint",
    "load_metric",
    "open_bundle",
    "package",
    "read_calibration",
    "save_checkpoint",
    "validate",
]

_HOME = {
    "Dim": "spec",
    "Int8": "int8",
    "ModelSpec": "spec",
    "Target": "formats",
    "TensorSpec": "spec",
    "bench": "bench",
    "export": "export",
    "load_checkpoint": "checkpoint",
    "load_metric": "quantize.score",
    "open_bundle": "runtime",
    "package": "package",
    "read_calibration": "quantize.calibration",
    "save_checkpoint": "checkpoint",
    "validate": "validate",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import deployer` alone costs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'deployer' has no attribute '{name}'")
    return getattr(importlib.import_module(f"deployer.{_HOME[name]}"), name)


class _Package(ModuleType):
    """Importing the submodule `deployer.export` would bind it over the function `deployer.export`: the function stays,
    whatever was imported before."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
