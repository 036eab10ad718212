"""All that a run is at the end of an optimizer step, and how it comes back: what is saved and restored.

Model, optimizer and averaged weights go through torch.distributed.checkpoint, which cuts them anew for another number
of processes. Random states and the like are each process's own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from deployer.training.data import mix


@dataclass
class Position:
    """Where the run stands: `step` optimizer steps done, the next micro-batch is number `micro` of `epoch`."""

    step: int = 0
    epoch: int = 0
    micro: int = 0


class AveragedWeights:
    """An exponential moving average of the parameters (Polyak averaging): average ← decay · average + (1 − decay) ·
    now.

    Each process averages its own part. Buffers are the model's.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average = {name: value.detach().clone() for name, value in _named(model)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        now = [value.detach() for _, value in _named(model)]
        torch._foreach_lerp_(list(self.average.values()), now, 1 - self.decay)


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


@dataclass
class RunState:
    """The live objects of a run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    ema: AveragedWeights | None
    position: Position = field(default_factory=Position)

    def shards(self) -> dict[str, Any]:
        """What torch.distributed.checkpoint saves and loads into; keys are plain names of the model's state."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        whole: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if self.ema is not None:
            whole["ema"] = dict(self.ema.average)
        return whole

    def take_shards(self, whole: Mapping[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
        if self.ema is not None:
            for name, value in whole["ema"].items():
                self.ema.average[name].copy_(value)

    def own(self) -> dict[str, Any]:
        """This process's own part, of plain values and tensors."""
        return {
            "random": random_state(),
            "scheduler": {key: value for key, value in self.scheduler.state_dict().items() if _is_plain(value)},
            "scaler": self.scaler.state_dict(),
        }

    def take_own(self, own: Mapping[str, Any], *, same_process: bool, seed: int, rank: int) -> None:
        """`same_process` is False where the part was written by another process than this one would have been."""
        self.scheduler.load_state_dict(dict(own["scheduler"]))
        if self.scaler.is_enabled() and own["scaler"]:
            self.scaler.load_state_dict(dict(own["scaler"]))
        if same_process:
            set_random_state(own["random"])
        else:
            seed_process(seed, self.position.step, rank)

    def full_weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(weights, averaged weights) whole, on the CPU, on process 0; empty on the others."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = cast("dict[str, Tensor]", get_model_state_dict(self.model, options=options))
        if self.ema is None:
            return weights, {}
        averaged = {name: _whole(value) for name, value in self.ema.average.items()}
        if not weights:
            return weights, {}
        return weights, {name: averaged.get(name, value) for name, value in weights.items()}


def _whole(value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, int | float | str | bool)


def seed_process(seed: int, step: int, rank: int) -> None:
    """The random states of process `rank` from `step` on: dropout and the like differ among processes."""
    value = mix(seed, step, rank)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)


def random_state() -> dict[str, Any]:
    """The states of torch (CPU and current CUDA device), numpy's global generator and `random`, as plain values."""
    kind, keys, place, has_gauss, gauss = np.random.get_state()
    version, internal, next_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": (str(kind), torch.tensor(np.asarray(keys, np.int64)), int(place), int(has_gauss), float(gauss)),
        "python": (version, torch.tensor(internal, dtype=torch.int64), next_gauss),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    kind, keys, place, has_gauss, gauss = state["numpy"]
    version, internal, next_gauss = state["python"]
    torch.set_rng_state(state["torch"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    random.setstate((version, tuple(internal.tolist()), next_gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
