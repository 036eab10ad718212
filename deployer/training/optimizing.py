"""The optimizer and the learning rate over the run: the task's own, or the configuration's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from deployer.errors import UsageError
from deployer.training.config import OptimizerConfig, ScheduleConfig
from deployer.training.task import Task, call_user


def make_optimizer(task: Task, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Raises ModelError, UsageError."""
    made = call_user(task.optimizer, f"{type(task).__name__}.optimizer", model)
    if made is not None:
        return made  # type: ignore[no-any-return]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError("no parameter of the model requires a gradient; nothing can be trained")
    ways: dict[str, Any] = {
        "auto": {},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "single": {"foreach": False, "fused": False},
    }[config.implementation]
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, **ways
        )
    return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, **ways)


def make_scheduler(
    task: Task, optimizer: torch.optim.Optimizer, config: ScheduleConfig, total_steps: int
) -> LRScheduler:
    """Stepped once an optimizer step. Raises ModelError."""
    made = call_user(task.scheduler, f"{type(task).__name__}.scheduler", optimizer, total_steps)
    if made is not None:
        return made  # type: ignore[no-any-return]
    return LambdaLR(optimizer, lambda step: learning_rate_ratio(config, step, total_steps))


def learning_rate_ratio(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step` (from 0) over its peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    falling = 1 - done if config.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.final_ratio + (1 - config.final_ratio) * falling


def follows_length(task: Task, config: ScheduleConfig) -> bool:
    """Whether the learning rate of a step depends on the length of the run."""
    return config.name != "constant" or type(task).scheduler is not Task.scheduler
