"""What a run ends in: checkpoint folders that `deployer export` takes without another word."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from deployer.checkpoint import save_checkpoint
from deployer.files import atomic_file
from deployer.training.parallel import World
from deployer.training.saving import SHARDS, Saver, read_position
from deployer.training.state import RunState
from deployer.training.task import Task, call_user

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """The finished run; `output` is its folder."""

    task: Task
    output: Path
    world: World
    state: RunState
    saver: Saver


def write_checkpoints(ending: Ending) -> tuple[Path, ...]:
    """Every process calls it; process 0 writes, and returns what it wrote.

    `checkpoint`        the weights of the last step
    `checkpoint-ema`    their moving average, where there is one
    `checkpoint-best`   those of the save with the best figure of validation, where that is not the last step
    """
    weights, averaged = ending.state.full_weights()
    if not ending.world.first:
        ending.world.barrier()
        return ()
    step = ending.state.position.step
    written = [_write(ending, "checkpoint", weights, step, "raw")]
    if averaged:
        written.append(_write(ending, "checkpoint-ema", averaged, step, "ema"))
    best = ending.saver.best()
    if best is not None and (best_step := read_position(best).step) != step:
        written.append(_write(ending, "checkpoint-best", _saved_weights(ending.task, best), best_step, "raw"))
    ending.world.barrier()
    return tuple(written)


def _fresh_model(task: Task, weights: Mapping[str, Tensor]) -> nn.Module:
    """A plain model, none of the run's wrappers on it, with these weights: keys that do not meet are an error."""
    model: nn.Module = call_user(task.build_model, f"{type(task).__name__}.build_model")
    model.load_state_dict(dict(weights))
    return model


def _saved_weights(task: Task, save: Path) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        model: nn.Module = call_user(task.build_model, f"{type(task).__name__}.build_model")
    state: dict[str, Any] = {"model": model.state_dict()}
    load_shards(state, checkpoint_id=save / SHARDS, no_dist=True)
    return state["model"]  # type: ignore[no-any-return]


def _write(ending: Ending, name: str, weights: Mapping[str, Tensor], step: int, weight_set: str) -> Path:
    task, folder = ending.task, ending.output / name
    with torch.random.fork_rng():
        model = _fresh_model(task, weights)
    samples = call_user(task.samples, f"{type(task).__name__}.samples")
    lacking = [
        what for what, given in (("factory", task.factory), ("spec", task.spec), ("samples", samples)) if not given
    ]
    if task.spec is None or lacking:
        path = ending.output / f"{name}.safetensors"
        with atomic_file(path) as temporary:
            save_file(_untied(model), temporary, metadata={"format": "pt"})
        log.warning(
            "'%s' holds weights alone: the task has no %s, which a checkpoint folder for `deployer export` needs",
            path, " and no ".join(lacking),
        )  # fmt: skip
        return path
    return save_checkpoint(
        folder, model, factory=task.factory, args=task.factory_args, spec=task.spec, samples=samples, step=step,
        weight_set=weight_set,
    )  # fmt: skip


def _untied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
