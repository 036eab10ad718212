"""`deployer verify`: a server held to a bundle."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from deployer.cli.console import emit_json, make_table, out, working
from deployer.errors import GateError


@click.command("verify")
@click.argument("url")
@click.option(
    "--bundle", required=True, type=click.Path(path_type=Path), help="The bundle that the model was packaged from."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    envvar="DEPLOYER_TOKEN_FILE",
    show_envvar=True,
    help="File that holds the bearer token.",
)
@click.option("--concurrency", type=click.IntRange(1, 1024), default=16, show_default=True, help="Requests at once.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds until a request must be answered.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(url: str, bundle: Path, token_file: Path | None, concurrency: int, timeout_s: float, as_json: bool) -> None:
    """Does the model at URL answer what BUNDLE's model answers?

    The bundle's samples are sent in every form of body, alone and together with wrong requests, and each answer is held
    to the eager model's. Exit code 1 when one differs, or a wrong request is not refused by name.
    """
    from deployer.client import read_token
    from deployer.parity import verify

    token = read_token(token_file) if token_file is not None else None
    with working(f"verifying {url}"):
        report = verify(url, bundle, token=token, concurrency=concurrency, timeout_s=timeout_s)
    if as_json:
        emit_json({**msgspec.to_builtins(report), "passed": report.passed})
    else:
        table = make_table("verified", "of", "what", numbers=("verified", "of"))
        table.add_row(str(report.right), str(report.sent), f"answered as the eager model: {', '.join(report.forms)}")
        table.add_row(str(report.refused), str(report.wrong), "wrong requests refused by name, their neighbours unhurt")
        if report.bit_compared:
            table.add_row(str(report.bit_equal), str(report.bit_compared), "equal to the artifact run here, bit by bit")
        out.print(table)
        for note in report.notes:
            out.print(f"note: {note}", markup=False, soft_wrap=True)
        for reason in report.reasons:
            out.print(f"failed: {reason}", markup=False, soft_wrap=True)
    if not report.passed:
        raise GateError(f"{url} does not answer as '{bundle}': {report.reasons[0]}")
