"""TorchServe's archive (.mar) of a bundle.

    NAME.mar/MAR-INF/MANIFEST.json    written by torch-model-archiver
             deployer_handler.py      one class; opens the bundle through deployer.predictor
             model-config.yaml        batching, workers, timeouts; our own keys under `deployer`
             openapi.json             what the server says of the model (`deployer.description`)
             bundle/                  the gated bundle as it is, hashes and all
             hooks/                   the user's hooks, where there are any: main.py, its files, requirements.txt
             bundle.sig, hooks.sig    with --sign-key: signatures of these folders, which the worker holds them to
    NAME.mar.sig                      with --sign-key: the signature of the whole archive, beside it

Before an archive takes its name it is unpacked and loaded by TorchServe's own loader in a fresh process, answers real
samples as the eager model does, and refuses a wrong request without hurting its neighbours.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from deployer.bundle import Bundle
from deployer.description import METADATA, OPENAPI, Routes, encode, openapi
from deployer.errors import BundleError, GateError, UsageError, first_line, nearest
from deployer.files import atomic_file
from deployer.package.mar import (
    BUNDLE_FOLDER,
    HOOKS_FOLDER,
    HOOKS_MAIN,
    HOOKS_REQUIREMENTS,
    Mar,
    read_mar,
)
from deployer.package.record import Engine, HookFiles
from deployer.package.settings import Settings
from deployer.package.torchserve_pair import CONNECTIONS
from deployer.runtime import device_fault
from deployer.signature import KEY_VARIABLE, sign, signature_of
from deployer.spec import ModelSpec

__all__ = ["ENGINE", "Mar", "make_mar", "read_mar", "read_settings"]

log = logging.getLogger(__name__)

HANDLER = "deployer_handler.py"
CONFIG = "model-config.yaml"
OPENAPI_FILE = "openapi.json"
OWN_KEY = "deployer"

_RESPONSE_TIMEOUT_MARGIN_S = 5  # the worker itself is first, and says what happened
_STARTUP_TIMEOUT_S = 300
_CHECK_TIMEOUT_S = 600
_OWN_KEYS = (
    "workers", "intra_op_threads", "max_request_bytes", "max_response_bytes", "response_timeout_s", "max_queue_wait_s",
)  # fmt: skip

#: every key of model-config.yaml that TorchServe 0.12 reads; it drops others, and values of another type, in silence
_TORCHSERVE_KEYS: dict[str, type] = {
    **dict.fromkeys(
        (
            "minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout",
            "parallelLevel", "maxRetryTimeoutInSec", "clientTimeoutInMills", "jobQueueSize", "sequenceMaxIdleMSec",
            "sequenceTimeoutMSec", "maxSequenceJobQueueSize", "maxNumSequence",
        ),
        int,
    ),
    **dict.fromkeys(("useJobTicket", "continuousBatching", "sequenceBatching", "asyncCommunication", "useVenv"), bool),
    **dict.fromkeys(("deviceType", "parallelType"), str),
    "deviceIds": list,
    "torchrun": dict,
}  # fmt: skip


def make_mar(
    bundle: Bundle,
    settings: Settings,
    output: Path,
    hooks: HookFiles | None = None,
    sign_key: Path | None = None,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Write `output/NAME.mar` and check it, last by `check`; with `sign_key`, sign it.

    Raises GateError when it does not answer as the bundle does.
    """
    final = output / f"{bundle.spec.name}.mar"
    with tempfile.TemporaryDirectory(prefix="deployer-mar-") as name:
        work = Path(name)
        log.info("archiving %s", bundle.path)
        archive = _archive(bundle, settings, work, hooks, sign_key)
        with atomic_file(final) as temporary:
            shutil.copyfile(archive, temporary)
            if fault := device_fault(bundle.manifest.target, bundle.manifest.details):
                log.warning("%s is not tried under TorchServe: %s", final, fault)
            else:
                log.info("checking the archive under TorchServe's loader in a fresh process")
                check_archive(temporary, work)
                if check is not None:
                    check(temporary)
            signature_of(final).unlink(missing_ok=True)  # that of an older archive of this name
    if sign_key is not None:
        sign(final, sign_key)
    return final


