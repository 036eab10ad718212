"""`deployer doctor`: what this machine can do."""

from __future__ import annotations

import click

from deployer.cli.console import emit_json, make_table, out, working

_STYLES = {"ok": "[green]ok[/]", "missing": "[yellow]missing[/]", "bad": "[red]bad[/]"}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool) -> int:
    """Show versions, providers that really load, GPU, Java and compiler; what is missing and the line that installs it.

    Exit code 0, or 4 when something installed here contradicts itself.
    """
    from deployer.doctor import examine

    with working("examining this machine"):
        diagnosis = examine()
    if as_json:
        emit_json(diagnosis)
        return 0 if diagnosis.healthy else 4
    table = make_table("subject", "status", "found", "for")
    for finding in diagnosis.findings:
        table.add_row(finding.subject, _STYLES[finding.status], finding.found, finding.needed_for)
    out.print(table)
    for finding in diagnosis.findings:
        if finding.install:
            out.print(f"{finding.subject}: {finding.install}", markup=False, soft_wrap=True)
    return 0 if diagnosis.healthy else 4
