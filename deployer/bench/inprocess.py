"""A bundle measured in this process: one caller, run after run, a row for each batch size.

The answers are held to the reference recorded in the bundle before measuring and once more after it: a wrong answer is
an error and never a number. The runner returns arrays in host memory, so a run is over when its call returns and the
clock needs no synchronising. Python's garbage collector is off while the clock runs (its pauses depend on this
program's history, not on the artifact) and on again after each row.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deployer.bench.record import BenchReport, InProcessRow, Warmup, command_line, environment
from deployer.bench.statistics import is_steady, per_second, summarize
from deployer.bundle import Bundle, read_bundle
from deployer.errors import GateError, MachineError, UsageError
from deployer.formats import get_format
from deployer.machine import cpu_name, gpu_fault
from deployer.runtime import Runner, open_bundle
from deployer.samples import sized_inputs
from deployer.spec import Array, Arrays, ModelSpec
from deployer.validate import Reference, cases_for, measure_of, read_references, read_report

log = logging.getLogger(__name__)

DEFAULT_BATCH_SIZES = (1, 8, 32)
_WARMUP_WINDOW = 5


@dataclass(frozen=True)
class _Limits:
    duration_s: float
    min_runs: int
    warmup_max_runs: int
    warmup_max_s: float


def bench_bundle(
    path: str | Path,
    *,
    batch_sizes: Sequence[int] | None = None,
    duration_s: float = 2.0,
    min_runs: int = 20,
    threads: int | None = None,
    warmup_max_runs: int = 200,
    warmup_max_s: float = 5.0,
) -> BenchReport:
    """Measure a bundle at each batch size, on inputs built from its real samples, other Dims at their typical size.

    `batch_sizes`     None: 1, 8 and 32, as far as the model takes them
    `duration_s`      seconds to measure each row, prolonged until `min_runs` runs are done
    `threads`         compute threads; None leaves the engine's own default
    `warmup_max_...`  a row's warm-up ends at either limit, or before it once latencies are steady

    Raises GateError for a wrong answer or a bundle that has not passed the gate, UsageError for a batch size that the
    model does not take, BundleError, IntegrityError or MachineError when it cannot be opened.
    """
    started = time.perf_counter()
    bundle = read_bundle(path)
    if not bundle.manifest.passed:
        raise GateError(f"'{path}' has not passed the gate and is not measured; `deployer validate {path}` says why")
    sizes = _checked_sizes(bundle, batch_sizes)
    limits = _Limits(duration_s, min_runs, warmup_max_runs, warmup_max_s)
    rows = []
    with _torch_threads(threads), open_bundle(bundle, threads=threads) as runner:
        open_s = time.perf_counter() - started
        checker = _Checker(bundle)
        for size in sizes:
            log.info("measuring %s", f"batch {size}" if size is not None else "single runs")
            rows.append(_measure_row(runner, checker, size, limits))
        engine = runner.engine
    return _report(bundle, rows, engine, threads, limits, open_s)


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """Put torch's thread count, which is the process's, back to what it was."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)


@contextmanager
def _collector_off() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _checked_sizes(bundle: Bundle, batch_sizes: Sequence[int] | None) -> list[int | None]:
    """The batch sizes to measure; [None] for a model without a batch axis. Raises UsageError."""
    spec = bundle.spec
    if spec.batch is None:
        if batch_sizes is not None:
            raise UsageError(f"--batch-sizes does not go with '{bundle.path}': its model has no batch axis")
        return [None]
    dim = spec.dims[spec.batch]
    # Rows of a model that mixes them cannot be looked up in a larger batch: only the recorded sizes can be checked.
    free = spec.stackable and bundle.manifest.batch_independent
    recorded = dim.sizes()

    def legal(size: int) -> bool:
        return dim.min <= size <= dim.max and (free or size in recorded)

    if batch_sizes is None:
        return [size for size in DEFAULT_BATCH_SIZES if legal(size)] or [dim.typical]
    for size in batch_sizes:
        if not dim.min <= size <= dim.max:
            raise UsageError(f"batch size {size} is outside what the model takes ('{spec.batch}': {dim.min}–{dim.max})")
        if not legal(size):
            raise UsageError(
                f"batch size {size} has no recorded reference, and this model's rows depend on each other; "
                f"choose among {', '.join(map(str, recorded))}"
            )
    return list(dict.fromkeys(batch_sizes))


class _Checker:
    """Holds answers to the reference that was recorded in the bundle."""

    def __init__(self, bundle: Bundle) -> None:
        self.spec = bundle.spec
        self.samples = bundle.samples()[0]
        self.reference = read_references(bundle, read_report(bundle).noise)
        self.measure = measure_of(bundle, self.reference)

    def inputs(self, sizes: dict[str, int]) -> dict[str, Array]:
        return sized_inputs(self.spec, self.samples, sizes)

    def check(self, arrays: Arrays, outputs: Arrays, sizes: dict[str, int]) -> None:
        """Raises GateError naming the output that differs from the reference. `arrays` are the inputs."""
        expected = _expected(self.spec, self.reference, sizes)
        case = " ".join(f"{name}={size}" for name, size in sizes.items()) or "the samples"
        for found in self.measure.check(case, arrays, outputs, expected):
            if not found.passed:
                raise GateError(
                    f"wrong answer at {case}, output '{found.output}': {found.reason}; nothing was measured, run "
                    "`deployer validate`"
                )