def _archive(bundle: Bundle, settings: Settings, work: Path, hooks: HookFiles | None, sign_key: Path | None) -> Path:
    """Lay the archive's folder out in `work` and let torch-model-archiver write manifest and zip."""
    from model_archiver.model_archiver_config import ModelArchiverConfig
    from model_archiver.model_archiver_error import ModelArchiverError
    from model_archiver.model_packaging_utils import ModelExportUtils

    folder = work / "content"
    folder.mkdir()
    shutil.copyfile(handler_file(), folder / HANDLER)
    (folder / CONFIG).write_text(model_config(settings))
    (folder / OPENAPI_FILE).write_bytes(encode(describe(bundle.spec, settings, hooks=hooks is not None)))
    shutil.copytree(bundle.path, folder / BUNDLE_FOLDER)
    if hooks is not None:
        _copy_hooks(hooks, folder / HOOKS_FOLDER)
    if sign_key is not None:
        for part in (folder / BUNDLE_FOLDER, folder / HOOKS_FOLDER):
            if part.is_dir():
                sign(part, sign_key)
    config = ModelArchiverConfig(
        model_name=bundle.spec.name,
        handler=HANDLER,
        version=bundle.spec.version,
        config_file=CONFIG,
        export_path=str(work),
    )
    try:
        ModelExportUtils.validate_inputs(config.model_name, config.export_path)
        manifest = ModelExportUtils.generate_manifest_json(config)
        # The command line's `copy_artifacts` works in a shared folder of /tmp named after the model; not used here.
        # Stored, not deflated: weights hardly shrink, and the server unpacks faster.
        ModelExportUtils.archive(config.export_path, "archive", str(folder), manifest, "zip-store")
    except ModelArchiverError as error:
        raise UsageError(f"torch-model-archiver refuses '{bundle.spec.name}': {first_line(error)}") from error
    return work / "archive.mar"


def describe(spec: ModelSpec, settings: Settings, *, hooks: bool) -> dict[str, Any]:
    """The OpenAPI document of a model on TorchServe's routes."""
    model, version = f"/predictions/{spec.name}", f"/predictions/{spec.name}/{spec.version}"
    routes = Routes(
        predict=(model, version), infer=(f"/v2/models/{spec.name}/infer",), openapi=(f"{version}/{OPENAPI}",),
        metadata=(f"{version}/{METADATA}",),
    )  # fmt: skip
    return openapi(spec, routes, max_request_bytes=settings.max_request_bytes, hooks=hooks)


def _copy_hooks(hooks: HookFiles, folder: Path) -> None:
    folder.mkdir()
    shutil.copyfile(hooks.main, folder / HOOKS_MAIN)
    for path in hooks.extra:
        shutil.copyfile(path, folder / path.name)
    if hooks.requirements:
        (folder / HOOKS_REQUIREMENTS).write_text("".join(f"{line}\n" for line in hooks.requirements))


def handler_file() -> Path:
    """The handler: `handlers/` of a source checkout, or the copy inside an installed package."""
    package_folder = Path(__file__).resolve().parent.parent
    candidates = [package_folder / "_data" / "handlers" / HANDLER, package_folder.parent / "handlers" / HANDLER]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise BundleError(f"this installation of deployer lacks {HANDLER}; install it again")


def model_config(settings: Settings) -> str:
    """The text of model-config.yaml."""
    return yaml.safe_dump(
        {
            "minWorkers": connections(settings),
            "maxWorkers": connections(settings),
            "batchSize": settings.batch_size,
            "maxBatchDelay": settings.max_batch_delay_ms,
            "responseTimeout": settings.response_timeout_s + _RESPONSE_TIMEOUT_MARGIN_S,
            "startupTimeout": _STARTUP_TIMEOUT_S,
            "jobQueueSize": settings.job_queue_size,
            OWN_KEY: {key: getattr(settings, key) for key in _OWN_KEYS},
        },
        sort_keys=False,
    )


