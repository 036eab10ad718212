"""Where output goes: results to stdout, everything else to stderr; a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table

from deployer.errors import UsageError

#: columns of a table that goes to a file or a pipe, where nobody's window limits it
_PLAIN_WIDTH = 160

out = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
# Bound to the stream of today: libraries whose chatter is caught for a while do not catch our spinner.
err = Console(file=sys.stderr, highlight=False, width=None if sys.stderr.isatty() else _PLAIN_WIDTH)


def make_table(*headers: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without vertical lines; columns named in `numbers` are right-aligned and never broken."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        number = header in numbers
        table.add_column(header, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


class _StepHandler(logging.Handler):
    """Library log lines: INFO is a step of work, WARNING and above stay visible."""

    status: Status | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            err.print(f"note: {text}", style="yellow", markup=False, soft_wrap=True)
        elif self.status is not None:
            self.status.update(text)
        else:
            err.print(f"· {text}", markup=False, soft_wrap=True)


_handler = _StepHandler()


def setup_logging(debug: bool) -> None:
    """deployer's own messages become steps; other libraries' chatter is shown with --debug only."""
    logger = logging.getLogger("deployer")
    logger.handlers = [_handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False
    if debug:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    else:
        warnings.simplefilter("ignore")
        os.environ.setdefault("TORCH_LOGS", "-all")  # read when torch is imported: errors only
        logging.getLogger().addHandler(logging.NullHandler())


@contextmanager
def working(text: str) -> Iterator[None]:
    """Long work: on a terminal a spinner that shows the current step, elsewhere a line a step."""
    if not err.is_terminal:
        err.print(f"· {text}", markup=False, soft_wrap=True)
        yield
        return
    with err.status(text) as status:
        _handler.status = status
        try:
            yield
        finally:
            _handler.status = None


def error_line(text: str) -> None:
    err.print(f"error: {text}", style="red", markup=False, soft_wrap=True)


def parse_json_object(text: str | None, flag: str) -> dict[str, Any] | None:
    """The JSON object given to `flag`, or None. Raises UsageError."""
    if text is None:
        return None
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise UsageError(f"{flag} is not JSON ({error}); expected an object such as '{{\"width\": 16}}'") from error
    if not isinstance(value, dict):
        raise UsageError(f"{flag} is a JSON {type(value).__name__}; an object such as '{{\"width\": 16}}' is expected")
    return value


def name_and_version(text: str) -> tuple[str, str]:
    """`digits=2.0` as its two parts. Raises UsageError."""
    name, sign, version = text.partition("=")
    if not (name and sign and version):
        raise UsageError(f"'{text}' is no NAME=VERSION such as digits=2.0")
    return name, version


def emit_json(document: Any) -> None:
    """One JSON document on stdout; it must carry `schema_version`."""
    sys.stdout.write(json_bytes(document).decode())


def json_bytes(document: Any) -> bytes:
    """A document as indented JSON with a last newline."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
