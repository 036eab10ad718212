"""`deployer serve`: TorchServe until Ctrl-C."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deployer.cli.console import emit_json, err, make_table, name_and_version, out, working

if TYPE_CHECKING:
    from deployer.serve import Server


@click.command("serve")
@click.argument("mars", metavar="MAR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="IPv4 address that inference listens on.")
@click.option("--port", type=int, default=8080, show_default=True, help="Inference; 0 for any free port.")
@click.option("--management-port", type=int, default=8081, show_default=True, help="Management, loopback only.")
@click.option("--metrics-port", type=int, default=8082, show_default=True, help="Prometheus metrics, loopback only.")
@click.option(
    "--start-timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds until it must be ready.",
)
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="Write the token here too (0600); removed at the end."
)
@click.option(
    "--verify-key",
    type=click.Path(path_type=Path),
    metavar="PEM",
    help="Serve only what is signed with the private half of this public key.  [default: $DEPLOYER_VERIFY_KEY]",
)
@click.option(
    "--default",
    "defaults",
    multiple=True,
    metavar="NAME=VERSION",
    help="Version for requests that name none; repeatable.  [default: of each model the first given]",
)
@click.option(
    "--allow-changes", is_flag=True, help="Let `deployer versions` add and remove archives while this server runs."
)
@click.option(
    "--drain-s",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="At the end, seconds to wait for requests in flight.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document when ready.")
def command(mars: tuple[Path, ...], as_json: bool, defaults: tuple[str, ...], **options: Any) -> None:
    """Serve MAR... with TorchServe on the loopback, with token auth, until Ctrl-C or SIGTERM.

    Ready means that every worker is up, that the batching asked for is in effect, and that real samples are answered
    as the eager model answers them. Ctrl-C takes no new request, answers those in flight, ends all of it and leaves
    nothing behind; a second one does not wait for them.
    """
    from deployer.serve import Server

    # SIGTERM as Ctrl-C: the same way out, also while starting.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup's wish is kept
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    server = Server(mars, ends_with_us=True, defaults=dict(map(name_and_version, defaults)), **options)
    with working("starting the server"):
        server.start()
    try:
        if as_json:
            emit_json(_document(server))
            sys.stdout.flush()
        else:
            _print(server)
        server.wait()
    except KeyboardInterrupt:
        err.print("· stopping", markup=False)
    finally:
        server.stop()


def _document(server: Server) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "models": [
            {
                "name": endpoint.name,
                "version": endpoint.version,
                "default": endpoint.default,
                "url": endpoint.url,
                "sample": str(endpoint.sample),
                "batch_size": endpoint.settings.batch_size,
                "max_batch_delay_ms": endpoint.settings.max_batch_delay_ms,
                "workers": endpoint.settings.workers,
            }
            for endpoint in server.endpoints
        ],
        "folder": str(server.folder),
        "token_file": str(server.token_file),
        "management_url": server.management_url,
        "metrics_url": server.metrics_url,
        "logs": str(server.folder / "logs"),
        "pid": server.pid,
    }


def _print(server: Server) -> None:
    numbers = ("batch size", "delay ms", "workers")
    table = make_table("model", "version", "default", *numbers, "URL", numbers=numbers)
    for endpoint in server.endpoints:
        settings = endpoint.settings
        table.add_row(
            endpoint.name,
            endpoint.version,
            "default" if endpoint.default else "",
            str(settings.batch_size),
            str(settings.max_batch_delay_ms),
            str(settings.workers),
            endpoint.url,
        )
    out.print(table)
    lines = {
        "token file": server.token_file,
        "management": server.management_url,
        "metrics": server.metrics_url,
        "logs": server.folder / "logs",
    }
    for name, value in lines.items():
        out.print(f"{name:<11} {value}", markup=False, soft_wrap=True)
    first = server.endpoints[0]
    out.print("\nTry it:\n", markup=False)
    out.print(
        f'curl -sS -H "Authorization: Bearer $(cat {server.token_file})" -H "Content-Type: application/json" '
        f"--data-binary @{first.sample} {first.url}\n",
        markup=False,
        soft_wrap=True,
    )
    out.print("Ctrl-C stops it.", markup=False)
