"""A running instance as any process of its owner sees it: which versions it serves, and changing that while it serves.

    instance = find_instance()
    instance.set_default("digits", "2.0")

Everything is in the instance's folder (0700): `server.json` says where it listens, `key_file.json` holds the token of
the management API.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import psutil

from deployer.bundle import MANIFEST, Bundle, read_bundle
from deployer.errors import BundleError, GateError, ServerError, UsageError, first_line, nearest
from deployer.package.mar import BUNDLE_FOLDER, Mar
from deployer.package.settings import Settings
from deployer.package.torchserve import connections, read_mar, read_settings
from deployer.package.torchserve_worker import BUSY_FOLDER
from deployer.parity import ParityReport, verify
from deployer.runtime import preflight
from deployer.serve.config import last_words
from deployer.signature import signature_of
from deployer.signature import verify as verify_signature

log = logging.getLogger(__name__)

FOLDER_PREFIX = "deployer-serve-"
STATE = "server.json"
REQUEST_TIMEOUT_S = 60.0

_POLL_S = 0.05
_ADD_POLL_S = 0.25
_SETTLE_S = 0.1  # an answer's way from the worker through Java to the socket
_UNASKED_S = 1.0  # a version that nobody asked for so long is one that nobody asks for
_MANAGEMENT_TIMEOUT_S = 5.0
_UNREGISTER_TIMEOUT_S = 120.0


class State(msgspec.Struct, frozen=True):
    """server.json: written when the server is ready. `allow_changes`: archives may be added and removed."""

    pid: int
    inference_url: str
    management_url: str
    metrics_url: str
    allow_changes: bool
    max_request_bytes: int
    max_response_bytes: int
    verify_key: str | None = None
    schema_version: int = 1


@dataclass(frozen=True)
class Version:
    """One version of a model as the running server has it; `pending` requests wait in its queue."""

    name: str
    version: str
    default: bool
    workers: int
    ready: int
    pending: int


class Management:
    """TorchServe's management API on the loopback. A call that gets no answer raises ServerError."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key

    def call(self, method: str, path: str, timeout_s: float = _MANAGEMENT_TIMEOUT_S, key: str = "") -> httpx.Response:
        try:
            with http(timeout_s) as client:
                return client.request(method, self._url + path, headers={"Authorization": f"Bearer {key or self._key}"})
        except httpx.HTTPError as error:
            raise ServerError(
                f"the management API at {self._url} does not answer: {first_line(error) or type(error).__name__}"
            ) from error

    def describe(self, name: str, version: str = "") -> list[dict[str, Any]]:
        """Effective settings, workers and queue of a version; of the default one for "", of every one for `all`.

        Nothing where there is none.
        """
        response = self.call("GET", f"/models/{quote(name)}" + (f"/{quote(version)}" if version else ""))
        if response.status_code != 200:
            return []
        described: list[dict[str, Any]] = msgspec.json.decode(response.content)
        return described

    def describe_all(self) -> list[dict[str, Any]]:
        """Every version of every model."""
        response = self.call("GET", "/models?limit=10000")
        if response.status_code != 200:
            raise ServerError(f"the management API answered {response.status_code}", status=response.status_code)
        names = dict.fromkeys(entry["modelName"] for entry in msgspec.json.decode(response.content)["models"])
        return [described for name in names for described in self.describe(name, "all")]

    def set_default(self, name: str, version: str) -> None:
        response = self.call("PUT", f"/models/{quote(name)}/{quote(version)}/set-default")
        if response.status_code != 200:
            raise ServerError(f"the server did not take {name} {version} as default: {response.status_code}")

    def renew_inference_token(self, api_key: str) -> None:
        """From now on the token that clients hold is refused."""
        self.call("GET", "/token?type=inference", key=api_key)


