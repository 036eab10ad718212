"""`deployer versions`: what a running server serves, and changing it while it serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deployer.cli.console import emit_json, err, make_table, name_and_version, out, working

if TYPE_CHECKING:
    from deployer.serve.management import Instance


@click.command("versions")
@click.option(
    "--server",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder of the server, as `deployer serve --json` prints it.  [default: the only one that you run]",
)
@click.option(
    "--add",
    "added",
    multiple=True,
    metavar="MAR",
    type=click.Path(path_type=Path),
    help="Serve one more archive; repeatable. The server was started with --allow-changes.",
)
@click.option(
    "--default",
    "defaults",
    multiple=True,
    metavar="NAME=VERSION",
    help="Send requests that name no version to this one; repeatable.",
)
@click.option(
    "--remove",
    "removed",
    multiple=True,
    metavar="NAME=VERSION",
    help="Take a version away once it is idle; repeatable. The server was started with --allow-changes.",
)
@click.option(
    "--start-timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds until an archive that is added must be ready.",
)
@click.option(
    "--drain-s",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds until a version that is removed must be idle.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    folder: Path | None,
    added: tuple[Path, ...],
    defaults: tuple[str, ...],
    removed: tuple[str, ...],
    start_timeout_s: float,
    drain_s: float,
    as_json: bool,
) -> None:
    """Show the versions that a running server of yours serves; add, make default, remove, in this order.

    No request is lost: an archive that is added must answer its own samples before anybody is sent to it, a request
    that was taken is answered by the version that was the default then, and a version goes only when it is idle.
    """
    from deployer.serve.management import find_instance

    moves = [name_and_version(text) for text in defaults]
    ends = [name_and_version(text) for text in removed]
    instance = find_instance(folder)
    for archive in added:
        with working(f"adding {archive}"):
            instance.add(archive, start_timeout_s)
    for name, version in moves:
        instance.set_default(name, version)
        err.print(f"· the default of {name} is {version}", markup=False)
    for name, version in ends:
        with working(f"removing {name} {version}"):
            instance.remove(name, version, drain_s)
    _show(instance, as_json)


def _show(instance: Instance, as_json: bool) -> None:
    versions = instance.versions()
    if as_json:
        rows = [
            {
                "name": one.name,
                "version": one.version,
                "default": one.default,
                "workers": one.workers,
                "ready_workers": one.ready,
                "pending_requests": one.pending,
                "url": f"{instance.state.inference_url}/predictions/{one.name}/{one.version}",
            }
            for one in versions
        ]
        emit_json({"schema_version": 1, "server": str(instance.folder), "versions": rows})
        return
    numbers = ("workers", "ready", "in queue")
    table = make_table("model", "version", "default", *numbers, "URL", numbers=numbers)
    for one in versions:
        url = f"{instance.state.inference_url}/predictions/{one.name}/{one.version}"
        counts = (str(one.workers), str(one.ready), str(one.pending))
        table.add_row(one.name, one.version, "default" if one.default else "", *counts, url)
    out.print(table)
