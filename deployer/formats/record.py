"""The types that every format is made of: a Target, a Format record, what loading gives back."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from deployer.errors import MachineError, NotBuiltYetError, UsageError, nearest
from deployer.machine import gpu_fault
from deployer.quantize.calibration import Calibration
from deployer.quantize.workbench import Workbench
from deployer.spec import Array, Arrays, ModelSpec

PRECISIONS = ("fp32", "fp16", "bf16", "int8")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to build: format × precision × device × compile mode (None: the format's own way).

    `builder` (None: chosen by what the machine has) and `gpu_archs` (empty: the builder's own set) go with `trt`.
    """

    format: str
    precision: str = "fp32"
    device: str = "cpu"
    compile: str | None = None
    builder: str | None = None
    gpu_archs: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """A name for folders and tables, e.g. `aoti-fp32-max-autotune`."""
        device = self.device if self.device != "cpu" else None
        parts = (self.format, self.precision, device, self.builder, self.compile)
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class ExportJob:
    """What a format's `export` gets; the model is fresh, in float32 and eval mode, and may be changed."""

    model: nn.Module
    spec: ModelSpec
    samples: Arrays
    target: Target
    folder: Path


@dataclass(frozen=True)
class LoadJob:
    """What a format's `load` gets. `details` is what its `export` returned; `threads` None leaves the default."""

    folder: Path
    spec: ModelSpec
    target: Target
    details: dict[str, Any]
    threads: int | None = None


@dataclass(frozen=True)
class Loaded:
    """An open artifact: `call` maps checked, contiguous named arrays to named arrays; `engine` says what runs."""

    call: Callable[[Arrays], dict[str, Array]]
    engine: str


@dataclass(frozen=True)
class Builder:
    """One of several makers of a format's artifact: what it needs, as in Format."""

    name: str
    modules: tuple[str, ...]
    run_modules: tuple[str, ...]
    extra: str


@dataclass(frozen=True)
class Format:
    """One export format.

    `modules` are the imports that exporting needs, `run_modules` those that running needs; `extra` is the extra of this
    package that installs them. A format with `builders` has them there.
    """

    name: str
    artifact: str
    summary: str
    export: Callable[[ExportJob], dict[str, Any]]
    load: Callable[[LoadJob], Loaded]
    modules: tuple[str, ...] = ()
    run_modules: tuple[str, ...] = ()
    extra: str = ""
    devices: tuple[str, ...] = ("cpu",)
    precisions: tuple[str, ...] = ("fp32",)
    compile_modes: tuple[str, ...] = ()
    #: artifacts hold machine code for the CPU features of the machine that built them
    native_code: bool = False
    #: distributions whose versions the manifest records
    tools: tuple[str, ...] = ("torch",)
    #: (LoadJob, torch.export program of the checkpoint's model, inputs) → trail.Inside: the artifact taken apart
    look: Callable[[LoadJob, Any, Arrays], Any] | None = None
    #: the first is what `doctor` looks for
    builders: tuple[Builder, ...] = ()
    #: GPU generations that `--gpu-arch` takes
    gpu_archs: tuple[str, ...] = ()
    #: what a target leaves to the machine, decided; `export` records it in the details under the same keys
    choose: Callable[[Target], dict[str, Any]] | None = None
    #: where the format is quantized; `export` is for the other precisions
    workbench: Callable[[ExportJob, Calibration], Workbench] | None = None
    #: the imports that its workbench needs besides; the extra `int8` installs them
    int8_modules: tuple[str, ...] = ()
    #: opens what the artifact was made from, for the gate of a machine that cannot execute the artifact itself
    stand_in: Callable[[LoadJob], Loaded] | None = None

    def builder(self, name: str | None = None) -> Format | Builder:
        """What holds `modules`, `run_modules` and `extra`: a builder (None: the first), or the format itself."""
        if not self.builders:
            return self
        return next((builder for builder in self.builders if builder.name == name), self.builders[0])

    def install_line(self, builder: str | None = None) -> str:
        extra = self.builder(builder).extra
        return f"pip install 'deployer[{extra}]'" if extra else "pip install deployer"

    def missing_modules(self, *, to_run: bool = False, builder: str | None = None) -> list[str]:
        """The imports that exporting (or running) needs and this machine lacks; nothing is imported to find out."""
        maker = self.builder(builder)
        needed = maker.run_modules if to_run else maker.modules
        return [module for module in needed if importlib.util.find_spec(module) is None]

    def check_machine(self, *, to_run: bool = False, builder: str | None = None) -> None:
        """Raises MachineError when a package is missing, with the line that installs it."""
        if missing := self.missing_modules(to_run=to_run, builder=builder):
            raise MachineError(
                f"format '{self.name}' needs {', '.join(missing)}, which this machine lacks",
                install=self.install_line(builder),
            )

    def check_int8(self) -> None:
        """Raises MachineError when a package of the workbench is missing, with the line that installs it."""
        if missing := [module for module in self.int8_modules if importlib.util.find_spec(module) is None]:
            raise MachineError(
                f"--precision int8 of '{self.name}' needs {', '.join(missing)}, which this machine lacks",
                install="pip install 'deployer[int8]'",
            )

    def choices(self, target: Target) -> dict[str, Any]:
        """What `choose` decides for a target, here and now. Raises MachineError or UsageError."""
        return self.choose(target) if self.choose is not None else {}

    def check_target(self, target: Target) -> None:
        """Raises UsageError, NotBuiltYetError or MachineError (package or GPU missing) before any work is done."""
        self._check_words(target)
        self.check_machine(builder=self.choices(target).get("builder"))
        if target.precision == "int8":
            self.check_int8()
        if target.device != "cpu" and self.stand_in is None and (fault := gpu_fault()):
            raise MachineError(f"--device {target.device}: {fault}; export to it on a GPU machine", reason="no_gpu")

    def _check_words(self, target: Target) -> None:
        """What a target says against what this format takes, whatever the machine has."""
        if target.precision not in self.precisions:
            built = ", ".join(self.precisions) or "none"
            raise NotBuiltYetError(
                f"--precision {target.precision} is not built yet for '{self.name}' (built: {built})"
            )
        if target.device not in self.devices:
            raise NotBuiltYetError(
                f"--device {target.device} is not built yet for '{self.name}' (built: {', '.join(self.devices)})"
            )
        makers = [builder.name for builder in self.builders]
        if target.builder is not None and target.builder not in makers:
            takes = nearest(target.builder, makers) if makers else "; it takes no --builder"
            raise UsageError(f"--builder {target.builder} does not go with '{self.name}'{takes}")
        for arch in target.gpu_archs:
            if arch not in self.gpu_archs:
                takes = f"; valid: {', '.join(self.gpu_archs)}" if self.gpu_archs else "; it takes no --gpu-arch"
                raise UsageError(f"--gpu-arch {arch} does not go with '{self.name}'{takes}")
        if target.compile is not None and target.compile not in self.compile_modes:
            takes = f"it takes {', '.join(self.compile_modes)}" if self.compile_modes else "it takes no --compile"
            raise UsageError(f"--compile {target.compile} does not go with '{self.name}': {takes}")