class Instance:
    """A running server, by its folder."""

    def __init__(self, folder: Path) -> None:
        try:
            self.state = msgspec.json.decode((folder / STATE).read_bytes(), type=State)
            self._keys: dict[str, str] = {
                kind: entry["key"]
                for kind, entry in msgspec.json.decode((folder / "key_file.json").read_bytes()).items()
            }
        except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"'{folder}' is no folder of a server that is ready ({first_line(error)}); "
                "`deployer serve` prints where its own is"
            ) from error
        self.folder = folder
        self.management = Management(self.state.management_url, self._keys["management"])

    @property
    def token(self) -> str:
        return self._keys["inference"]

    def versions(self) -> list[Version]:
        found = self.management.describe_all()
        defaults = {
            name: (self.management.describe(name) or [{}])[0].get("modelVersion")
            for name in {entry["modelName"] for entry in found}
        }
        return sorted(
            (_version(entry, defaults[entry["modelName"]]) for entry in found),
            key=lambda version: (version.name, version.version),
        )

    def get(self, name: str, version: str) -> Version:
        """Raises UsageError with what is served instead."""
        versions = self.versions()
        for one in versions:
            if (one.name, one.version) == (name, version):
                return one
        served = [f"{one.name}={one.version}" for one in versions]
        raise UsageError(f"the server has no {name}={version}{nearest(f'{name}={version}', served)}")

    def set_default(self, name: str, version: str) -> None:
        """Requests without a version go to `version` from now on; those that were taken are answered by the old one."""
        found = self.get(name, version)
        if not found.ready:
            raise ServerError(f"{name} {version} has no worker that is ready; the default stays as it is")
        self.management.set_default(name, version)

    # -------------------------------------------------------------------------------------------- adding and removing

    def add(self, archive: Path, timeout_s: float) -> Version:
        """Serve one more archive beside the others; it is held to its bundle before anybody is told of it.

        Raises, with nothing changed: UsageError (not allowed here, served already, larger bodies than the server
        takes), BundleError, IntegrityError, GateError (not ready in time, wrong answers).
        """
        self._check_allowed("add")
        if self.state.verify_key is not None and archive.is_file():
            verify_signature(archive, Path(self.state.verify_key))
        mar = read_mar(archive)
        settings = read_settings(mar)
        if f"{BUNDLE_FOLDER}/{MANIFEST}" not in mar.entries:
            raise BundleError(f"'{archive}' holds no bundle, it was not made by deployer; `deployer package` makes one")
        if any((one.name, one.version) == (mar.name, mar.version) for one in self.versions()):
            raise UsageError(f"the server has {mar.name} {mar.version} already; give the new archive another version")
        for what in ("max_request_bytes", "max_response_bytes"):
            if getattr(settings, what) > getattr(self.state, what):
                raise UsageError(
                    f"{mar.name} {mar.version} needs {what} {getattr(settings, what)}, and the server was started with "
                    f"{getattr(self.state, what)}; start it again with this archive among its own"
                )
        name = f"{uuid.uuid4().hex}.mar"
        stored = self.folder / "store" / name
        unpacked = self.folder / "bundles" / name
        try:
            shutil.copyfile(archive, stored)
            if self.state.verify_key is not None:
                shutil.copyfile(signature_of(archive), signature_of(stored))
                verify_signature(stored, Path(self.state.verify_key))
            bundle = unpack(read_mar(stored), unpacked)
            self._register(name, mar, settings, bundle, timeout_s)
        except BaseException:
            stored.unlink(missing_ok=True)
            signature_of(stored).unlink(missing_ok=True)
            raise
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)
        return self.get(mar.name, mar.version)

    def _register(self, file_name: str, mar: Mar, settings: Settings, bundle: Bundle, timeout_s: float) -> None:
        where = f"/models/{quote(mar.name)}/{quote(mar.version)}"
        label = f"{mar.name} {mar.version}"
        response = self.management.call("POST", f"/models?url={file_name}&synchronous=false")
        if response.status_code not in (200, 202):
            raise ServerError(f"the server did not take {label}: {response.status_code} {response.text[:200]}")
        try:
            deadline = time.monotonic() + timeout_s
            wanted = connections(settings)
            log.info("waiting for %d workers of %s", settings.workers, label)
            while True:
                described = (self.management.describe(mar.name, mar.version) or [{}])[0]
                ready = [worker.get("status") for worker in described.get("workers", [])].count("READY")
                if ready >= wanted:
                    break
                if time.monotonic() > deadline:
                    raise GateError(
                        f"{label} was not ready within {timeout_s:g} s: {ready} of {wanted} workers; "
                        f"{last_words(self.folder / 'logs')}"
                    )
                time.sleep(_ADD_POLL_S)
            check_effective(described, mar, settings)
            check_answers(f"{self.state.inference_url}/predictions/{mar.name}/{mar.version}", mar, bundle, self.token)
        except BaseException:
            with suppress(ServerError):
                self.management.call("DELETE", where, _UNREGISTER_TIMEOUT_S)
            raise

    def remove(self, name: str, version: str, drain_s: float) -> None:
        """Take a version away once it has answered what it took.

        TorchServe forgets a removed version's queue without an answer to anybody, so it is removed only when it is
        idle. Raises UsageError for the default and the only version, ServerError when it is not idle in `drain_s`.
        """
        self._check_allowed("remove")
        found = self.get(name, version)
        if found.default:
            others = [one.version for one in self.versions() if one.name == name and one.version != version]
            advice = f"move the default first (--default {name}={others[0]})" if others else "stop the server instead"
            raise UsageError(f"{name} {version} is the default version; {advice}")
        described = self.management.describe(name, version)
        settle_s = max(_UNASKED_S, settle_time_s(described))
        if not wait_until_idle(lambda: self._is_idle(name, version, settle_s), settle_s, drain_s):
            raise ServerError(
                f"{name} {version} is still asked for: never {settle_s:g} s without a request within {drain_s:g} s; "
                "send its clients to another version, then remove it"
            )
        response = self.management.call("DELETE", f"/models/{quote(name)}/{quote(version)}", _UNREGISTER_TIMEOUT_S)
        if response.status_code != 200:
            raise ServerError(
                f"the server did not remove {name} {version}: {response.status_code} {response.text[:200]}"
            )
        for entry in described:  # TorchServe keeps it
            (self.folder / "store" / Path(entry["modelUrl"]).name).unlink(missing_ok=True)

    def _is_idle(self, name: str, version: str, quiet_s: float) -> bool:
        described = self.management.describe(name, version)
        return all(is_idle(entry, self.folder / BUSY_FOLDER, quiet_s) for entry in described)

    def _check_allowed(self, what: str) -> None:
        if not self.state.allow_changes:
            raise UsageError(
                f"this server was started closed: nothing can be {what}{'d' if what.endswith('e') else 'ed'}; "
                "start it with --allow-changes"
            )

    # ---------------------------------------------------------------------------------------------------- its last act

    def refuse_new_requests(self) -> None:
        """Requests on connections that are still open are refused from now on, and these connections closed."""
        self.management.renew_inference_token(self._keys["API"])

    def is_idle(self) -> bool:
        """Whether no request waits for a worker and none is in one."""
        return all(is_idle(entry, self.folder / BUSY_FOLDER) for entry in self.management.describe_all())


