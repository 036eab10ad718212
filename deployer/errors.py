"""Every error that deployer raises on purpose, with the exit code that the command line ends with.

DeployerError                    2
├── InputError                   2   what was given is wrong; the message says what was expected
│   ├── UsageError               2   flags, ports, recipe
│   ├── ModelError               2   a model reference that cannot be imported, built or run
│   ├── CheckpointError          2   weights that cannot be read or do not fit
│   ├── SpecError                2   names, dtypes, shapes, dynamic axes
│   ├── SampleError              2   sample data that does not fit the spec
│   ├── BundleError              2   a folder or archive that is not a bundle, or not usable for this
│   │   └── IntegrityError       2   a file that differs from its recorded hash
│   ├── ExportError              2   an exporter refused the model
│   ├── NotBuiltYetError         2   a combination that deployer does not build
│   └── RequestError             2   one request to a served model (HTTP 400; see `http_status`)
├── ServerError                  2   a server that cannot be reached, refuses the caller, or fails on a request
├── GateError                    1   a gate failed: numerics, readiness, server parity
├── SomeTargetsFailedError       3   some targets are done, others failed, each named
└── MachineError                 4   this machine lacks what was asked for; carries the install line

Messages are one line: what arrived, what was expected, what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class DeployerError(Exception):
    """Root of the tree; `exit_code` is what the command line ends with."""

    exit_code = 2

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


class InputError(DeployerError):
    pass


class UsageError(InputError):
    pass


class ModelError(InputError):
    pass


class CheckpointError(InputError):
    pass


class SpecError(InputError):
    pass


class SampleError(InputError):
    pass


class BundleError(InputError):
    pass


class IntegrityError(BundleError):
    pass


class ExportError(InputError):
    pass


class NotBuiltYetError(InputError):
    pass


class RequestError(InputError):
    """One bad request. `field` names the input at fault, `expected` and `got` say how it differs."""

    def __init__(
        self, message: str, *, field: str = "", expected: str = "", got: str = "", http_status: int = 400
    ) -> None:
        super().__init__(message)
        self.field = field
        self.expected = expected
        self.got = got
        self.http_status = http_status


class ServerError(DeployerError):
    """What a server answered instead of a result; `status` is its HTTP status, 0 where there was no answer."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class GateError(DeployerError):
    exit_code = 1


class SomeTargetsFailedError(DeployerError):
    exit_code = 3


class MachineError(DeployerError):
    """Something is missing on this machine; `install` is the line that mends it, if one does."""

    exit_code = 4

    def __init__(self, message: str, *, install: str = "") -> None:
        super().__init__(f"{message}; install it: {install}" if install else message)
        self.install = install


def nearest(name: str, valid: Iterable[str]) -> str:
    """`name` among `valid`: "; did you mean 'x'?" or the sorted list of what is valid."""
    names = sorted(valid)
    close = get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; valid: {', '.join(names)}"


def first_line(error: BaseException, limit_chars: int = 300) -> str:
    """The first telling line of a library's error, for a one-line message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit_chars else text[: limit_chars - 1] + "…"
