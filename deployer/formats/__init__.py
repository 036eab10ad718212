"""The table of formats. A new one is one file that ends in a Format record, and one line here."""

from __future__ import annotations

from deployer.errors import UsageError, nearest
from deployer.formats import aoti, exported, onnx, torchscript, trt
from deployer.formats.record import (
    COMPILE_MODES,
    PRECISIONS,
    ExportJob,
    Format,
    Loaded,
    LoadJob,
    Target,
)

__all__ = [
    "COMPILE_MODES",
    "FORMATS",
    "PRECISIONS",
    "ExportJob",
    "Format",
    "LoadJob",
    "Loaded",
    "Target",
    "get_format",
]

FORMATS: dict[str, Format] = {
    record.name: record
    for record in (torchscript.FORMAT, exported.FORMAT, aoti.FORMAT, onnx.FORMAT, trt.FORMAT)
}  # fmt: skip


def get_format(name: str) -> Format:
    """The record called `name`. Raises UsageError with the nearest name."""
    if name not in FORMATS:
        raise UsageError(f"no format '{name}'{nearest(name, FORMATS)}")
    return FORMATS[name]
