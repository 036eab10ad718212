"""`deployer package`: a gated bundle as a server's package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deployer.cli.console import emit_json, make_table, out, working
from deployer.errors import UsageError

if TYPE_CHECKING:
    from deployer.parity import ParityReport

_START_TIMEOUT_S = 300.0


@click.command("package")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--engine", default="torchserve", show_default=True, metavar="ENGINE", help="The server to package for.")
@click.option(
    "--batch-size", type=int, metavar="N", help="Requests that share a run at most.  [default: the batch Dim's typical]"
)
@click.option(
    "--max-batch-delay-ms", type=int, metavar="MS", help="How long the first of them waits at most.  [default: 2]"
)
@click.option("--workers", type=int, metavar="N", help="Processes; they divide the cores.  [default: 2, on one core 1]")
@click.option(
    "--intra-op-threads", type=int, metavar="N", help="Threads with which each computes.  [default: cores over workers]"
)
@click.option(
    "--response-timeout-s",
    type=int,
    metavar="S",
    help="A run that takes longer is answered 504, its worker started anew.  [default: 120]",
)
@click.option(
    "--max-queue-wait-s",
    type=int,
    metavar="S",
    help="A request that would wait longer is answered 503 with Retry-After.  [default: 10]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("model_store"),
    show_default=True,
    help="Folder for the package.",
)
@click.option(
    "--allow-unexecuted", is_flag=True, help="Package an engine that was built and, without a GPU, never executed."
)
@click.option(
    "--handler", type=click.Path(path_type=Path), help="Python file with preprocess and postprocess (docs/hooks.md)."
)
@click.option(
    "--handler-file",
    "handler_files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A file that it reads or imports beside itself, e.g. tokenizer.json; repeatable.",
)
@click.option(
    "--handler-requirement",
    "handler_requirements",
    multiple=True,
    metavar="REQUIREMENT",
    help="What it needs installed in the container, e.g. pillow; repeatable.",
)
@click.option(
    "--sign-key", type=click.Path(path_type=Path), metavar="PEM", help="Sign the package with this private EC key."
)
@click.option(
    "--no-serve-check", is_flag=True, help="Do not try the package in a real server, which takes some 10 s; it is said."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    bundle: Path,
    engine: str,
    batch_size: int | None,
    max_batch_delay_ms: int | None,
    workers: int | None,
    intra_op_threads: int | None,
    response_timeout_s: int | None,
    max_queue_wait_s: int | None,
    output: Path,
    allow_unexecuted: bool,
    handler: Path | None,
    handler_files: tuple[Path, ...],
    handler_requirements: tuple[str, ...],
    sign_key: Path | None,
    no_serve_check: bool,
    as_json: bool,
) -> None:
    """Make a package (for TorchServe a .mar) of BUNDLE, which must have passed the gate.

    Before it takes its name, the package is loaded by the server's own loader in a fresh process, and served by a real
    server started for it: real samples in every form of body must be answered as the eager model answers them.
    """
    from deployer.files import sha256_of
    from deployer.package import HookFiles, package
    from deployer.package.sbom import sbom_of
    from deployer.package.torchserve import read_mar, read_settings
    from deployer.signature import signature_of

    if handler is None and (handler_files or handler_requirements):
        raise UsageError("--handler-file and --handler-requirement go with --handler")
    hooks = HookFiles(handler, handler_files, handler_requirements) if handler is not None else None
    reports: list[ParityReport] = []

    def check(package: Path) -> None:
        from deployer.serve import serve_check

        reports.append(serve_check(package, start_timeout_s=_START_TIMEOUT_S))

    with working(f"packaging {bundle}"):
        path = package(
            bundle, engine=engine, output=output, batch_size=batch_size, max_batch_delay_ms=max_batch_delay_ms,
            workers=workers, intra_op_threads=intra_op_threads, response_timeout_s=response_timeout_s,
            max_queue_wait_s=max_queue_wait_s, allow_unexecuted=allow_unexecuted, hooks=hooks,
            sign_key=sign_key, check=None if no_serve_check else check,
        )  # fmt: skip
    mar = read_mar(path)
    settings = read_settings(mar)
    facts = {
        "package": str(path),
        "engine": engine,
        "model": mar.name,
        "version": mar.version,
        "size_bytes": path.stat().st_size,
        "sha256": sha256_of(path),
        "batch_size": settings.batch_size,
        "max_batch_delay_ms": settings.max_batch_delay_ms,
        "workers": settings.workers,
        "intra_op_threads": settings.intra_op_threads,
        "max_request_bytes": settings.max_request_bytes,
        "max_response_bytes": settings.max_response_bytes,
        "job_queue_size": settings.job_queue_size,
        "response_timeout_s": settings.response_timeout_s,
        "max_queue_wait_s": settings.max_queue_wait_s,
        "served": _served(reports, no_serve_check),
        "handler": str(handler) if handler is not None else None,
        "signature": str(signature_of(path)) if sign_key is not None else None,
        "sbom": str(sbom_of(path)) if sbom_of(path).is_file() else None,
    }
    if as_json:
        emit_json({"schema_version": 1, **facts})
        return
    table = make_table("package", str(path))
    for name, value in list(facts.items())[1:]:
        table.add_row(name, value["said"] if isinstance(value, dict) else str(value))
    out.print(table)


def _served(reports: list[ParityReport], left_out: bool) -> dict[str, Any]:
    """What the real server that was started for the package answered, or why there was none."""
    if not reports:
        why = "--no-serve-check" if left_out else "this machine cannot run it"
        return {"checked": False, "said": f"not tried in a real server: {why}"}
    report = reports[0]
    return {
        "checked": True,
        "forms": report.forms,
        "requests": report.sent,
        "right": report.right,
        "wrong_requests": report.wrong,
        "refused": report.refused,
        "said": f"tried in a real server: {report.right} of {report.sent} answers right ({', '.join(report.forms)}), "
        f"{report.refused} of {report.wrong} wrong requests refused",
    }
