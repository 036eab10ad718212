"""A running server is changed, asked too much, hurt and stopped, and every request still gets its answer.

One real TorchServe for all of it, in the order of this file; the last test stops it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from torch import Tensor, nn

from deployer.bench import HttpRow, bench
from deployer.checkpoint import load_checkpoint
from deployer.client import failure
from deployer.compare import compare
from deployer.errors import GateError, IntegrityError, ServerError, UsageError
from deployer.export import export
from deployer.formats import Target
from deployer.package import HookFiles, package
from deployer.serve import Server, healthcheck
from deployer.serve.management import Instance, find_instance
from deployer.spec import Dim, ModelSpec, TensorSpec
from tests.test_package_torchserve import with_config
from tests.test_serve_torchserve import has_model, with_handler

ANY_PORT = {"port": 0, "management_port": 0, "metrics_port": 0}
SLEEPS = """\
import time
import numpy as np

def preprocess(request):
    if request.content_type != "text/plain":
        return None
    time.sleep(float(bytes(request.body)))
    return {"x": np.ones(3, np.float32)}

def samples():
    return [(b"0", "text/plain")]
"""
TIMEOUT_S = 3
QUEUE_WAIT_S = 2
QUEUE_SIZE = 150


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 * x


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """scale 1.0 answers x, 2.0 answers 2·x; sleeper answers ones after as many seconds as it is told, 3 at most,
    and has room for 150 that wait 2 s."""
    folder = tmp_path_factory.mktemp("operations")
    (folder / "sleeps.py").write_text(SLEEPS)
    made = {}
    with pytest.MonkeyPatch.context() as patch:  # tried on their own samples when they are served
        patch.setattr(importlib.import_module("deployer.package.torchserve"), "check_archive", lambda *_: None)
        for name, version, model, hooks in (
            ("scale", "1.0", "Same", None),
            ("scale", "2.0", "Double", None),
            ("sleeper", "1.0", "Same", HookFiles(folder / "sleeps.py")),
        ):
            spec = ModelSpec(
                name, (TensorSpec("x", "float32", ("batch", 3)),), version=version, dims={"batch": Dim(1, 4, 16)},
                batch="batch",
            )  # fmt: skip
            samples = {"x": np.arange(12, dtype=np.float32).reshape(4, 3)}
            checkpoint = load_checkpoint(model=f"{__file__}:{model}", spec=spec, samples=samples)
            key = f"{name} {version}"
            bundle, _ = export(checkpoint, Target("onnx"), folder / key)
            made[key] = package(
                bundle, output=folder / key, workers=1, batch_size=4, hooks=hooks, response_timeout_s=TIMEOUT_S,
                max_queue_wait_s=QUEUE_WAIT_S,
            )  # fmt: skip
    target = folder / "sleeper-short.mar"
    made["sleeper 1.0"] = with_config(made["sleeper 1.0"], target, jobQueueSize=QUEUE_SIZE)
    return made


@pytest.fixture(scope="module")
def server(archives: dict[str, Path]) -> Iterator[Server]:
    with Server([archives["scale 1.0"], archives["sleeper 1.0"]], **ANY_PORT, allow_changes=True) as running:
        yield running


class Load:
    """Clients that ask for one path again and again, each over one connection, from entry to exit."""

    def __init__(self, server: Server, path: str, clients: int, content: bytes = b"", content_type: str = "") -> None:
        self.url, self.clients = server.inference_url + path, clients
        self.headers = {"Authorization": f"Bearer {server.token}", "Content-Type": content_type or "application/json"}
        self.content = content or b'{"x": [1, 2, 3]}'
        self.answers: list[httpx.Response] = []
        self.failures: list[Exception] = []
        self._over = threading.Event()

    def _client(self) -> None:
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not self._over.is_set():
                try:
                    self.answers.append(client.post(self.url, content=self.content, headers=self.headers))
                except httpx.HTTPError as error:
                    self.failures.append(error)
                    return
                time.sleep(0.01)  # the machine is needed by others, too

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._client) for _ in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        enough = len(self.answers) + more
        wait_until(lambda: len(self.answers) >= enough)


def wait_until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)


def ask(server: Server, path: str, content: bytes = b'{"x": [1, 2, 3]}', kind: str = "application/json") -> Any:
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": kind}
    return httpx.post(server.inference_url + path, content=content, headers=headers, timeout=60, trust_env=False)


# ------------------------------------------------------------------------------------------------------------ versions


def versions(instance: Instance) -> dict[str, tuple[bool, int]]:
    return {f"{one.name} {one.version}": (one.default, one.ready) for one in instance.versions()}


def test_a_new_version_is_added_and_becomes_the_default_and_the_old_one_goes_under_load(
    server: Server, archives: dict[str, Path]
) -> None:
    """No request is lost, and each is answered by the version that its answer names."""
    instance = find_instance(server.folder)
    with Load(server, "/predictions/scale", 4) as load:
        load.wait_for(20)
        added = instance.add(archives["scale 2.0"], 100)
        assert (added.default, added.ready) == (False, 2)  # two connections to one worker
        load.wait_for(20)
        assert {answer.json()["version"] for answer in load.answers} == {"1.0"}
        command = [sys.executable, "-m", "deployer", "versions", "--server", server.folder, "--json"]
        done = subprocess.run([*command, "--default", "scale=2.0"], capture_output=True, text=True, check=True)
        rows = json.loads(done.stdout)["versions"]
        assert [(row["name"], row["version"], row["default"]) for row in rows] == [
            ("scale", "1.0", False), ("scale", "2.0", True), ("sleeper", "1.0", True),
        ]  # fmt: skip
        load.wait_for(20)
        assert ask(server, "/predictions/scale/1.0").json()["outputs"] == {"output": [1, 2, 3]}
        instance.remove("scale", "1.0", 30)
        assert versions(instance) == {"scale 2.0": (True, 2), "sleeper 1.0": (True, 2)}
        load.wait_for(20)
    assert load.failures == []
    assert Counter(answer.status_code for answer in load.answers) == {200: len(load.answers)}
    for answer in load.answers:
        factor = {"1.0": 1, "2.0": 2}[answer.json()["version"]]
        assert answer.json()["outputs"] == {"output": [factor, 2 * factor, 3 * factor]}
    assert load.answers[-1].json()["version"] == "2.0"
    assert ask(server, "/predictions/scale/1.0").status_code == 404


def test_a_version_in_use_and_the_default_are_not_removed(server: Server, archives: dict[str, Path]) -> None:
    instance = find_instance(server.folder)
    instance.add(archives["scale 1.0"], 100)
    assert versions(instance)["scale 2.0"] == (True, 2)
    with pytest.raises(
        UsageError, match=r"scale 2\.0 is the default version; move the default first \(--default scale=1"
    ):
        instance.remove("scale", "2.0", 0)
    with pytest.raises(UsageError, match=r"sleeper 1\.0 is the default version; stop the server"):
        instance.remove("sleeper", "1.0", 0)
    with pytest.raises(UsageError, match=r"no scale=1\.1; did you mean 'scale=1\.0'"):
        instance.set_default("scale", "1.1")
    with pytest.raises(UsageError, match=r"has scale 1\.0 already"):
        instance.add(archives["scale 1.0"], 100)
    with Load(server, "/predictions/scale/1.0", 8) as load:
        load.wait_for(8)
        with pytest.raises(ServerError, match="still asked for"):
            instance.remove("scale", "1.0", 2)
    assert {answer.status_code for answer in load.answers} == {200}
    assert load.failures == []


def test_requests_are_split_among_versions_and_versions_are_compared(server: Server, tmp_path: Path) -> None:
    url = f"{server.inference_url}/predictions/scale"
    (tmp_path / "x.json").write_text('{"x": [[1, 2, 3]]}')
    np.savez(tmp_path / "x.npz", x=np.arange(1, 31, dtype=np.float32).reshape(10, 3))
    report = bench(
        url, input_path=tmp_path / "x.json", concurrency=[2], requests=100, split="1.0=50,2.0=50",
        token_file=server.token_file,
    )  # fmt: skip
    rows = [row for row in report.rows if isinstance(row, HttpRow)]
    assert [(row.version, row.ok == row.requests) for row in rows] == [("1.0", True), ("2.0", True)]
    assert sum(row.requests for row in rows) == 100
    assert all(25 <= row.requests <= 75 for row in rows)  # five standard deviations
    with pytest.raises(UsageError, match=r"no version 1\.1 of this model"):
        bench(url, input_path=tmp_path / "x.json", requests=9, split="1.0=1,1.1=1", token_file=server.token_file)
    tokens = {"token_a": server.token, "token_b": server.token}
    same = compare(f"{url}/2.0", url, tmp_path / "x.npz", max_abs_error=0, **tokens)
    assert (same.passed, same.bit_equal, same.answered) == (True, 10, 10)
    other = compare(f"{url}/1.0", f"{url}/2.0", tmp_path / "x.npz", max_abs_error=29, **tokens)
    assert (other.bit_equal, other.disagreements) == (0, 1)  # the last row alone holds 30
    assert (other.outputs["output"].max_abs_error, other.outputs["output"].max_rel_error) == (30, 0.5)


def test_an_archive_that_answers_wrongly_is_not_added(
    server: Server, archives: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = find_instance(server.folder)
    before = versions(instance)
    stored = sorted((server.folder / "store").iterdir())
    instance.remove("scale", "1.0", 30)
    zeros = (
        "class H:\n    def initialize(self, context):\n        pass\n    def handle(self, data, context):\n"
        '        return [b\'{"outputs": {"output": [0, 0, 0]}}\'] * len(data)\n'
    )
    wrong = with_handler(archives["scale 1.0"], tmp_path / "wrong.mar", zeros)
    with pytest.raises(GateError, match="output 'output' of a sample differs"):
        instance.add(wrong, 100)
    assert versions(instance) == {name: held for name, held in before.items() if name != "scale 1.0"}
    assert set((server.folder / "store").iterdir()) < set(stored)
    closed = find_instance(server.folder)
    closed.state = msgspec.structs.replace(closed.state, allow_changes=False)
    with pytest.raises(UsageError, match="started closed: nothing can be added; start it with --allow-changes"):
        closed.add(archives["scale 1.0"], 100)
    with pytest.raises(UsageError, match="nothing can be removed"):
        closed.remove("scale", "2.0", 0)
    signed = find_instance(server.folder)
    signed.state = msgspec.structs.replace(signed.state, verify_key=__file__)
    with pytest.raises(UsageError, match=r"is no public key in PEM"):
        signed.add(archives["scale 1.0"], 100)
    key = tmp_path / "pub.pem"
    private = ec.generate_private_key(ec.SECP256R1())
    key.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    signed.state = msgspec.structs.replace(signed.state, verify_key=str(key))
    with pytest.raises(IntegrityError, match="is not signed"):
        signed.add(archives["scale 1.0"], 100)
    assert versions(instance) == {name: held for name, held in before.items() if name != "scale 1.0"}
    small = find_instance(server.folder)
    small.state = msgspec.structs.replace(small.state, max_request_bytes=1000)
    with pytest.raises(UsageError, match=r"needs max_request_bytes 6553500, and the server was started with 1000"):
        small.add(archives["scale 1.0"], 100)


def test_with_changes_allowed_nothing_is_fetched_and_nothing_read_from_elsewhere(
    server: Server, archives: dict[str, Path]
) -> None:
    """Who has the management token can register what lies in the server's own folder, and nothing else."""
    key = json.loads((server.folder / "key_file.json").read_text())["management"]["key"]
    headers = {"Authorization": f"Bearer {key}"}
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0.5)
        place = f"127.0.0.1:{stranger.getsockname()[1]}"
        urls = [
            f"http://{place}/scale.mar", f"https://{place}/scale.mar", f"ftp://{place}/scale.mar",
            f"file:///nonexistent/..{archives['scale 1.0']}", f"file://{archives['scale 1.0']}",
            str(archives["scale 1.0"]), "../config.properties",
            "../store/../../x.mar", f"jar:http://{place}/scale.mar!/", "s3://bucket/scale.mar",
        ]  # fmt: skip
        for url in urls:
            for path in ("/models", "/workflows"):
                answer = httpx.post(
                    server.management_url + path, params={"url": url, "model_name": "new"}, headers=headers,
                    timeout=60, trust_env=False,
                )  # fmt: skip
                # What follows the last slash is taken as a name in the server's store; of this one it is the store.
                assert answer.status_code >= 400 or url.startswith("jar:"), (path, url)
        httpx.delete(f"{server.management_url}/models/new", headers=headers, timeout=60, trust_env=False)
        with pytest.raises(TimeoutError):
            stranger.accept()
    nobody: dict[str, str] = {}
    for wrong in (nobody, {"Authorization": f"Bearer {server.token}"}):
        answer = httpx.post(f"{server.management_url}/models", params={"url": "0.mar"}, headers=wrong, trust_env=False)
        assert answer.status_code >= 400
    assert "new" not in {one.name for one in find_instance(server.folder).versions()}


