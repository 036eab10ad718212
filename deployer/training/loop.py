"""The training loop: one function, `fit`, the same for one process and for many.

A step is exact: its gradient is that of the mean over all rows (or tokens) of its window, whatever the number of
micro-batches and processes and however uneven they are. Each micro-batch adds its *summed* loss, divided by one
number that all share; after the last, gradients are corrected by the count that there really was. (The mean of means,
which is usual, is wrong for uneven micro-batches, short last windows and masked tokens.)"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deployer.errors import TrainingError, UsageError
from deployer.training.compiling import check_compiled, compile_model
from deployer.training.config import TrainConfig, make_config
from deployer.training.data import Feed, Plan, choose_loader, mix
from deployer.training.ending import Ending, write_checkpoints
from deployer.training.memory import checkpoint_blocks, offload_context, prepare_memory, still_statistics
from deployer.training.optimizing import follows_length, make_optimizer, make_scheduler
from deployer.training.parallel import World, join_batch_statistics, open_world, share_model
from deployer.training.precision import Precision
from deployer.training.saving import Saver
from deployer.training.state import AveragedWeights, RunState, random_state, seed_process, set_random_state
from deployer.training.task import Figure, Task, as_sum_and_count, call_user, task_datasets, to_device
from deployer.training.watching import JsonLines, RunFacts, StepRecord, ValidationRecord, Watcher, Watchers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run came to: the mean loss of its last step, the last figures of validation, and on process 0 the
    checkpoint folders that it ended in. `stopped` says that a signal ended it early, with everything saved."""

    step: int
    loss: float
    figures: dict[str, float]
    resumed_from: int | None
    stopped: bool
    checkpoints: tuple[Path, ...]


def fit(
    task: Task, config: TrainConfig | Mapping[str, Any] | None = None, *, watchers: Sequence[Watcher] = ()
) -> Outcome:
    """Train `task` as `config` says, from the last whole save of its output folder where there is one.

    Run it in every process that torchrun started, or in one alone. Raises UsageError, ModelError, MachineError before
    the first step; TrainingError where a run cannot go on."""
    config = config if isinstance(config, TrainConfig) else make_config(config or {})
    with ExitStack() as stack:
        world = stack.enter_context(open_world(config))
        run = Run(task, config, world)
        stack.callback(run.saver.close)
        stop = stack.enter_context(_stop_signals())
        watching = stack.enter_context(Watchers([JsonLines(Path(config.output) / "log.jsonl"), *watchers]))
        return run.train(watching, stop)


@dataclass
class _Window:
    """What one process saw of one optimizer step."""

    loss: float = 0.0
    count: float = 0.0
    data_s: float = 0.0
    bad: list[tuple[int, Any]] = field(default_factory=list)


