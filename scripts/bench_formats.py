"""Every format of the digits example beside the eager model, in one process and in interleaved rounds.

scripts/bench formats --rounds 20 --threads 1

Machines are noisy and differ, so no time is printed, only ratios: eager's median over a candidate's in the same round,
then the median over rounds with the smallest and the largest. Eager is measured a second time in each round as if it
were a candidate ("eager again"): how far its range strays from 1.00 is what this machine's noise alone does. Each
round starts with another candidate; before a candidate's runs some are thrown away, so that none pays for the caches
and the spinning threads that its predecessor left.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from deployer.bundle import Bundle
from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import DeployerError
from deployer.export import export_all
from deployer.formats import Loaded, Target
from deployer.machine import cpu_name, usable_cores
from deployer.runtime import Runner, open_bundle
from deployer.samples import sized_inputs
from deployer.spec import Arrays
from deployer.validate import TOLERANCES, compare
from deployer.versions import tool_versions

TARGETS = (
    Target("torchscript"),
    Target("exported"),
    Target("exported", compile="default"),
    Target("aoti", compile="max-autotune"),
    Target("onnx"),
)
CHECKPOINT = Path("examples/digits/checkpoint")
OUTPUT = Path("build/bench")
EAGER, EAGER_AGAIN = "eager", "eager again"
DISCARDED_RUNS = 5
SLOT_S = 0.05  # measured per candidate and round

Ratios = Mapping[str, Sequence[float]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench formats", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch-sizes", default="1,8,32", help="default: 1,8,32")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every candidate; default: all cores")
    options = parser.parse_args()
    try:
        options.batch_sizes = [int(size) for size in options.batch_sizes.split(",")]
    except ValueError:
        parser.error(f"--batch-sizes {options.batch_sizes}: whole numbers such as 1,8,32 are expected")
    if min(options.rounds, options.threads, *options.batch_sizes) < 1:
        parser.error("--rounds, --threads and --batch-sizes take numbers of 1 or more")
    return options


def digits_bundles() -> tuple[Checkpoint, list[Bundle]]:
    """The example's checkpoint, trained where absent, and a gated bundle of it for each target; current ones stay."""
    if not CHECKPOINT.is_dir():
        subprocess.run([sys.executable, "examples/digits/train.py", str(CHECKPOINT)], check=True)
    checkpoint = load_checkpoint(CHECKPOINT)
    outcomes = export_all(checkpoint, TARGETS, OUTPUT, reuse=True)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return checkpoint, [outcome.bundle for outcome in outcomes if outcome.bundle is not None]


def open_all(checkpoint: Checkpoint, bundles: Sequence[Bundle], threads: int, stack: ExitStack) -> dict[str, Runner]:
    """Candidates by name. Eager runs behind the same checks of inputs and outputs as the artifacts do."""
    torch.set_num_threads(threads)
    model = checkpoint.build()

    def eager() -> Runner:
        return Runner(checkpoint.spec, Loaded(lambda arrays: run_eager(model, checkpoint.spec, arrays), "eager"))

    runners = {EAGER: eager(), EAGER_AGAIN: eager()}
    for bundle in bundles:
        runners[bundle.manifest.target.slug] = stack.enter_context(open_bundle(bundle, threads=threads))
    return runners


def check_answers(runners: Mapping[str, Runner], inputs: Arrays) -> None:
    """Every candidate answers what eager answers, or nothing is measured."""
    expected = runners[EAGER](inputs)
    for name, runner in runners.items():
        got = runner(inputs)
        for output, array in expected.items():
            found = compare(name, output, got[output], array, TOLERANCES["fp32"], noise=0.0)
            if not found.passed:
                sys.exit(f"error: {name} answers wrongly, output '{output}': {found.reason}; nothing was measured")


def measure(runners: Mapping[str, Runner], inputs: Arrays, rounds: int) -> Ratios:
    """By candidate, eager's median latency over its own, a value a round."""
    names = list(runners)
    ratios: dict[str, list[float]] = {name: [] for name in names if name != EAGER}
    for turn in range(rounds):
        first = turn % len(names)
        medians = {name: median_latency_s(runners[name], inputs) for name in names[first:] + names[:first]}
        for name, values in ratios.items():
            values.append(medians[EAGER] / medians[name])
    return ratios


def median_latency_s(runner: Runner, inputs: Arrays) -> float:
    gc.collect()
    gc.disable()
    try:
        for _ in range(DISCARDED_RUNS):
            runner(inputs)
        latencies_s: list[float] = []
        started = time.perf_counter()
        while time.perf_counter() - started < SLOT_S or len(latencies_s) < DISCARDED_RUNS:
            before = time.perf_counter()
            runner(inputs)
            latencies_s.append(time.perf_counter() - before)
    finally:
        gc.enable()
    return statistics.median(latencies_s)


def cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def print_table(by_batch: Mapping[int, Ratios], rounds: int) -> None:
    print(f"times as fast as eager: median over {rounds} rounds (smallest–largest)\n")
    print("| target | " + " | ".join(f"batch {size}" for size in by_batch) + " |")
    print("| --- |" + " ---: |" * len(by_batch))
    for name in next(iter(by_batch.values())):
        print(f"| {name} | " + " | ".join(cell(ratios[name]) for ratios in by_batch.values()) + " |")


def print_environment(bundles: Sequence[Bundle], threads: int) -> None:
    tools = sorted({tool for bundle in bundles for tool in bundle.manifest.tool_versions} - {"python", "deployer"})
    versions = ", ".join(f"{name} {version}" for name, version in tool_versions(*tools).items())
    print(f"\n{cpu_name()}, {usable_cores()} usable cores, threads: {threads}, load average {os.getloadavg()[0]:.1f}")
    print(versions)


def main() -> None:
    options = parse_arguments()
    checkpoint, bundles = digits_bundles()
    spec = checkpoint.spec
    typical = {name: dim.typical for name, dim in spec.dims.items()}
    by_batch: dict[int, Ratios] = {}
    with ExitStack() as stack:
        runners = open_all(checkpoint, bundles, options.threads, stack)
        for size in options.batch_sizes:
            inputs = sized_inputs(spec, checkpoint.samples, typical | {str(spec.batch): size})
            check_answers(runners, inputs)
            print(f"measuring batch {size}", file=sys.stderr)
            by_batch[size] = measure(runners, inputs, options.rounds)
    print_table(by_batch, options.rounds)
    print_environment(bundles, options.threads)


if __name__ == "__main__":
    try:
        main()
    except DeployerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
