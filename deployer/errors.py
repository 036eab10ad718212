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
├── TrainingError                1   a training run that cannot go on: a loss that is not finite, a dead process
├── GateError                    1   a gate failed: numerics, readiness, server parity
├── SomeTargetsFailedError       3   some targets are done, others failed, each named
└── MachineError                 4   this machine lacks what was asked for; carries the install line

Messages are one line: what arrived, what was expected, what to do next. Each error also carries a machine-readable
`reason`: a key of REASONS for what a model or an exporter can do wrong, "" where the class of the error says it all.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

#: reason class → the advice that goes with it; what `--json` and docs/coverage.md quote
REASONS: dict[str, str] = {
    "data_dependent_control_flow": "let tensors decide with torch.where or torch.cond instead of a Python `if` or loop",
    "data_dependent_size": "return a fixed number of rows and a mask or a count, not only the rows that were found",
    "specialized_axis": "use x.shape[i] as it is, or -1, in place of a Python number, or fix that axis in the spec",
    "unsupported_operator": "export to another format, or replace the operator by ones that this format knows",
    "unsupported_python": "keep forward to tensors, numbers and plain containers, or export to another format",
    "unsupported_output": "return real tensors of the dtypes that every format carries",
    "model_failed": "build and run the model by hand with the same arguments and sizes; mend it or narrow the Dim",
    "nondeterministic": "draw no random numbers in eval mode; call dropout with training=self.training",
    "stateful": "pass what is kept between calls in and out as inputs and outputs",
    "train_mode": "leave train() out of forward, and let eval() reach every module",
    "training_failed": "the message names the step; go on from the last save with other settings, or mend the data",
    "gate_failed": "read validation.json in the rejected bundle; export to a format that passes",
    "not_quantized": "export in fp32 or to another format; nothing in this graph computes in int8 there",
    "miscompiled": "export to another format; the compiler changed what the quantized model computes",
    "accuracy_lost": "give more calibration data, a metric with the drop that is allowed, or export in fp32",
    "not_faster": "export in fp32, or keep the slower INT8 artifact with --keep-slow",
    "unloadable_artifact": "check the bundle with deployer validate; export it again, here or to another format",
    "compiler_failed": "export to another format; the C++ compiler or the code generator failed on this graph",
    "not_executed": "export on a machine with a GPU that the artifact is for, or add --allow-unexecuted",
    "missing_package": "install what the message names",
    "wrong_cpu": "export the bundle again on the machine that runs it, or on one with the same CPU",
    "no_gpu": "do this on a machine with an NVIDIA GPU, its driver and a torch with CUDA",
    "exporter_failed": "export to another format; the exporter failed in a way that has no class yet",
}


class DeployerError(Exception):
    """Root of the tree; `exit_code` is what the command line ends with, `reason` the class of what went wrong."""

    exit_code = 2
    reason = ""

    def __init__(self, message: str = "", *, reason: str = "") -> None:
        super().__init__(message)
        if reason:
            self.reason = reason

    @property
    def advice(self) -> str:
        """What REASONS says to this error's class of reason, or ""."""
        return REASONS.get(self.reason, "")

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


class InputError(DeployerError):
    pass


class UsageError(InputError):
    pass


class ModelError(InputError):
    reason = "model_failed"


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
    reason = "exporter_failed"


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
    """What a server answered instead of a result; `status` is its HTTP status, 0 where there was no answer;
    `retry_after_s` is when it asks to be asked again, None where it does not say."""

    def __init__(self, message: str, *, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class TrainingError(DeployerError):
    exit_code = 1
    reason = "training_failed"


class GateError(DeployerError):
    exit_code = 1
    reason = "gate_failed"


class SomeTargetsFailedError(DeployerError):
    exit_code = 3


class MachineError(DeployerError):
    """Something is missing on this machine; `install` is the line that mends it, if one does."""

    exit_code = 4
    reason = "missing_package"

    def __init__(self, message: str, *, install: str = "", reason: str = "") -> None:
        super().__init__(f"{message}; install it: {install}" if install else message, reason=reason)
        self.install = install


def nearest(name: str, valid: Iterable[str]) -> str:
    """`name` among `valid`: "; did you mean 'x'?" or the sorted list of what is valid."""
    names = sorted(valid)
    close = get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; valid: {', '.join(names)}"


def with_reason(error: DeployerError) -> str:
    """The message and, in brackets, the class of reason where the error has one."""
    return f"{error} [{error.reason}]" if error.reason else str(error)


def first_line(error: BaseException, limit_chars: int = 300) -> str:
    """The first telling line of a library's error, for a one-line message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit_chars else text[: limit_chars - 1] + "…"
