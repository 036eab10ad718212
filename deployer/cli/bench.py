"""`deployer bench`: latency and throughput of a bundle in process, or of a served model over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich import box
from rich.table import Table

from deployer.cli.console import emit_json, err, json_bytes, out, working

if TYPE_CHECKING:
    from deployer.bench import BenchReport, HttpRow, InProcessRow, Latency


def _numbers(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """`1,8,32` as whole numbers."""
    if text is None:
        return None
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise click.BadParameter(f"'{text}' is no list of whole numbers such as 1,8,32") from error


@click.command("bench")
@click.argument("target", metavar="BUNDLE|URL")
@click.option(
    "--batch-sizes", callback=_numbers, metavar="N,N,…", help="Bundle: batch sizes, a row each.  [default: 1,8,32]"
)
@click.option("--threads", type=int, help="Bundle: compute threads.  [default: the engine's own]")
@click.option(
    "--concurrency", callback=_numbers, metavar="N,N,…", help="URL: clients at once, a row each.  [default: 1,8,32]"
)
@click.option("--duration-s", type=float, help="Seconds to measure each row.  [default: 2 for a bundle, 5 for a URL]")
@click.option("--requests", type=int, help="URL: requests to measure each row, instead of seconds.")
@click.option("--bundle", type=click.Path(path_type=Path), help="URL: send its samples, hold answers to its reference.")
@click.option(
    "--input", "input_path", type=click.Path(path_type=Path), help="URL: what to send: .json, .npy, .npz, .safetensors."
)
@click.option("--body", metavar="json|npy", help="URL: how to send it.  [default: json; npy for a lone .npy]")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    envvar="DEPLOYER_TOKEN_FILE",
    show_envvar=True,
    help="URL: file that holds the bearer token.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    help="URL: seconds until a request counts as timed out.  [default: 60]",
)
@click.option(
    "--split", metavar="VERSION=W,…", help="URL: send each request to a version drawn with these weights; a row each."
)
@click.option("--seed", type=int, help="URL: what --split draws from.  [default: 0]")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the JSON document to this file too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(ctx: click.Context, /, target: str, output: Path | None, as_json: bool, **options: Any) -> int:
    """Measure BUNDLE in this process, or the model that answers at URL.

    Warm-up is in no figure and is reported apart. Answers are held to the bundle's reference while measuring; rates are
    of right answers over the wall clock. Exit code 1 when an answer was wrong or a request failed.
    """
    from deployer.bench import bench, is_url
    from deployer.files import write_atomic

    if ctx.get_parameter_source("token_file") is ParameterSource.ENVIRONMENT and not is_url(target):
        options["token_file"] = None  # set for every command of a shell, not for this one
    with working(f"measuring {target}"):
        report = bench(target, **options)
    if output is not None:
        write_atomic(output, json_bytes(report))
    if as_json:
        emit_json(report)
    else:
        _print(report)
    if not report.passed:
        err.print("error: requests failed or answers were wrong; see the counts", style="red", soft_wrap=True)
    return 0 if report.passed else 1


def _print(report: BenchReport) -> None:
    from deployer.bench import HttpRow, InProcessRow

    in_process = [row for row in report.rows if isinstance(row, InProcessRow)]
    over_http = [row for row in report.rows if isinstance(row, HttpRow)]
    if in_process:
        out.print(_in_process_table(in_process))
    if over_http:
        out.print(_latency_table(over_http))
        out.print(_counts_table(over_http))
    for line in _lines(report):
        out.print(line, markup=False, soft_wrap=True)


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="right")
    return table


_LATENCY_HEADERS = ("p50\nms", "p90\nms", "p95\nms", "p99\nms", "max\nms", "mean\nms")


def _latency_cells(latency: Latency) -> list[str]:
    figures = (latency.p50_ms, latency.p90_ms, latency.p95_ms, latency.p99_ms, latency.max_ms, latency.mean_ms)
    return [_figure(figure) for figure in figures]


def _figure(value: float | None) -> str:
    """Three significant digits, whole numbers from 100 on."""
    if value is None:
        return "no data"
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _in_process_table(rows: list[InProcessRow]) -> Table:
    table = _table(
        "In process, one caller", "batch", "runs", *_LATENCY_HEADERS, "items/s", "first\nms", "warm-up\nruns"
    )
    for row in rows:
        table.add_row(
            str(row.batch_size or "–"),
            f"{row.runs:,}",
            *_latency_cells(row.latency),
            _figure(row.items_per_s),
            _figure(row.warmup.first_ms),
            str(row.warmup.runs),
        )
    return table


def _latency_table(rows: list[HttpRow]) -> Table:
    split = any(row.version for row in rows)
    versions = ("version",) if split else ()
    table = _table("Right answers, closed loop", "clients", *versions, *_LATENCY_HEADERS, "requests/s", "items/s")
    for row in rows:
        table.add_row(
            str(row.concurrency),
            *((row.version,) if split else ()),
            *_latency_cells(row.latency),
            _figure(row.requests_per_s),
            "unknown" if row.items_per_s is None else _figure(row.items_per_s),
        )
    return table


def _counts_table(rows: list[HttpRow]) -> Table:
    split = any(row.version for row in rows)
    versions = ("version",) if split else ()
    headers = (
        "clients",
        *versions,
        "requests",
        "ok",
        "wrong",
        "status\nerrors",
        "conn.\nerrors",
        "time-\nouts",
        "connec-\ntions",
    )
    table = _table("Requests", *headers, "client\nbusy %", "first\nms", "warm-up\nrequests")
    for row in rows:
        counts = (row.requests, row.ok, row.wrong, row.status_errors, row.connection_errors, row.timeouts)
        table.add_row(
            str(row.concurrency),
            *((row.version,) if split else ()),
            *(f"{count:,}" for count in (*counts, row.connections)),
            f"{100 * row.client_busy:.0f}",
            _figure(row.warmup.first_ms),
            str(row.warmup.runs),
        )
    return table


def _lines(report: BenchReport) -> list[str]:
    place = report.environment
    ran = f"{place.engine} on {place.device_name}, " if place.engine else f"client on {place.cpu}, "
    threads = "" if place.engine is None else f", threads: {place.threads or 'the engine’s default'}"
    versions = ", ".join(f"{name} {version}" for name, version in place.versions.items())
    opened = [f"opened in {report.open_s:.2f} s, hashes checked"] if report.open_s is not None else []
    return [
        *(f"note: {note}" for note in report.notes),
        *opened,
        f"{ran}{place.cores} usable cores{threads}",
        versions,
        report.command,
    ]
