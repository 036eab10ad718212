"""A run by its configuration file, in this process: what `deployer train` does, and each process of torchrun."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from deployer.training.config import TrainConfig
from deployer.training.loop import Outcome, fit
from deployer.training.task import load_task
from deployer.training.watching import Watcher


def run(config: TrainConfig, watchers: Sequence[Watcher] = ()) -> Outcome:
    """Load the task that `config` names and train it. Raises what `fit` raises."""
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger("deployer").setLevel(logging.ERROR)  # what concerns all of them process 0 says
    return fit(load_task(config.task, config.args), config, watchers=watchers)


def describe(outcome: Outcome) -> list[str]:
    """What a finished run came to, as lines for its user."""
    figures = ", ".join(f"{name} {value:.4f}" for name, value in sorted(outcome.figures.items()))
    lines = [f"step {outcome.step}: training loss {outcome.loss:.4f}" + (f"; validation: {figures}" if figures else "")]
    if outcome.stopped:
        return [*lines, "stopped by a signal, with everything saved; run the same command to go on"]
    lines += [f"wrote {path}" for path in outcome.checkpoints]
    if outcome.checkpoints and outcome.checkpoints[0].is_dir():
        lines.append(f"next: deployer export {outcome.checkpoints[0]} --format onnx")
    return lines


#: exit code of a run that a signal ended: 128 + SIGTERM, as shells have it
STOPPED_EXIT_CODE = 143