def _expected(spec: ModelSpec, reference: Reference, sizes: dict[str, int]) -> Arrays:
    """The recorded outputs at `sizes`: the gate's own case, or the first rows of its largest batch.

    `sized_inputs` gives the same first rows at every batch size, so for a model whose rows are independent the first
    rows of the largest batch are the answer to a smaller one.
    """
    for case in cases_for(spec):
        if case.sizes == sizes and case.contiguous:
            return reference.outputs[case.name]
    if not sizes:
        return reference.outputs["samples"]
    batch = spec.batch or ""
    largest = _expected(spec, reference, sizes | {batch: spec.dims[batch].max})
    rows = range(sizes[batch])
    return {tensor.name: np.take(largest[tensor.name], rows, axis=tensor.shape.index(batch)) for tensor in spec.outputs}


def _measure_row(runner: Runner, checker: _Checker, batch_size: int | None, limits: _Limits) -> InProcessRow:
    spec = runner.spec
    sizes = {name: dim.typical for name, dim in spec.dims.items()}
    if batch_size is not None and spec.batch is not None:
        sizes[spec.batch] = batch_size
    arrays = checker.inputs(sizes)
    with _collector_off():
        warmup = _warm_up(runner, checker, arrays, sizes, limits)
        latencies_ms, wall_s, last = _timed_runs(runner, arrays, limits)
    checker.check(arrays, last, sizes)
    return InProcessRow(
        batch_size=batch_size,
        sizes=sizes,
        runs=len(latencies_ms),
        latency=summarize(latencies_ms),
        runs_per_s=per_second(len(latencies_ms), wall_s),
        items_per_s=per_second(len(latencies_ms) * (batch_size or 1), wall_s),
        wall_s=wall_s,
        warmup=warmup,
    )


def _warm_up(runner: Runner, checker: _Checker, arrays: Arrays, sizes: dict[str, int], limits: _Limits) -> Warmup:
    """The first call, whose answer is checked, then runs until they are steady or a limit is reached."""
    started = time.perf_counter()
    outputs = runner(arrays)
    first_ms = (time.perf_counter() - started) * 1e3
    checker.check(arrays, outputs, sizes)
    latencies_ms: list[float] = []
    steady = False
    while not steady and len(latencies_ms) + 1 < limits.warmup_max_runs:
        before = time.perf_counter()
        if before - started >= limits.warmup_max_s:
            break
        runner(arrays)
        latencies_ms.append((time.perf_counter() - before) * 1e3)
        steady = is_steady(latencies_ms, _WARMUP_WINDOW)
    return Warmup(first_ms, len(latencies_ms) + 1, 0, time.perf_counter() - started, steady)


def _timed_runs(runner: Runner, arrays: Arrays, limits: _Limits) -> tuple[list[float], float, dict[str, Array]]:
    """Latencies in ms, wall clock in s, the last answer."""
    latencies_ms: list[float] = []
    started = time.perf_counter()
    while True:
        before = time.perf_counter()
        outputs = runner(arrays)
        after = time.perf_counter()
        latencies_ms.append((after - before) * 1e3)
        if after - started >= limits.duration_s and len(latencies_ms) >= limits.min_runs:
            return latencies_ms, after - started, outputs


def device_name(device: str) -> str:
    """The name of what ran: the CPU's for `cpu`, else the GPU's as its driver gives it. Raises MachineError."""
    if device == "cpu":
        return cpu_name()
    if not gpu_fault():
        return torch.cuda.get_device_name()
    raise MachineError(f"the bundle runs on '{device}', which this machine lacks; no figure is given under its name")


def _report(
    bundle: Bundle, rows: Sequence[InProcessRow], engine: str, threads: int | None, limits: _Limits, open_s: float
) -> BenchReport:
    target = bundle.manifest.target
    given = {
        "batch_sizes": None if rows[0].batch_size is None else [row.batch_size for row in rows],
        "duration_s": limits.duration_s,
        "threads": threads,
    }
    hidden = {
        "min_runs": limits.min_runs,
        "warmup_max_runs": limits.warmup_max_runs,
        "warmup_max_s": limits.warmup_max_s,
    }
    return BenchReport(
        target=str(bundle.path),
        rows=tuple(rows),
        environment=environment(
            *get_format(target.format).tools,
            device=target.device,
            device_name=device_name(target.device),
            engine=engine,
            threads=threads,
        ),
        command=command_line(str(bundle.path), given),
        options=given | hidden,
        notes=tuple(_notes(rows)),
        open_s=open_s,
    )


def _notes(rows: Sequence[InProcessRow]) -> Iterator[str]:
    for row in rows:
        label = f"batch {row.batch_size}" if row.batch_size is not None else "single runs"
        for note in row.latency.notes:
            yield f"{label}: {note}"
        if not row.warmup.steady:
            yield (
                f"{label}: latencies had not settled after {row.warmup.runs} warm-up runs "
                f"({row.warmup.wall_s:.1f} s); the machine is noisy or the artifact still compiles"
            )