def find_instance(folder: Path | None = None) -> Instance:
    """The server in `folder`, or the only one that this user runs here. Raises UsageError naming those there are."""
    if folder is not None:
        return Instance(folder)
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError, UsageError):
            if path.stat().st_uid == os.getuid():
                instance = Instance(path)
                if psutil.pid_exists(instance.state.pid):
                    found.append(instance)
    if not found:
        raise UsageError(f"no server of yours is ready in '{tempfile.gettempdir()}'; `deployer serve` starts one")
    if len(found) > 1:
        folders = ", ".join(str(instance.folder) for instance in found)
        raise UsageError(f"{len(found)} servers of yours are running; say which with --server: {folders}")
    return found[0]


def _version(described: dict[str, Any], default: str | None) -> Version:
    workers = [worker.get("status") for worker in described["workers"]]
    return Version(
        described["modelName"],
        described["modelVersion"],
        described["modelVersion"] == default,
        len(workers),
        workers.count("READY"),
        described["jobQueueStatus"]["pendingRequests"],
    )


# ------------------------------------------------------------------------------------------- what the server uses, too


def http(timeout_s: float = REQUEST_TIMEOUT_S) -> httpx.Client:
    """trust_env off: a proxy of the environment must see neither the tokens nor a loopback request."""
    return httpx.Client(timeout=timeout_s, trust_env=False)


def unpack(mar: Mar, folder: Path) -> Bundle:
    """The archive's bundle, hashes verified and this machine held to its needs."""
    folder.mkdir()
    mar.extract(folder, below=BUNDLE_FOLDER)
    bundle = read_bundle(folder)
    if not bundle.manifest.passed:
        raise GateError(f"the bundle in '{mar.path}' has not passed the gate; export and package it again")
    preflight(bundle.manifest)
    return bundle


def check_effective(described: dict[str, Any], mar: Mar, settings: Settings) -> None:
    """Raises GateError when the server runs with other settings than the archive asks for."""
    asked = {
        "batchSize": settings.batch_size,
        "maxBatchDelay": settings.max_batch_delay_ms,
        "minWorkers": connections(settings),
        "maxWorkers": connections(settings),
    }
    for key, value in asked.items():
        if described.get(key) != value:
            raise GateError(f"{mar.name} {mar.version} runs with {key} {described.get(key)} instead of {value}")


def check_answers(url: str, mar: Mar, bundle: Bundle, token: str) -> ParityReport:
    """Real samples over HTTP in every form, alone and together with wrong requests (`deployer.parity`)."""
    log.info("holding answers of %s %s to the eager model", mar.name, mar.version)
    report = verify(url, bundle, token=token, timeout_s=REQUEST_TIMEOUT_S, bits=False)
    if not report.passed:
        raise GateError(f"{mar.name} {mar.version}: {report.reasons[0]}")
    return report


def is_idle(described: dict[str, Any], busy: Path, quiet_s: float = 0.0) -> bool:
    """Whether a version's queue is empty, no worker of it is at work (each holds a lock meanwhile), and none has begun
    a batch within `quiet_s` (each touches the file then)."""
    if described["jobQueueStatus"]["pendingRequests"]:
        return False
    try:
        descriptor = os.open(busy / f"{described['modelName']}-{described['modelVersion']}", os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return quiet_s <= 0 or time.time() - os.fstat(descriptor).st_mtime >= quiet_s
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def settle_time_s(described: list[dict[str, Any]]) -> float:
    """How long a model must be seen idle: a request that waits for others to share its run is in no queue and in no
    worker for as long as the batch delay."""
    return _SETTLE_S + max((entry["maxBatchDelay"] for entry in described), default=0) / 1e3


def wait_until_idle(idle: Callable[[], bool], settle_s: float, limit_s: float) -> bool:
    """Until `idle` has held for `settle_s` without a break; False when that did not happen within `limit_s`."""
    deadline = time.monotonic() + limit_s
    since: float | None = None
    while True:
        now = time.monotonic()
        since = (since if since is not None else now) if idle() else None
        if since is not None and time.monotonic() - since >= settle_s:
            return True
        if now > deadline:
            return False
        time.sleep(_POLL_S)
