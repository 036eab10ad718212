"""`deployer validate`: the gate again, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deployer.cli.console import emit_json, make_table, out, working
from deployer.errors import GateError

if TYPE_CHECKING:
    from deployer.validate import ValidationReport


@click.command("validate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Compare with this checkpoint's eager model, run here and now.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Compute threads.  [default: the engine's own]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(bundle: Path, checkpoint: Path | None, threads: int | None, as_json: bool) -> None:
    """Run the numeric gate on BUNDLE again, on this machine.

    The reference is the eager model's answers recorded at export, or with --checkpoint the eager model itself.
    Exit code 1 when an output differs by more than is allowed.
    """
    from deployer.checkpoint import load_checkpoint
    from deployer.validate import validate

    with working(f"validating {bundle}"):
        loaded = load_checkpoint(checkpoint) if checkpoint is not None else None
        report = validate(bundle, checkpoint=loaded, threads=threads)
    if as_json:
        emit_json(report)
    else:
        _print_table(report)
    if not report.passed:
        raise GateError(f"'{bundle}' failed the gate: {report.reasons[0]}")


def _print_table(report: ValidationReport) -> None:
    numbers = ("max abs error", "max rel error", "cosine", "argmax agrees", "error / allowed")
    table = make_table("case", "output", "gate", *numbers, numbers=numbers)
    for check in report.checks:
        table.add_row(
            check.case,
            check.output,
            "[green]passed[/]" if check.passed else "[red]failed[/]",
            f"{check.max_abs:.2e}",
            f"{check.max_rel:.2e}",
            f"{check.cosine:.6f}",
            "–" if check.argmax_agreement is None else f"{check.argmax_agreement:.1%}",
            f"{check.error_over_allowed:.3f}",
        )
    out.print(table)
    out.print(
        f"{'passed' if report.passed else 'failed'} on {report.engine}, precision {report.precision}", markup=False
    )
