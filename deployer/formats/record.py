"""The types that every format is made of: a Target, a Format record, what loading gives back."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from deployer.errors import MachineError, NotBuiltYetError, UsageError
from deployer.spec import Array, Arrays, ModelSpec

PRECISIONS = ("fp32", "fp16", "bf16", "int8")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to build: format × precision × device × compile mode (None: the format's own way)."""

    format: str
    precision: str = "fp32"
    device: str = "cpu"
    compile: str | None = None

    @property
    def slug(self) -> str:
        """A name for folders and tables, e.g. `aoti-fp32-max-autotune`."""
        parts = (self.format, self.precision, self.device if self.device != "cpu" else None, self.compile)
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
class Format:
    """One export format.

    `modules` are the imports that exporting needs, `run_modules` those that running needs; `extra` is the extra of this
    package that installs them.
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

    @property
    def install(self) -> str:
        return f"pip install 'deployer[{self.extra}]'" if self.extra else "pip install deployer"

    def missing_modules(self, *, to_run: bool = False) -> list[str]:
        """The imports that exporting (or running) needs and this machine lacks; nothing is imported to find out."""
        needed = self.run_modules if to_run else self.modules
        return [module for module in needed if importlib.util.find_spec(module) is None]

    def check_machine(self, *, to_run: bool = False) -> None:
        """Raises MachineError when a package is missing, with the line that installs it."""
        if missing := self.missing_modules(to_run=to_run):
            raise MachineError(
                f"format '{self.name}' needs {', '.join(missing)}, which this machine lacks",
                install=self.install,
            )

    def check_target(self, target: Target) -> None:
        """Raises MachineError (package missing), NotBuiltYetError or UsageError before any work is done."""
        self.check_machine()
        if target.precision not in self.precisions:
            built = ", ".join(self.precisions) or "none"
            raise NotBuiltYetError(
                f"--precision {target.precision} is not built yet for '{self.name}' (built: {built})"
            )
        if target.device not in self.devices:
            raise NotBuiltYetError(
                f"--device {target.device} is not built yet for '{self.name}' (built: {', '.join(self.devices)})"
            )
        if target.compile is not None and target.compile not in self.compile_modes:
            takes = f"it takes {', '.join(self.compile_modes)}" if self.compile_modes else "it takes no --compile"
            raise UsageError(f"--compile {target.compile} does not go with '{self.name}': {takes}")
