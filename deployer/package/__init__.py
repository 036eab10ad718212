"""Bundle → serving package. The table of engines: a new one is one file that ends in an Engine record, and one line.

archive = deployer.package("build/digits-onnx-fp32", batch_size=16)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from deployer.bundle import Bundle, read_bundle
from deployer.errors import GateError, MachineError, UsageError, first_line, nearest
from deployer.package import torchserve
from deployer.package.mar import HOOKS_MAIN, HOOKS_REQUIREMENTS
from deployer.package.record import Engine, HookFiles
from deployer.package.settings import Settings, choose_settings
from deployer.validate import check_proof

log = logging.getLogger(__name__)

__all__ = ["ENGINES", "Engine", "HookFiles", "Settings", "get_engine", "package"]

ENGINES: dict[str, Engine] = {record.name: record for record in (torchserve.ENGINE,)}


def get_engine(name: str) -> Engine:
    """The record called `name`. Raises UsageError with the nearest name."""
    if name not in ENGINES:
        raise UsageError(f"no engine '{name}'{nearest(name, ENGINES)}")
    return ENGINES[name]


def package(
    bundle: str | Path | Bundle,
    *,
    engine: str = "torchserve",
    output: str | Path = "model_store",
    batch_size: int | None = None,
    max_batch_delay_ms: int | None = None,
    workers: int | None = None,
    intra_op_threads: int | None = None,
    response_timeout_s: int | None = None,
    max_queue_wait_s: int | None = None,
    allow_unexecuted: bool = False,
    hooks: HookFiles | None = None,
    sign_key: str | Path | None = None,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Package a bundle that has passed the gate; returns the path of the package, which is there whole or not at all.

    `batch_size` requests at most share a run (default: the batch Dim's typical size, 1 where requests cannot share
    one), the first of them waits `max_batch_delay_ms` at most (default 2). `workers` processes (default 2, on a single
    core 1) divide the cores of this machine among them, unless `intra_op_threads` says
    with how many each computes. A run that takes longer than `response_timeout_s` (default 120) is answered 504, a
    request that would wait longer than about `max_queue_wait_s` (default 10) 503.

    `hooks` are the user's pre- and postprocessing, tried on their own samples before the package takes its name.

    `sign_key` is a private key that the package is signed with (`deployer.signature`). Beside the package lies
    its bill of materials (`deployer.package.sbom`), where the library for it is installed.

    `check` is called with the finished package before it takes its name, and what it raises keeps it from that
    (`deployer.serve.serve_check` tries it in a real server, as the command line does). It is not called for an artifact
    that this machine cannot run.

    A bundle whose artifact was built and never executed (`manifest.executed`) needs `allow_unexecuted`.

    Raises GateError when the bundle has not passed or the package does not answer as the bundle does, UsageError for
    settings that do not go with the bundle, BundleError, IntegrityError, MachineError.
    """
    record = get_engine(engine)
    record.check_machine()
    if hooks is not None:
        _check_hooks(hooks)
    opened = bundle if isinstance(bundle, Bundle) else read_bundle(bundle)
    check_proof(opened)
    if not opened.manifest.executed and not allow_unexecuted:
        raise GateError(
            f"'{opened.path}' was built and never executed: the gate ran what it was made from, on a machine without a "
            "GPU for it; export it on one that has, or package it all the same with --allow-unexecuted",
            reason="not_executed",
        )
    settings = choose_settings(
        opened.manifest,
        batch_size=batch_size,
        max_batch_delay_ms=max_batch_delay_ms,
        workers=workers,
        intra_op_threads=intra_op_threads,
        response_timeout_s=response_timeout_s,
        max_queue_wait_s=max_queue_wait_s,
    )
    key = Path(sign_key) if sign_key is not None else None
    made = record.package(opened, settings, Path(output), hooks, key, check)
    _write_sbom(made)
    return made


def _write_sbom(made: Path) -> None:
    """The bill of materials beside a package; without the library for it, a word and no stale one."""
    from deployer.package.sbom import sbom_of, write_sbom  # it imports this module

    sbom_of(made).unlink(missing_ok=True)
    try:
        write_sbom(made)
    except MachineError as error:
        log.warning("no %s was written: %s", sbom_of(made).name, error)


def _check_hooks(hooks: HookFiles) -> None:
    """What can be seen without running them. Raises UsageError."""
    reserved = {HOOKS_MAIN: hooks.main, HOOKS_REQUIREMENTS: None}
    if not hooks.main.is_file() or hooks.main.suffix != ".py":
        raise UsageError(f"--handler '{hooks.main}' is no Python file; give one with preprocess and postprocess in it")
    for path in hooks.extra:
        if not path.is_file():
            raise UsageError(f"--handler-file '{path}' is no file")
        if path.name in reserved:
            raise UsageError(f"--handler-file '{path}': the name {path.name} is taken; rename it")
        reserved[path.name] = path
    for line in hooks.requirements:
        try:
            Requirement(line)
        except InvalidRequirement as error:
            raise UsageError(f"--handler-requirement '{line}' is no requirement: {first_line(error)}") from error
