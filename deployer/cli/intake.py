"""The options that say how a checkpoint is read, alike for every verb that reads one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]


def intake_options(command: Command) -> Command:
    """--weights, --allow-global and --trust-pickle, as `weights`, `allow_globals` and `trust_pickle`."""
    for option in (
        click.option(
            "--trust-pickle", is_flag=True,
            help="Unpickle the file with all that it asks for. This runs code that the file chooses; it is recorded.",
        ),
        click.option(
            "--allow-global", "allow_globals", multiple=True, metavar="NAME",
            help="Full name of a pickled class beside the weights to skip; nothing of it runs. Repeatable.",
        ),
        click.option(
            "--weights", metavar="SET",
            help="Which weights of a file with several: raw, ema or a place that inspect lists.  [default: raw]",
        ),
    ):  # fmt: skip
        command = option(command)
    return command