def test_defaults_and_servers_that_there_are_not_are_named(
    archives: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"--default scale=3 is none of the archives; did you mean 'scale=1\.0'"):
        Server([archives["scale 1.0"]], **ANY_PORT, defaults={"scale": "3"}).start()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UsageError, match="no server of yours is ready"):
        find_instance()
    with pytest.raises(UsageError, match="is no folder of a server that is ready"):
        find_instance(tmp_path)


# ------------------------------------------------------------------------------------------- too much, too late, dead


async def storm(server: Server, requests: int, seconds: str) -> list[httpx.Response]:
    """`requests` requests over as many connections, all at once."""
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "text/plain"}
    limits = httpx.Limits(max_connections=requests)
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits, headers=headers) as client:
        url = f"{server.inference_url}/predictions/sleeper"
        return await asyncio.gather(*(client.post(url, content=seconds) for _ in range(requests)))


def test_a_storm_is_answered_or_refused_with_a_time_to_come_back(server: Server) -> None:
    """200 at once for a model that answers 20 a second: its queue takes 150, and nobody waits the 10 s they need."""
    answers = asyncio.run(storm(server, 200, "0.05"))
    by_status = {status: [one for one in answers if one.status_code == status] for status in (200, 503)}
    assert sum(map(len, by_status.values())) == len(answers) == 200
    assert 20 <= len(by_status[200]) < 150
    ours = [one for one in by_status[503] if "retry-after" in one.headers]
    assert len(ours) >= 20
    for one in ours:
        assert 1 <= int(one.headers["retry-after"]) <= 10
        assert "sleeper 1.0 has more requests waiting than it answers in 2 s" in one.json()["error"]["message"]
        error = failure(one)
        assert isinstance(error, ServerError)
        assert (error.status, error.retry_after_s) == (503, float(one.headers["retry-after"]))
    for one in by_status[503]:
        assert "try again in" in str(failure(one))
    wait_until(lambda: (server.describe("sleeper", "1.0") or {})["jobQueueStatus"]["pendingRequests"] == 0)
    assert ask(server, "/predictions/sleeper", b"0", "text/plain").status_code == 200
    assert ask(server, "/predictions/scale").status_code == 200


