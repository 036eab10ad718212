"""The command line: one file a verb, each calling one function of the package.

A verb is one module here that ends in `command`, and one line in VERBS. Modules are imported when their verb runs, so
`deployer --help` starts without torch.
"""

from __future__ import annotations

import importlib
import keyword
import sys
from typing import Any

import click

from deployer.cli.console import error_line, setup_logging
from deployer.errors import DeployerError, first_line, with_reason

#: verb → first line of its help; the module has the verb's name, with a `_` where that is a word of Python
VERBS = {
    "init": "Write a commented deployer.yaml for a model.",
    "inspect": "Show what a checkpoint, bundle or .mar holds; runs no code.",
    "import": "Write a self-describing folder of any kind of checkpoint.",
    "train": "Train a model; the run ends in a checkpoint folder.",
    "export": "Export a checkpoint, one gated bundle a target.",
    "validate": "Run the numeric gate again on this machine.",
    "package": "Make a .mar of a bundle that has passed the gate.",
    "serve": "Serve .mar files on loopback until Ctrl-C.",
    "versions": "Show, add, make default or remove versions of a running server.",
    "verify": "Hold a server to the bundle that it serves.",
    "predict": "Send one request to a served model.",
    "compare": "Send the same requests to two servers, and compare.",
    "bench": "Measure latency and throughput of a bundle or a URL.",
    "doctor": "Show what this machine can do, and what is missing.",
    "build": "Write a container build context, and build it where possible.",
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"deployer.cli.{cmd_name}{'_' if keyword.iskeyword(cmd_name) else ''}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from deployer.errors import nearest

            name = args[0] if args else ""
            raise click.UsageError(f"no command '{name}'{nearest(name, VERBS)}", ctx) from error


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show tracebacks and the libraries' own messages.")
@click.version_option(package_name="deployer")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """From a PyTorch checkpoint to a served model, every step proved equal to the model it came from.

    Exit codes: 0 done; 1 a gate failed; 2 bad input; 3 some targets failed, others are done; 4 this machine lacks
    what was asked for.
    """
    ctx.obj = debug
    setup_logging(debug)


def main() -> None:
    """Entry point: runs the verb and turns errors into one line and an exit code."""
    debug = "--debug" in sys.argv[1:]
    try:
        result: Any = cli.main(standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else str(error))
        sys.exit(2)
    except click.UsageError as error:
        where = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
        error_line(f"{' '.join(error.format_message().split())}{where}")
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        error_line("interrupted")
        sys.exit(130)
    except DeployerError as error:
        if debug:
            raise
        error_line(with_reason(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away; nothing is left to say
        sys.exit(141)
    except OSError as error:
        if debug:
            raise
        name = f" '{error.filename}'" if error.filename else ""
        error_line(f"{error.strerror or error}{name}; check the path, its permissions and the free space")
        sys.exit(2)
    except Exception as error:
        if debug:
            raise
        error_line(f"unexpected {type(error).__name__}: {first_line(error)}; a fault of deployer: --debug shows where")
        sys.exit(70)  # EX_SOFTWARE of sysexits.h
