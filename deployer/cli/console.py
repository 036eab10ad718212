"""Where output goes: results to stdout, everything else to stderr; a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.status import Status

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


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


def emit_json(document: Any) -> None:
    """One JSON document on stdout; it must carry `schema_version`."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