def test_a_model_that_hangs_is_timed_out_by_name_and_replaced(server: Server) -> None:
    hung = ready_worker(server)
    answers = Queue(server, "1000", 12).join()
    [answer] = [one for one in answers if one.status_code == 504]
    # It, and a batch of 4 that the frontend had sent over each connection.
    assert sum(one.status_code >= 500 for one in answers) <= 9
    assert sum(one.status_code == 200 for one in answers) >= 4
    error = failure(answer)
    assert isinstance(error, ServerError)
    assert re.search(r"\(504\): sleeper 1\.0 did not answer within 3 s.*--response-timeout-s", str(error))
    wait_until(lambda: ready_worker(server) not in (None, hung))
    assert ask(server, "/predictions/sleeper", b"0", "text/plain").status_code == 200


def test_a_killed_worker_leaves_no_request_without_an_answer(server: Server, tmp_path: Path) -> None:
    """Those that it had get a 5xx, those in the queue are answered by the one that comes; /ping says Healthy all the
    while, the management API does not."""
    (tmp_path / server.folder.name).symlink_to(server.folder)
    victim = ready_worker(server)
    assert victim is not None
    queue = Queue(server, "2.5", 7)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: ready_worker(server) is None)
    owner = {"Authorization": f"Bearer {server.token}"}
    assert httpx.get(f"{server.inference_url}/ping", headers=owner, trust_env=False).json() == {"status": "Healthy"}
    wait_until(lambda: "sleeper 1.0 has no worker that is ready" in healthcheck.reason(tmp_path))
    answers = queue.join()
    counts = Counter(answer.status_code // 100 for answer in answers)
    assert counts[2] + counts[5] == 8
    assert 1 <= counts[5] <= 5  # that in its hands, and a batch that lay in its other connection
    for answer in answers:
        if answer.status_code != 200:
            assert "the worker that had the request died" in str(failure(answer))
    assert ready_worker(server) not in (None, victim)
    wait_until(lambda: healthcheck.reason(tmp_path) == "")


class Queue:
    """A request for `seconds` in the worker's hands, and `more` short ones that the frontend has taken behind it."""

    def __init__(self, server: Server, seconds: str, more: int) -> None:
        self.answers: list[httpx.Response] = []
        self._server = server
        texts = [seconds.encode(), *[b"0.05"] * more]
        self._threads = [threading.Thread(target=self._ask, args=(text,)) for text in texts]
        taken = requests_taken(server)
        self._threads[0].start()
        time.sleep(0.3)
        for thread in self._threads[1:]:
            thread.start()
        wait_until(lambda: requests_taken(server) == taken + 1 + more)

    def _ask(self, text: bytes) -> None:
        self.answers.append(ask(self._server, "/predictions/sleeper", text, "text/plain"))

    def join(self) -> list[httpx.Response]:
        for thread in self._threads:
            thread.join()
        return self.answers


def requests_taken(server: Server) -> float:
    text = httpx.get(server.metrics_url, trust_env=False).text
    return sum(map(float, re.findall(r'^ts_inference_requests_total\{model_name="sleeper".*\} (\S+)$', text, re.M)))


def ready_worker(server: Server) -> int | None:
    """The process that answers for the sleeper, if there is one: of two connections one has no model behind it."""
    workers = (server.describe("sleeper", "1.0") or {})["workers"]
    ready = [worker["pid"] for worker in workers if worker["status"] == "READY"]
    return next((pid for pid in ready if psutil.pid_exists(pid) and has_model(pid)), None)


# --------------------------------------------------------------------------------------------------------- the last act


def test_a_stop_answers_what_was_taken_and_refuses_the_rest(server: Server) -> None:
    """Requests in a worker and in the queue are answered; who connects later is refused by the kernel; who keeps a
    connection gets one answer that closes it."""
    before = server.folder
    kept = httpx.Client(timeout=60, trust_env=False)
    headers = {"Authorization": f"Bearer {server.token}"}
    assert kept.get(f"{server.inference_url}/ping", headers=headers).status_code == 200
    url = server.inference_url
    queue = Queue(server, "2.5", 7)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    wait_until(lambda: refused(url))
    assert before.exists()
    wait_until(lambda: kept.get(f"{url}/ping", headers=headers).status_code == 400)
    with pytest.raises(httpx.ConnectError):
        kept.get(f"{url}/ping", headers=headers)
    assert [answer.status_code for answer in queue.join()] == [200] * 8
    stopping.join()
    assert not before.exists()


def refused(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return True
    return False
