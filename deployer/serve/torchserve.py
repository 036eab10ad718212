"""One instance of TorchServe: started closed and quiet, ready when it truly answers, gone without a trace when stopped.

    with Server(["model_store/digits.mar"], port=0, management_port=0, metrics_port=0) as server:
        server.endpoints[0].url

Everything that it writes lies in a folder of its own (0700): configuration, archives, logs, sockets, keys. TorchServe
says "Model server started" whether or not a model works; here ready means that every worker is up by the management
API, that the settings read back are those of the archives, and that real samples are answered as the eager model
answers them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import ipaddress
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from deployer.bundle import MANIFEST, Bundle
from deployer.errors import BundleError, DeployerError, GateError, MachineError, ServerError, UsageError, nearest
from deployer.files import lock_folder
from deployer.package.mar import BUNDLE_FOLDER, Mar
from deployer.package.probe import Probe, make_probes
from deployer.package.settings import Settings
from deployer.package.torchserve import connections, read_mar, read_settings
from deployer.package.torchserve_worker import BUSY_FOLDER, FOLDER_VARIABLE, MANAGEMENT_VARIABLE
from deployer.parity import ParityReport
from deployer.protocol import JSON
from deployer.serve.config import (
    LOG4J,
    LOOPBACK,
    METRICS_FILE,
    Ports,
    config_properties,
    last_words,
    metrics_config,
    port_taken,
    registration_failure,
    worker_failure,
)
from deployer.serve.java import INSTALL, find_java
from deployer.serve.listening import stop_listening
from deployer.serve.management import (
    FOLDER_PREFIX,
    STATE,
    Instance,
    Management,
    State,
    check_answers,
    check_effective,
    settle_time_s,
    unpack,
    wait_until_idle,
)
from deployer.serve.ports import choose_ports
from deployer.serve.processes import end_session
from deployer.signature import KEY_VARIABLE, configured_key, signature_of
from deployer.signature import verify as verify_signature

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
DRAIN_S = 30.0

_POLL_S = 0.25
_LOG_SETTLE_S = 0.5  # a dying worker's traceback reaches its log line by line
_STOP_GRACE_S = 15.0
_SOCKET_PATH_LIMIT_BYTES = 107  # sockaddr_un
_TOKEN_LIMIT_BYTES = 200
_LEFTOVER_AGE_S = 60.0
_PORT_ATTEMPTS = 3
_OFF_ENVIRONMENT = ("LOG_LOCATION", "METRICS_LOCATION")


@dataclass(frozen=True)
class Served:
    """One archive that is being served."""

    mar: Mar
    settings: Settings
    bundle: Bundle
    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class Endpoint:
    """A version that answers: `sample` is a request body (JSON) that it has answered rightly. Requests that name no
    version go to the `default` one."""

    name: str
    version: str
    url: str
    settings: Settings
    sample: Path
    default: bool = True


class _PortTakenError(ServerError):
    """A port that was free when it was chosen."""


class Server:
    """TorchServe as a context manager. Ports of 0 mean any free one.

    `host` is where inference listens; management, metrics and gRPC stay on the loopback. `token_file` is an additional
    place for the inference token. With `verify_key`, a public key (default: that which the environment names, False:
    none), archives must be signed with it: each is held to its signature before it is read, and once more as the copy
    that is served; each worker holds bundle and hooks to theirs. With `ends_with_us` the kernel ends TorchServe when
    the thread that started it dies in whatever way, kill -9 included (Linux); the folder that is then left is removed
    by the next start.

    Of several versions of a model the first given is the default, unless `defaults` (name → version) names another.
    With `allow_changes` the owner may add and remove archives while it serves (`deployer.serve.management`).

    `stop` answers what was taken: new connections are refused, requests in flight waited for, `drain_s` at most.

    Raises on entry, with nothing left behind: UsageError (ports, settings, doubled models), BundleError,
    IntegrityError, MachineError (TorchServe or Java missing), GateError (not ready in time, a worker that dies, other
    settings than asked for, wrong answers).
    """

    def __init__(
        self,
        archives: Sequence[str | Path],
        *,
        host: str = LOOPBACK,
        port: int = 8080,
        management_port: int = 8081,
        metrics_port: int = 8082,
        start_timeout_s: float = START_TIMEOUT_S,
        token_file: str | Path | None = None,
        verify_key: str | Path | Literal[False] | None = None,
        ends_with_us: bool = False,
        defaults: Mapping[str, str] | None = None,
        allow_changes: bool = False,
        drain_s: float = DRAIN_S,
    ) -> None:
        if not archives:
            raise UsageError("no .mar given; `deployer package` makes one")
        if not start_timeout_s > 0:
            raise UsageError(f"--start-timeout-s {start_timeout_s:g}: more than 0 is expected")
        self._archives = [Path(archive) for archive in archives]
        self._host = _checked_host(host)
        self._wanted_ports = (port, management_port, metrics_port)
        self._start_timeout_s = start_timeout_s
        self._extra_token_file = _checked_token_file(token_file)
        self._verify_key = (
            configured_key() if verify_key is None else Path(verify_key).resolve() if verify_key else None
        )
        self._ends_with_us = ends_with_us
        self._defaults = dict(defaults or {})
        self._allow_changes = allow_changes
        self._drain_s = drain_s
        self._lock: int | None = None
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = Ports(0, 0, 0, 0, 0)
        self._keys: dict[str, str] = {}
        self.endpoints: list[Endpoint] = []
        #: what each version's answers were held to, by name and version
        self.reports: dict[tuple[str, str], ParityReport] = {}

    # ------------------------------------------------------------------------------------------------ what it is

    @property
    def folder(self) -> Path:
        """The instance's own folder; its logs are in `logs/`."""
        if self._folder is None:
            raise ServerError("the server is not running")
        return self._folder

    @property
    def pid(self) -> int:
        """The id of the frontend's process."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    @property
    def token(self) -> str:
        return self._keys["inference"]

    @property
    def token_file(self) -> Path:
        """A file (0600) that holds the inference token and nothing else."""
        return self._extra_token_file or self.folder / "token"

    @property
    def management_url(self) -> str:
        return f"http://{LOOPBACK}:{self._ports.management}"

    @property
    def metrics_url(self) -> str:
        return f"http://{LOOPBACK}:{self._ports.metrics}/metrics"

    @property
    def inference_url(self) -> str:
        host = LOOPBACK if ipaddress.ip_address(self._host).is_unspecified else self._host
        return f"http://{host}:{self._ports.inference}"

    # ------------------------------------------------------------------------------------------------ life

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until it is ready. Whatever goes wrong, an interrupt too, nothing is left behind."""
        if self._process is not None:
            raise UsageError("this server is already running")
        _check_installed()
        java = find_java(os.environ)
        mars = _read_archives(self._archives, self._verify_key)
        _check_defaults(self._defaults, mars)
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                self._start(mars, java)
                break
            except _PortTakenError as error:  # an asked-for port that stays taken is said when ports are chosen again
                if attempt == _PORT_ATTEMPTS:
                    raise
                log.warning("%s; starting again on others", error)

    def _start(self, mars: Sequence[Mar], java: Path) -> None:
        try:
            served = self._prepare(mars)
            self._launch(java)
            deadline = time.monotonic() + self._start_timeout_s
            self._read_keys(deadline)
            for entry in served:
                self._wait_for_workers(entry, deadline)
                described = self.describe(entry.mar.name, entry.mar.version) or {}
                check_effective(described, entry.mar, entry.settings)
                report = check_answers(self._url(entry.mar), entry.mar, entry.bundle, self.token)
                self.reports[entry.mar.name, entry.mar.version] = report
                shutil.rmtree(entry.bundle.path, ignore_errors=True)
            self._set_defaults(served)
            self.endpoints = [self._endpoint(entry) for entry in served]
            self._write_state(served)
            self._write_tokens()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Answer what was taken, end every process, remove the folder. Safe to call twice; an interrupt ends it at
        once."""
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        serves, self.endpoints = bool(self.endpoints), []
        try:
            if process is not None and folder is not None and serves and process.poll() is None:
                self._drain(process.pid, folder)
        finally:
            self._end(process, folder)

    def _drain(self, pid: int, folder: Path) -> None:
        """Take nothing more, and wait until what was taken is answered. On SIGTERM TorchServe resets every connection
        that it has, in the middle of an answer too.

        New connections are refused by the kernel where it lets us close the listening sockets. Clients that keep their
        connection get a 400 to their next request, which closes it: their token is no longer valid.
        """
        try:
            instance = Instance(folder)
            settle_s = settle_time_s(instance.management.describe_all())
            if not stop_listening(pid, {self._ports.inference, self._ports.grpc_inference}):
                log.info(
                    "this machine does not let us close the server's ports: requests are refused with 400 meanwhile"
                )
            instance.refuse_new_requests()
            if not wait_until_idle(instance.is_idle, settle_s, self._drain_s):
                log.warning("requests were still in flight after %g s; their connections are closed", self._drain_s)
        except DeployerError as error:
            log.warning("requests in flight are not waited for: %s", error)

    def _end(self, process: subprocess.Popen[bytes] | None, folder: Path | None) -> None:
        try:
            if process is not None:
                end_session(process, _STOP_GRACE_S)
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
                if self._lock is not None:
                    os.close(self._lock)
                    self._lock = None
                self._remove_extra_token()
            self._keys = {}

    def wait(self) -> None:
        """Block until interrupted. Raises ServerError when the server ends by itself."""
        while True:
            self._check_alive()
            time.sleep(_POLL_S)

    # ------------------------------------------------------------------------------------------------ start, in order

    def _prepare(self, mars: Sequence[Mar]) -> list[Served]:
        """The instance's folder with all that TorchServe reads. mkdtemp makes it 0700."""
        inference, management, metrics = self._wanted_ports
        free = choose_ports(
            self._host, [("--port", inference), ("--management-port", management), ("--metrics-port", metrics)]
        )
        self._ports = Ports(*free, *choose_ports(LOOPBACK, [("gRPC inference", 0), ("gRPC management", 0)]))
        remove_leftovers(Path(tempfile.gettempdir()))
        folder = self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._lock = lock_folder(folder)
        if len(os.fsencode(folder / "tmp" / ".ts.sock.9999")) > _SOCKET_PATH_LIMIT_BYTES:
            raise UsageError(f"the temporary folder '{folder.parent}' has too long a path for sockets; set TMPDIR")
        for name in ("store", "tmp", "logs", "bundles", "samples", BUSY_FOLDER):
            (folder / name).mkdir()
        names = [f"{index}.mar" for index in range(len(mars))]
        for mar, name in zip(mars, names, strict=True):
            _link_or_copy(mar.path, folder / "store" / name, link=self._verify_key is None)
        if self._verify_key is not None:  # nobody else can change the copies
            mars = _read_copies(mars, [folder / "store" / name for name in names], self._verify_key)
        served = [_served(mar, folder / "bundles" / str(index)) for index, mar in enumerate(mars)]
        (folder / "log4j2.xml").write_text(LOG4J)
        request_bytes = max(entry.settings.max_request_bytes for entry in served)
        response_bytes = max(entry.settings.max_response_bytes for entry in served)
        text = config_properties(
            self._host, self._ports, names, request_bytes, response_bytes, allow_changes=self._allow_changes
        )
        (folder / "config.properties").write_text(text)
        (folder / METRICS_FILE).write_text(metrics_config((_torchserve_home() / "configs/metrics.yaml").read_text()))
        return served

    def _launch(self, java: Path) -> None:
        """Start the frontend in a session of its own: a Ctrl-C in the terminal reaches us alone, and we end it all.

        Java is started directly: the `torchserve` command would stay between us and it, and die without ending it.
        """
        folder = self.folder
        home = _torchserve_home().parent
        command = [
            str(java / "bin" / "java"),
            f"-Dmodel_server_home={home}",
            f"-Dlog4j.configurationFile={(folder / 'log4j2.xml').as_uri()}",
            f"-Djava.io.tmpdir={folder / 'tmp'}",
            "-XX:+UseSerialGC",  # what it keeps is small; other collectors spend threads that the workers need
            "-XX:-UsePerfData",  # its file lies in /tmp whatever the temporary folder is, and outlives a kill
            *("-cp", str(home / "ts" / "frontend" / "*"), "org.pytorch.serve.ModelServer"),
            *("--python", sys.executable, "-f", "config.properties", "-s", str(folder / "store"), "-ncs"),
        ]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TS_") and name not in _OFF_ENVIRONMENT
        }
        environment |= {"TEMP": str(folder / "tmp"), "TMPDIR": str(folder / "tmp"), "JAVA_HOME": str(java)}
        environment.pop(KEY_VARIABLE, None)
        if self._verify_key is not None:
            environment[KEY_VARIABLE] = str(self._verify_key)
        environment |= {FOLDER_VARIABLE: str(folder), MANAGEMENT_VARIABLE: self.management_url}
        environment["TS_OPEN_INFERENCE_PROTOCOL"] = "oip"  # opens the routes /v2/…; the bodies are the handler's
        log.info("starting TorchServe")
        with (folder / "logs" / "console.log").open("wb") as console:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=console, stderr=console, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=_end_with_parent if self._ends_with_us else None,
            )  # fmt: skip

    def _read_keys(self, deadline: float) -> None:
        """The tokens, from the file that TorchServe writes in its working folder."""
        path = self.folder / "key_file.json"
        while True:
            self._check_alive()
            try:
                document = msgspec.json.decode(path.read_bytes())
                self._keys = {kind: str(document[kind]["key"]) for kind in ("inference", "management")}
                return
            except (FileNotFoundError, msgspec.DecodeError, KeyError):
                self._check_deadline(deadline, "TorchServe wrote no keys")
                time.sleep(_POLL_S)

    def _wait_for_workers(self, entry: Served, deadline: float) -> None:
        """Until every worker of a model is READY by the management API. A worker that dies ends the wait."""
        label = f"{entry.mar.name} {entry.mar.version}"
        wanted = connections(entry.settings)
        log.info("waiting for %d workers of %s", entry.settings.workers, label)
        while True:
            self._check_alive()
            self._check_logs()
            described = self.describe(entry.mar.name, entry.mar.version) or {}
            states = [worker.get("status") for worker in described.get("workers", [])]
            if states.count("READY") >= wanted:
                return
            self._check_deadline(deadline, f"{label} has {states.count('READY')} of {wanted} connections to workers")
            time.sleep(_POLL_S)

    def _check_alive(self) -> None:
        if not self.endpoints and self._folder is not None and port_taken(self._folder / "logs"):
            taken = ", ".join(str(port) for port in astuple(self._ports))
            raise _PortTakenError(f"one of the ports {taken} was taken by another program while TorchServe started")
        if self._process is None or self._process.poll() is not None:
            words = last_words(self.folder / "logs") if self._folder is not None else "it was stopped"
            raise ServerError(f"TorchServe ended by itself: {words}")

    def _check_logs(self) -> None:
        logs = self.folder / "logs"
        if failure := registration_failure(logs):
            raise GateError(f"TorchServe could not load a model: {failure}")
        if worker_failure(logs):
            time.sleep(_LOG_SETTLE_S)
            raise GateError(f"a worker could not start: {worker_failure(logs)}")

    def _check_deadline(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise GateError(
                f"not ready within {self._start_timeout_s:g} s: {what}; {last_words(self.folder / 'logs')}; "
                "see --start-timeout-s"
            )

    # ------------------------------------------------------------------------------------------------ what it does

    @property
    def management(self) -> Management:
        return Management(self.management_url, self._keys["management"])

    def describe(self, name: str, version: str) -> dict[str, Any] | None:
        """What the management API says of a model: effective settings and workers; None before it is registered."""
        try:
            return next(iter(self.management.describe(name, version)), None)
        except ServerError:
            return None

    def _set_defaults(self, served: Sequence[Served]) -> None:
        """TorchServe's default is the version that was registered first; it is told all the same."""
        for entry in served:
            self._defaults.setdefault(entry.mar.name, entry.mar.version)
        for name, version in self._defaults.items():
            self.management.set_default(name, version)

    def _write_state(self, served: Sequence[Served]) -> None:
        state = State(
            pid=self.pid,
            inference_url=self.inference_url,
            management_url=self.management_url,
            metrics_url=self.metrics_url,
            allow_changes=self._allow_changes,
            max_request_bytes=max(entry.settings.max_request_bytes for entry in served),
            max_response_bytes=max(entry.settings.max_response_bytes for entry in served),
            verify_key=str(self._verify_key) if self._verify_key is not None else None,
        )
        with os.fdopen(os.open(self.folder / STATE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(state))

    def _url(self, mar: Mar) -> str:
        return f"{self.inference_url}/predictions/{mar.name}/{mar.version}"

    def _endpoint(self, entry: Served) -> Endpoint:
        sample = self.folder / "samples" / f"{entry.mar.name}-{entry.mar.version}.json"
        sample.write_bytes(next(probe.body for probe in entry.probes if probe.content_type == JSON))
        default = self._defaults[entry.mar.name] == entry.mar.version
        return Endpoint(entry.mar.name, entry.mar.version, self._url(entry.mar), entry.settings, sample, default)

    def _write_tokens(self) -> None:
        for path in (self.folder / "token", self._extra_token_file):
            if path is not None:
                path.unlink(missing_ok=True)
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(f"{self.token}\n")

    def _remove_extra_token(self) -> None:
        """Take the additional token file away, unless somebody else has written there since."""
        path = self._extra_token_file
        with suppress(OSError):
            if path is not None and self._keys and path.read_text() == f"{self.token}\n":
                path.unlink()


def serve_check(archive: Path, start_timeout_s: float = START_TIMEOUT_S) -> ParityReport:
    """Serve one archive on free ports, hold its answers to its own samples, end the server.

    Who signed it is not asked. Raises GateError when it does not start or answers otherwise, and what Server raises.
    """
    with Server(
        [archive], port=0, management_port=0, metrics_port=0, start_timeout_s=start_timeout_s, verify_key=False,
        ends_with_us=True,
    ) as server:  # fmt: skip
        [report] = server.reports.values()
        return report


def _checked_token_file(token_file: str | Path | None) -> Path | None:
    """Raises UsageError before anything is started: a place that cannot be written, a file that is no token's."""
    if token_file is None:
        return None
    path = Path(token_file)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--token-file '{path}': a file in a folder that exists is expected")
    if path.exists() and (path.stat().st_size > _TOKEN_LIMIT_BYTES or len(path.read_bytes().split()) > 1):
        raise UsageError(f"--token-file '{path}' holds something else than a token; give another name")
    return path


def remove_leftovers(parent: Path) -> None:
    """Remove folders of servers whose starter is dead: nobody holds their lock."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _LEFTOVER_AGE_S:
                continue  # perhaps a server between making its folder and locking it
            descriptor = lock_folder(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _end_with_parent() -> None:
    """In the child, before Java starts: SIGTERM when the parent dies (prctl's PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _checked_host(host: str) -> str:
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError as error:
        raise UsageError(f"--host {host}: an IPv4 address such as {LOOPBACK} is expected") from error
    if not address.is_loopback:
        log.warning("inference will be reachable on %s, with the token; put TLS in front of it", host)
    return str(address)


def _torchserve_home() -> Path:
    import ts

    return Path(ts.__file__).resolve().parent


def _check_installed() -> None:
    if importlib.util.find_spec("ts") is None:
        raise MachineError("serving needs torchserve, which this machine lacks", install=INSTALL)


def _read_archives(paths: Sequence[Path], verify_key: Path | None) -> list[Mar]:
    """Every archive, checked; none twice. Nothing is started or written before all of them are read."""
    mars: dict[tuple[str, str], Mar] = {}
    for path in paths:
        if verify_key is not None and path.is_file():
            verify_signature(path, verify_key)
        mar = read_mar(path)
        if f"{BUNDLE_FOLDER}/{MANIFEST}" not in mar.entries:
            raise BundleError(f"'{path}' holds no bundle, it was not made by deployer; `deployer package` makes one")
        read_settings(mar)
        other = mars.setdefault((mar.name, mar.version), mar)
        if other is not mar:
            raise UsageError(f"'{other.path}' and '{path}' are both {mar.name} {mar.version}; give one of them")
    return list(mars.values())


def _check_defaults(defaults: Mapping[str, str], mars: Sequence[Mar]) -> None:
    given = [f"{mar.name}={mar.version}" for mar in mars]
    for name, version in defaults.items():
        if f"{name}={version}" not in given:
            raise UsageError(f"--default {name}={version} is none of the archives{nearest(f'{name}={version}', given)}")


def _served(mar: Mar, folder: Path) -> Served:
    """The archive's bundle, hashes verified and this machine held to its needs, and requests made of its samples."""
    bundle = unpack(mar, folder)
    return Served(mar, read_settings(mar), bundle, tuple(make_probes(bundle)))


def _read_copies(mars: Sequence[Mar], copies: Sequence[Path], verify_key: Path) -> list[Mar]:
    for mar, copy in zip(mars, copies, strict=True):
        shutil.copyfile(signature_of(mar.path), signature_of(copy))
        verify_signature(copy, verify_key)
    return [read_mar(copy) for copy in copies]


def _link_or_copy(source: Path, target: Path, *, link: bool) -> None:
    try:
        if not link:
            raise OSError
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