def read_settings(mar: Mar) -> Settings:
    """The settings of an archive, held to what TorchServe really reads.

    Raises UsageError naming the key: unknown or misspelt (TorchServe drops it in silence), of another type (dropped
    too), zero or negative (bent to 1 or 100 ms), or missing.
    """
    config = mar.model_config
    where = f"'{mar.path}': model-config.yaml"
    for key, value in config.items():
        if key == OWN_KEY:
            continue
        if key not in _TORCHSERVE_KEYS:
            raise UsageError(f"{where} has the key '{key}', which TorchServe ignores{nearest(key, _TORCHSERVE_KEYS)}")
        if type(value) is not _TORCHSERVE_KEYS[key]:
            raise UsageError(
                f"{where} has {key}: {value!r}, which TorchServe ignores; {_TORCHSERVE_KEYS[key].__name__} is expected"
            )
    own = config.get(OWN_KEY)
    if not isinstance(own, dict) or sorted(own) != sorted(_OWN_KEYS):
        raise UsageError(f"{where} needs the section '{OWN_KEY}' with {', '.join(_OWN_KEYS)}; package the bundle again")
    settings = Settings(
        batch_size=_positive(config, "batchSize", where),
        max_batch_delay_ms=_positive(config, "maxBatchDelay", where),
        job_queue_size=_positive(config, "jobQueueSize", where),
        **{key: _positive(own, key, f"{where}, section '{OWN_KEY}',") for key in _OWN_KEYS},
    )
    for key in ("minWorkers", "maxWorkers"):
        if _positive(config, key, where) != connections(settings):
            raise UsageError(
                f"{where} has {key}: {config[key]}; {connections(settings)} is expected with {settings.workers} "
                f"workers ({CONNECTIONS} for a single one)"
            )
    return settings


def connections(settings: Settings) -> int:
    """How many workers TorchServe is told of: one that is alone has two connections, so that it never waits for the
    frontend (`deployer.package.torchserve_pair`)."""
    return CONNECTIONS if settings.workers == 1 else settings.workers


def _positive(config: dict[str, Any], key: str, where: str) -> int:
    if key not in config:
        raise UsageError(f"{where} lacks '{key}'; package the bundle again")
    value = config[key]
    if type(value) is not int or value < 1:
        raise UsageError(f"{where} has {key}: {value!r}; an integer of at least 1 is expected")
    return value


class Verdict(msgspec.Struct, frozen=True):
    """What the checking process found."""

    passed: bool
    reason: str = ""


def check_archive(path: Path, work: Path) -> None:
    """Unpack an archive and try it in a fresh process, as a worker of TorchServe would. Raises GateError."""
    mar = read_mar(path)
    read_settings(mar)
    folder, result = work / "unpacked", work / "verdict.json"
    folder.mkdir()
    mar.extract(folder)
    (work / "tmp").mkdir()
    places = [*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)]  # in the order in which TorchServe puts them
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "TMPDIR": str(work / "tmp")}
    environment.pop(KEY_VARIABLE, None)  # what is tried here is loading; who signed it is asked by who serves it
    command = [sys.executable, "-m", "deployer.package.torchserve_check", str(folder), str(result)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise GateError(f"the archive did not load and answer within {_CHECK_TIMEOUT_S} s") from error
    verdict = Verdict(False, _last_line(done.stdout + done.stderr))
    if done.returncode == 0:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            verdict = msgspec.json.decode(result.read_bytes(), type=Verdict)
    if not verdict.passed:
        raise GateError(f"the archive failed its check under TorchServe's loader: {verdict.reason}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in io.StringIO(text) if line.strip()]
    return lines[-1][:300] if lines else "the process ended without a word"


ENGINE = Engine(
    name="torchserve",
    summary="a .mar for TorchServe 0.12: dynamic batching, several workers, token auth",
    package=make_mar,
    modules=("ts", "model_archiver"),
    extra="serve",
)
