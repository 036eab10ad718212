"""TensorRT. The table line and the check of what a machine has are here; the builders are not built yet."""

from __future__ import annotations

from typing import Any, NoReturn

from deployer.errors import NotBuiltYetError
from deployer.formats.record import ExportJob, Format, Loaded, LoadJob


def export(job: ExportJob) -> dict[str, Any]:
    _refuse()


def load(job: LoadJob) -> Loaded:
    _refuse()


def _refuse() -> NoReturn:
    raise NotBuiltYetError("--format trt is not built yet")


FORMAT = Format(
    name="trt",
    artifact="model.plan",
    summary="TensorRT engine; not built yet",
    export=export,
    load=load,
    modules=("tensorrt_rtx",),
    run_modules=("tensorrt_rtx",),
    extra="trt-rtx",
    precisions=(),
    tools=("torch", "tensorrt-rtx"),
)