class Run:
    """A run that is built and not yet begun: model, data, optimizer, and where it is saved."""

    def __init__(self, task: Task, config: TrainConfig, world: World) -> None:
        self.task, self.config, self.world = task, config, world
        _set_determinism(config.deterministic)
        prepare_memory(config.memory, world.device)
        data = task_datasets(task)
        self.feed = self._make_feed(data.train, shuffle=True)
        self.validation = None if data.validation is None else self._make_feed(data.validation, shuffle=False)
        windows = -(-self.feed.plan.micro_batches // config.accumulate)
        self.total_steps = min(config.epochs * windows, config.max_steps or config.epochs * windows)
        self.precision = Precision(config.precision, world.device, loss_scale=config.loss_scale, tf32=config.tf32)
        seed_process(config.seed, 0, 0)  # the same weights in every process
        model = call_user(task.build_model, f"{type(task).__name__}.build_model").to(world.device).train()
        self.model_class = type(model).__name__
        checkpoint_blocks(model, config.memory)
        compile_model(model, config.compile)
        self.shared = share_model(model, config, world, self.precision.dtype)
        optimizer = make_optimizer(task, self.shared.plain, config.optimizer)
        self.state = RunState(
            model=self.shared.plain,
            optimizer=optimizer,
            scheduler=make_scheduler(task, optimizer, config.schedule, self.total_steps),
            scaler=self.precision.scaler,
            ema=AveragedWeights(self.shared.plain, config.ema_decay) if config.ema_decay else None,
        )
        self.saver = Saver(Path(config.output), config.save, world, self._mathematics())
        seed_process(config.seed, 1, world.rank)

    def _mathematics(self) -> dict[str, Any]:
        """What a resumed run must share with the one that it goes on with."""
        facts: dict[str, Any] = {
            "rows": self.feed.plan.rows,
            "model": self.model_class,
            "optimizer_class": type(self.state.optimizer).__name__,
        }
        if follows_length(self.task, self.config.schedule):
            facts["total_steps"] = self.total_steps
        return self.config.mathematics() | facts

    def _make_feed(self, dataset: Any, *, shuffle: bool) -> Feed:
        config, world = self.config, self.world
        rows = len(dataset)
        if shuffle and min(rows, config.batch_size) < world.size:
            raise UsageError(
                f"{world.size} processes share micro-batches of {min(rows, config.batch_size)} rows, so "
                f"that some would "
                f"never have one; set batch_size to {world.size} or more (the data has {rows} rows), or start fewer"
            )
        return Feed(
            dataset,
            Plan(rows, config.batch_size, world.size, mix(config.seed, 2 if shuffle else 3), shuffle),
            world.rank,
            choose_loader(config.data, dataset, world.device, world.local_size),
            seed_items=config.data.seed_items,
            collate=self.task.collate,
        )

    # --- the run -------------------------------------------------------------------------------------------------

    def train(self, watching: Watchers, stop: threading.Event) -> Outcome:
        config, saver, state = self.config, self.saver, self.state
        found = saver.find()
        if found is not None:
            saver.load(state, found, config.seed)
            log.info("going on from step %d", found.step)
        watching.start(
            RunFacts(
                config,
                self.world,
                self.shared.plain,
                self.feed.plan.rows,
                self.total_steps,
                state.position.step,
                str(self.feed.settings),
            )
        )
        loss, figures, stopped = math.nan, dict(found.figures) if found else {}, False
        for step_loss, at_epoch_end, stopped in self._steps(watching, stop):
            loss = step_loss
            step = state.position.step
            last = stopped or step == self.total_steps
            validated: dict[str, float] = {}
            if self.validation and not stopped and (at_epoch_end or last or _due(step, config.validate_every_steps)):
                figures = validated = self._validate(self.validation, watching)
            if last or (at_epoch_end if config.save.every_steps is None else _due(step, config.save.every_steps)):
                join_batch_statistics(state.model, self.world)
                saver.begin(state, validated)
            if stopped:
                break
        saver.finish()
        checkpoints = (
            () if stopped else write_checkpoints(Ending(self.task, Path(config.output), self.world, state, saver))
        )
        resumed_from = None if found is None else found.step
        return Outcome(state.position.step, loss, figures, resumed_from, stopped, checkpoints)

    def _steps(self, watching: Watchers, stop: threading.Event) -> Iterator[tuple[float, bool, bool]]:
        """Take steps until the end; after each: (its loss, whether an epoch ended with it, whether to stop)."""
        position, plan = self.state.position, self.feed.plan
        before = time.perf_counter()
        while position.step < self.total_steps:
            batches = self.feed.epoch(position.epoch, position.micro)
            while position.micro < plan.micro_batches and position.step < self.total_steps:
                first = position.micro
                micros = range(first, min(first + self.config.accumulate, plan.micro_batches))
                lr = self.state.optimizer.param_groups[0]["lr"]
                window = self._accumulate(micros, batches)
                together = self._reduce(window, stop)
                grad_norm, taken = self._update(micros, together)
                position.step += 1
                position.micro = micros.stop
                if at_epoch_end := position.micro == plan.micro_batches:
                    position.epoch, position.micro = position.epoch + 1, 0
                now = time.perf_counter()
                record = StepRecord(
                    step=position.step,
                    epoch=position.epoch - at_epoch_end,
                    loss=together.loss / together.count if together.count else math.nan,
                    lr=float(lr),
                    rows=sum(plan.joined(micro) for micro in micros),
                    step_s=now - before,
                    data_s=window.data_s,
                    grad_norm=grad_norm,
                    loss_scale=self.precision.scaler.get_scale() if self.precision.scaler.is_enabled() else None,
                    skipped=not taken,
                )
                before = now
                watching.step(record)
                if together.written == self.world.size:
                    self.saver.finish()
                yield record.loss, at_epoch_end, together.stop > 0
                if at_epoch_end:
                    break

    def _accumulate(self, micros: range, batches: Iterator[Any]) -> _Window:
        """Forward and backward of a window's micro-batches: gradients of the summed loss, over `_nominal` rows."""
        window, plan, world = _Window(), self.feed.plan, self.world
        losses: list[tuple[int, Any, Tensor]] = []
        counts: list[Tensor | float] = []
        for micro in micros:
            begun = time.perf_counter()
            batch = to_device(next(batches), world.device)
            window.data_s += time.perf_counter() - begun
            own = plan.share(micro, world.rank)
            with ExitStack() as around:
                around.enter_context(self.shared.micro_batch(last=micro == micros[-1]))
                if own == 0:
                    around.enter_context(still_statistics(self.shared.plain))
                with self._forward():
                    figure = call_user(self.task.loss, f"{type(self.task).__name__}.loss", self.shared.module, batch)
                total, count = as_sum_and_count(figure, own or plan.joined(micro), f"{type(self.task).__name__}.loss")
                if own == 0:
                    total, count = total * 0.0, 0.0
                self.precision.scale(total * (world.size / self._nominal)).backward()  # type: ignore[no-untyped-call]
            losses.append((micro, batch, total.detach()))
            counts.append(count)
        window.loss = float(torch.stack([total.double() for _, _, total in losses]).sum())
        window.count = float(sum(float(count) for count in counts))
        if not math.isfinite(window.loss):
            window.bad = [(micro, batch) for micro, batch, total in losses if not torch.isfinite(total)]
        return window

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Autocast, unless FSDP's own precision policy is at work."""
        with offload_context(self.config.memory, self.world.device):
            if self.shared.casts:
                yield
            else:
                with self.precision.context():
                    yield

    @property
    def _nominal(self) -> int:
        """Rows of a full window: what summed losses are divided by before the true count is known."""
        return self.config.batch_size * self.config.accumulate

    def _reduce(self, window: _Window, stop: threading.Event) -> _Together:
        """One sum over processes a step, of all that one of them has to tell the others. Raises TrainingError."""
        first_step = self.state.position.step == 0
        unused = self.shared.unused_parameters() if first_step and self._names_unused else []
        finite = not window.bad and math.isfinite(window.loss)
        together = _Together(
            *self.world.add_up(
                [
                    window.loss if finite else 0.0,
                    window.count,
                    float(not finite),
                    float(bool(unused)),
                    float(stop.is_set()),
                    float(self.saver.written),
                ]
            )
        )
        step = self.state.position.step + 1
        if together.bad:
            where = self._keep_for_replay(window, step) if not finite else "the process that saw it"
            raise TrainingError(
                f"the loss of step {step} is not finite on {int(together.bad)} of {self.world.size} "
                f"processes; no step was "
                f"taken; its batch is in {where}; lower the learning rate, set clip_norm, or mend the data"
            )
        if together.unused:
            shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
            raise UsageError(
                f"the loss does not reach these parameters: {shown or 'see the other processes'}; ddp "
                f"would leave gradients "
                "unshared: freeze them (requires_grad_(False)), or set parallel.unused_parameters to find"
            )
        return together

    @property
    def _names_unused(self) -> bool:
        parallel = self.config.parallel
        return self.shared.strategy == "ddp" and parallel.unused_parameters == "error" and not parallel.static_graph

    def _update(self, micros: range, together: _Together) -> tuple[float | None, bool]:
        """The optimizer step; (norm of the gradient before clipping, whether the step was taken)."""
        state, shared = self.state, self.shared
        self.precision.unscale(state.optimizer, shared=shared.strategy == "fsdp")
        taken = together.count > 0
        norm = None
        if taken:
            shared.scale_gradients(self._nominal / together.count)
            norm = shared.clip(self.config.clip_norm)
            if norm is not None and not math.isfinite(norm) and not self.precision.scaler.is_enabled():
                raise TrainingError(
                    f"the gradient of step {state.position.step + 1} is not finite while its loss is; no "
                    f"step was taken; "
                    "an operation has no finite derivative at some input (sqrt or norm at 0, say)"
                )
            taken = self.precision.step(state.optimizer)
        else:
            log.warning("step %d counts nothing (all of it masked); it is left out", state.position.step + 1)
            self.precision.forget()
        state.optimizer.zero_grad()
        if state.position.step == 0:
            check_compiled(self.config.compile, shared.plain)
        if taken:
            state.scheduler.step()
            if state.ema is not None:
                state.ema.update(state.model)
        return norm, taken

    @torch.no_grad()
    def _validate(self, feed: Feed, watching: Watchers) -> dict[str, float]:
        """Loss and metrics over every row of the validation data once, exact on any number of processes. The run's
        random state is as if there had been none."""
        begun = time.perf_counter()
        kept = random_state()
        join_batch_statistics(self.state.model, self.world)
        model, plan, name = self.shared.evaluated.eval(), feed.plan, type(self.task).__name__
        sums: dict[str, list[float]] = {}
        for micro, fetched in enumerate(feed.epoch(0)):
            batch = to_device(fetched, self.world.device)
            own = plan.share(micro, self.world.rank)
            with self._forward():
                figures: dict[str, Figure] = {"loss": call_user(self.task.loss, f"{name}.loss", model, batch)}
                figures |= call_user(self.task.metrics, f"{name}.metrics", model, batch)
            for key, figure in figures.items():
                total, count = as_sum_and_count(figure, own, f"{name}.metrics: {key}")
                pair = sums.setdefault(key, [0.0, 0.0])
                if own:
                    pair[0] += float(total)
                    pair[1] += float(count)
        model.train()
        set_random_state(kept)
        keys = sorted(sums)
        together = self.world.add_up([value for key in keys for value in sums[key]])
        result = {
            key: total / count if count else math.nan
            for key, total, count in zip(keys, together[::2], together[1::2], strict=True)
        }
        position = self.state.position
        watching.validation(ValidationRecord(position.step, position.epoch, result, time.perf_counter() - begun))
        return result

    def _keep_for_replay(self, window: _Window, step: int) -> str:
        """Save what gave the bad loss: the batches and, where the model is whole here, the weights that they met."""
        path = Path(self.config.output) / "replay" / f"step-{step}-process-{self.world.rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        weights = {} if self.shared.strategy == "fsdp" else self.shared.plain.state_dict()
        torch.save({"step": step, "batches": [batch for _, batch in window.bad], "weights": weights}, path)
        return f"'{path}'"


@dataclass(frozen=True)
class _Together:
    """Sums over all processes after a window."""

    loss: float
    count: float
    bad: float
    unused: float
    stop: float
    written: float


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _set_determinism(wanted: bool) -> None:
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not wanted


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Set by SIGTERM (a scheduler's way to take a machine back): the run ends after its step, saved."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)
