"""torch.compile, in place, of blocks or of the model, and proof that something was compiled."""

from __future__ import annotations

import logging

import torch
from torch import nn

from deployer.errors import MachineError, UsageError
from deployer.training.config import CompileConfig
from deployer.training.task import modules_of_classes

log = logging.getLogger(__name__)


def compile_model(model: nn.Module, config: CompileConfig) -> int:
    """Compile in place (state-dict keys stay plain): the modules of the named classes, each by itself, or the whole
    model. Returns how many. A block compiles in a fraction of the time of the model, and all of a class share it."""
    if not config.enabled:
        return 0
    import shutil

    if torch.device("cpu") == next(model.parameters()).device and not (shutil.which("g++") or shutil.which("c++")):
        raise MachineError("torch.compile needs a C++ compiler on a CPU", install="apt-get install g++")
    blocks = modules_of_classes(model, config.blocks, "compile.blocks") if config.blocks else [model]
    for block in blocks:
        block.compile(mode=None if config.mode == "default" else config.mode)
    return len(blocks)


def compiled_graphs() -> int:
    """Graphs compiled in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def check_compiled(config: CompileConfig, model: nn.Module) -> None:
    """After the first step. Some modules of torch (nn.Sequential, nn.Linear, nn.TransformerEncoder, …) take
    `.compile()` and compile nothing. Raises UsageError."""
    if config.enabled and compiled_graphs() == 0:
        inner = sorted(
            {type(module).__name__ for module in model.modules() if not type(module).__module__.startswith("torch.")}
        )
        names = ", ".join(inner[:6]) or "a class of your own around torch's modules"
        raise UsageError(
            f"torch.compile compiled nothing: it skips torch's own containers and layers; name blocks of your own "
            f"in compile.blocks ({names})"
        )
