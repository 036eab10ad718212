"""Less memory for the activations of a forward pass: computed again, kept elsewhere, or fewer kept by the compiler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as composable_checkpoint
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from deployer.errors import UsageError, nearest
from deployer.training.config import MemoryConfig
from deployer.training.task import modules_of_classes

log = logging.getLogger(__name__)


def checkpoint_blocks(model: nn.Module, config: MemoryConfig) -> list[nn.Module]:
    """Gradient checkpointing (Chen et al. 2016), non-reentrant, of every n-th module of the named classes, in place:
    names and state-dict keys stay. Dropout draws the same numbers again. Returns the modules. Raises UsageError."""
    if not config.checkpoint:
        return []
    blocks = modules_of_classes(model, config.checkpoint, "memory.checkpoint")[:: config.checkpoint_every]
    keep = [operator for name in config.checkpoint_keep for operator in _operators(name)]
    for block in blocks:
        composable_checkpoint(block, context_fn=partial(_contexts, block, keep))
    return blocks


def _contexts(block: nn.Module, keep: list[Any]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of the forward pass and of its repetition."""
    if keep:
        forward, again = create_selective_checkpoint_contexts(keep)  # type: ignore[no-untyped-call]
    else:
        forward, again = nullcontext(), nullcontext()
    if any(isinstance(module, _BatchNorm) for module in block.modules()):
        return forward, _both(again, still_statistics(block))
    return forward, again


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


@contextmanager
def still_statistics(module: nn.Module) -> Iterator[None]:
    """Batch statistics are used and not recorded: the same batch passing twice would move them twice
    (pytorch#96136)."""
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    kept = [
        (norm.momentum, None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone())
        for norm in norms
    ]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)


def _operators(name: str) -> list[Any]:
    """Every overload of the aten operator `name`. Raises UsageError."""
    bare = name.removeprefix("aten.")
    packet = getattr(torch.ops.aten, bare, None) if bare.isidentifier() else None
    if packet is None:
        raise UsageError(
            f"memory.checkpoint_keep names '{name}', which is no aten operator"
            f"{nearest(bare, ('mm', 'addmm', 'bmm', 'convolution', '_scaled_dot_product_flash_attention'))}"
        )
    return [getattr(packet, overload) for overload in packet.overloads()]


def offload_context(config: MemoryConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Around the forward pass: activations saved for the backward pass wait in pinned main memory."""
    if not config.offload or device.type == "cpu":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def prepare_memory(config: MemoryConfig, device: torch.device) -> None:
    """Settings of the whole process, and a word on those that do nothing here."""
    if config.offload and device.type == "cpu":
        log.warning("memory.offload: activations lie in main memory already on a CPU; nothing is moved")
    if config.budget is not None:
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = config.budget
