"""`deployer validate`: the gate again, on this machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from deployer.cli.console import emit_json, make_table, out, working
from deployer.errors import GateError, UsageError

if TYPE_CHECKING:
    from deployer.validate import ValidationReport

log = logging.getLogger(__name__)


@click.command("validate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Compare with this checkpoint's eager model, run here and now.",
)
@click.option("--localize", "localized", is_flag=True, help="Name the first operator that departs; needs --checkpoint.")
@click.option("--threads", type=click.IntRange(min=1), help="Compute threads.  [default: the engine's own]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(bundle: Path, checkpoint: Path | None, localized: bool, threads: int | None, as_json: bool) -> None:
    """Run the numeric gate on BUNDLE again, on this machine.

    The reference is the eager model's answers recorded at export, or with --checkpoint the eager model itself.
    Exit code 1 when an output differs by more than is allowed.
    """
    from deployer.checkpoint import load_checkpoint
    from deployer.validate import localize, validate

    if localized and checkpoint is None:
        raise UsageError("--localize runs the model operator by operator; add --checkpoint, the one it was made from")
    with working(f"validating {bundle}"):
        loaded = load_checkpoint(checkpoint) if checkpoint is not None else None
        report = validate(bundle, checkpoint=loaded, threads=threads)
        departure = None
        if localized and loaded is not None and not report.passed:
            log.info("looking for the operator that departs")
            departure = localize(bundle, report, loaded)
    if as_json:
        emit_json({**msgspec.to_builtins(report), "departure": msgspec.to_builtins(departure)})
    else:
        _print_table(report)
        if departure is not None:
            out.print(f"departs {departure}", markup=False, soft_wrap=True)
    if not report.passed:
        raise GateError(f"'{bundle}' failed the gate: {report.reasons[0]}")


def _print_table(report: ValidationReport) -> None:
    numbers = ("max abs error", "max rel error", "cosine", "argmax agrees", "error / allowed")
    table = make_table("case", "output", "gate", *numbers, numbers=numbers)
    refusals = [check for check in report.checks if check.kind == "refusal"]
    for check in report.checks:
        if check.kind == "refusal":
            if not check.passed:
                table.add_row(check.case, "–", "[red]failed[/]", "–", "–", "–", "–", "–")
            continue
        # An answer that never came, or came in another shape or dtype, has no figures: zeros would look like agreement.
        measured = check.passed or check.error_over_allowed > 0
        figures = (
            f"{check.max_abs:.2e}",
            f"{check.max_rel:.2e}",
            f"{check.cosine:.6f}",
            "–" if check.argmax_agreement is None else f"{check.argmax_agreement:.1%}",
            f"{check.error_over_allowed:.3f}",
        )
        verdict = "[green]passed[/]" if check.passed else "[red]failed[/]"
        table.add_row(check.case, check.output, verdict, *(figures if measured else ["–"] * len(numbers)))
    out.print(table)
    refused = sum(check.passed for check in refusals)
    lines = [f"{refused} of {len(refusals)} inputs that the spec does not allow were refused"]
    lines += [f"not judged at {case}: {reason}" for case, reason in report.skipped.items()]
    lines += [f"note: {note}" for note in report.notes]
    if not report.batch_independent:
        lines.append(f"requests are served one at a time: {report.batch_reason}")
    lines += [f"failed: {reason}" for reason in report.reasons]
    lines.append(f"{'passed' if report.passed else 'failed'} on {report.engine}, precision {report.precision}")
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
