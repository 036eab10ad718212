"""`deployer train`: a training run that ends in a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import click

from deployer.cli.console import error_line, out


@click.command("train")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Lay a value over the file: optimizer.lr=0.001."
)
@click.option(
    "--nproc", "processes", default=1, show_default=True, help="Processes on this machine that train together."
)
@click.option(
    "--max-restarts", default=0, show_default=True, help="How often a job that died goes on from its last save."
)
def command(config: Path, changes: tuple[str, ...], processes: int, max_restarts: int) -> int:
    """Train what CONFIG (a YAML file) says; where its output folder holds saves, go on from the last whole one.

    The run ends in OUTPUT/checkpoint, which `deployer export` takes without another word. For several machines start
    each process with torchrun: `torchrun … -m deployer.training CONFIG`.
    """
    from deployer.training.config import parse_changes, read_config
    from deployer.training.launch import launch
    from deployer.training.running import STOPPED_EXIT_CODE, describe, run

    found = read_config(config, parse_changes(changes))
    if processes == 1 and not max_restarts:
        outcome = run(found)
        for line in describe(outcome):
            out.print(line, markup=False, soft_wrap=True)
        return STOPPED_EXIT_CODE if outcome.stopped else 0
    failure = launch([str(config), *changes], processes, max_restarts)
    if failure is None:
        return 0
    error_line(f"process {failure.rank} of {processes}: {failure.message}")
    return failure.exit_code
