"""What is told of a run while it goes: records of steps, validations and saves, and who listens to them.

Every process calls its own Watchers; what only one of them shall do asks for `facts.world.first`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from torch import nn

from deployer.training.config import TrainConfig
from deployer.training.parallel import World


class RunFacts(msgspec.Struct, frozen=True):
    """What is known before the first step. Not part of any file: it holds the live model."""

    config: TrainConfig
    world: World
    model: nn.Module
    rows: int
    total_steps: int
    first_step: int
    loader: str


class StepRecord(msgspec.Struct, frozen=True):
    """One optimizer step over all processes. `loss` is the mean over all that it counts, `data_s` the time this process
    waited for its batches, `step_s` the whole time since the last step; `rows` over all processes."""

    step: int
    epoch: int
    loss: float
    lr: float
    rows: int
    step_s: float
    data_s: float
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False


class ValidationRecord(msgspec.Struct, frozen=True):
    """Figures of validation over all rows, `loss` and the task's metrics."""

    step: int
    epoch: int
    figures: dict[str, float]
    seconds: float


class Watcher:
    """Derive from it and override what is of interest."""

    def start(self, facts: RunFacts) -> None: ...

    def step(self, record: StepRecord) -> None:
        """After each optimizer step, on every process."""

    def validation(self, record: ValidationRecord) -> None: ...

    def finish(self, error: BaseException | None) -> None:
        """At the end, on every process, with what ended it."""


class Watchers(Watcher):
    """Several as one; a context that tells all of them how the run ended."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = watchers

    def start(self, facts: RunFacts) -> None:
        for watcher in self.watchers:
            watcher.start(facts)

    def step(self, record: StepRecord) -> None:
        for watcher in self.watchers:
            watcher.step(record)

    def validation(self, record: ValidationRecord) -> None:
        for watcher in self.watchers:
            watcher.validation(record)

    def finish(self, error: BaseException | None) -> None:
        for watcher in self.watchers:
            watcher.finish(error)

    def __enter__(self) -> Watchers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish(error)


class JsonLines(Watcher):
    """`log.jsonl`: a line a step and a validation, appended; a resumed run first drops what it will do again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def start(self, facts: RunFacts) -> None:
        if not facts.world.first:
            return
        kept = []
        if self.path.exists():
            for line in self.path.read_bytes().splitlines(keepends=True):
                try:
                    if line.endswith(b"\n") and msgspec.json.decode(line)["step"] <= facts.first_step:
                        kept.append(line)
                except (msgspec.DecodeError, KeyError, TypeError):
                    continue
        self._file = self.path.open("wb")
        self._file.writelines(kept)
        self._file.flush()

    def _write(self, kind: str, record: msgspec.Struct) -> None:
        if self._file is not None:
            fields: Mapping[str, Any] = msgspec.to_builtins(record)
            self._file.write(msgspec.json.encode({"kind": kind, **fields}) + b"\n")
            self._file.flush()

    def step(self, record: StepRecord) -> None:
        self._write("step", record)

    def validation(self, record: ValidationRecord) -> None:
        self._write("validation", record)

    def finish(self, error: BaseException | None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
