"""`deployer compare`: two servers, or two versions, given the same requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from deployer.cli.console import emit_json, make_table, out, working
from deployer.errors import GateError

if TYPE_CHECKING:
    from deployer.compare import CompareReport


@click.command("compare")
@click.argument("url_a")
@click.argument("url_b")
@click.option(
    "--requests",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Samples (.npz, .npy, .safetensors; a row is a request), or JSON bodies, one a line (.jsonl).",
)
@click.option(
    "--bundle", type=click.Path(path_type=Path), help="Hold B's values to A's within this bundle's tolerance."
)
@click.option("--max-abs-error", type=float, metavar="X", help="Hold B's values to A's within X.")
@click.option(
    "--max-rel-error", type=float, metavar="X", help="The same, of the larger of both; with both, one is enough."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    envvar="DEPLOYER_TOKEN_FILE",
    show_envvar=True,
    help="File that holds the bearer token of both.",
)
@click.option("--token-file-b", type=click.Path(path_type=Path), help="That of B, where it has another.")
@click.option(
    "--body", metavar="FORM", help="json, npy, npz, safetensors, oip or oip-binary.  [default: as the file is]"
)
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="How often each request is sent.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds until a request must be answered.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    url_a: str,
    url_b: str,
    requests: Path,
    token_file: Path | None,
    token_file_b: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Send the same requests to URL_A and URL_B, in turn, and say where they agree and how long each takes.

    Exit code 1 when statuses, outputs or shapes differ, or values by more than the tolerance that is given.
    """
    from deployer.client import read_token
    from deployer.compare import compare

    token_a = read_token(token_file) if token_file is not None else None
    token_b = read_token(token_file_b) if token_file_b is not None else token_a
    with working(f"comparing {url_a} with {url_b}"):
        report = compare(url_a, url_b, requests, token_a=token_a, token_b=token_b, **options)
    if as_json:
        emit_json({**msgspec.to_builtins(report), "passed": report.passed})
    else:
        _print(report)
    if not report.passed:
        raise GateError(f"{url_b} disagrees with {url_a} on {report.disagreements} requests: {report.reasons[0]}")


def _print(report: CompareReport) -> None:
    numbers = ("compared", "equal", "max abs error", "max rel error")
    table = make_table("output", *numbers, numbers=numbers)
    for name, output in report.outputs.items():
        errors = (f"{output.max_abs_error:.3g}", f"{output.max_rel_error:.3g}")
        table.add_row(name or "(the sole one)", str(output.compared), str(output.bit_equal), *errors)
    out.print(table)
    times = ("answered", "p50 ms", "p99 ms")
    table = make_table("server", *times, "URL", numbers=times)
    for side, url in (("a", report.url_a), ("b", report.url_b)):
        latency = report.latency[side]
        figures = ("no data" if value is None else f"{value:.2f}" for value in (latency.p50_ms, latency.p99_ms))
        table.add_row(side.upper(), str(latency.samples), *figures, url)
    out.print(table)
    lines = [
        f"{report.bit_equal} of {report.answered} answers equal in every value, of {report.requests} requests",
        f"tolerance: {report.tolerance}",
    ]
    if report.labels_compared:
        lines.append(f"{report.labels_equal} of {report.labels_compared} labels equal")
    lines += [f"{count} requests answered {pair} (A/B)" for pair, count in report.statuses.items()]
    if report.p50_ratio is not None and report.p99_ratio is not None and report.pair_ratio is not None:
        lines.append(
            f"B over A: p50 {report.p50_ratio:.2f}, p99 {report.p99_ratio:.2f}, median of {report.answered} pairs "
            f"{report.pair_ratio:.2f}"
        )
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"differs: {reason}" for reason in report.reasons]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
