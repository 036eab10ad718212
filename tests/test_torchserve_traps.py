"""What TorchServe does silently and wrongly, each held by its cure (docs/torchserve.md): the files that an instance is
started with, the handler without a server, and one server started amid settings of the environment that mean harm."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import re
import socket
import sys
import time
import tomllib
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings
from torch import Tensor, nn

import handlers.deployer_handler
from deployer.bundle import read_bundle
from deployer.checkpoint import load_checkpoint
from deployer.client import predict
from deployer.export import export
from deployer.formats import Target
from deployer.package import package
from deployer.package.settings import Settings, choose_settings
from deployer.package.torchserve import model_config
from deployer.predictor import Predictor, Request
from deployer.protocol import JSON, NPY, npy_bytes
from deployer.protocol.oip import HEADER_LENGTH
from deployer.serve import Server
from deployer.serve.config import Ports, config_properties
from deployer.serve.processes import session_members
from deployer.spec import Dim, ModelSpec, TensorSpec
from handlers.deployer_handler import METRICS_PERIOD_S, DeployerHandler
from tests.hostile import batches, predictor_of

ROOT = Path(__file__).resolve().parent.parent
HANDLER = Path(handlers.deployer_handler.__file__)
SETTINGS = Settings(16, 5, 2, 1, 7_000_000, 8_000_000, 500, 60, 10)


# ------------------------------------------------------------------------------------------------- without a server


def test_what_the_worker_imports_is_installed_with_deployer() -> None:
    """TorchServe's wheel names neither PyYAML nor numpy, and its worker dies without them."""
    home = Path(importlib.util.find_spec("ts").origin or "").parent  # type: ignore[union-attr]
    files = [path for part in (".", "metrics", "protocol", "utils") for path in (home / part).glob("*.py")]
    assert len(files) > 20
    imported: set[str] = set()
    for path in files:
        if path.name in ("llm_launcher.py", "launcher.py", "model_server.py", "hf_utils.py"):
            continue  # not of the worker
        for node in ast.parse(path.read_text()).body:  # imports inside functions are optional ones
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            imported |= {name.split(".")[0] for name in names}
    foreign = imported - set(sys.stdlib_module_names) - {"ts"}
    assert "yaml" in foreign
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    promised = {line.split(">")[0].split("=")[0] for line in lines}
    optional = {"pynvml", "nvgpu", "PIL"}  # of GPU figures and of image handlers, which are not ours
    assert {{"yaml": "pyyaml"}.get(name, name) for name in foreign - optional} <= promised


def properties() -> dict[str, str]:
    text = config_properties("127.0.0.1", Ports(1, 2, 3, 4, 5), ["0.mar"], 7_000_000, 8_000_000)
    return dict(line.split("=", 1) for line in text.splitlines())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("metrics_mode", "prometheus"),  # the default, LOG, leaves /metrics empty
        ("decode_input_request", "false"),  # else Java's JSON turns floats and loses what is no JSON
        ("enable_envvars_config", "false"),  # else TS_… of the environment wins over this file
        ("disable_token_authorization", "false"),
        ("enable_model_api", "false"),
        ("allowed_urls", "(?!)"),  # nothing; the default matches everything (CVE-2023-43654)
        ("install_py_dep_per_model", "false"),
        ("max_request_size", "14000000"),
        ("max_response_size", "8000000"),
    ],
)
def test_what_stands_in_the_configuration(key: str, value: str) -> None:
    assert properties()[key] == value


def test_limits_of_bodies_stay_java_integers() -> None:
    text = config_properties("127.0.0.1", Ports(1, 2, 3, 4, 5), ["0.mar"], 2**31 - 1, 2**31 - 1)
    assert f"max_request_size={2**31 - 1}\n" in text


def test_no_envelope_stands_between_the_protocol_and_the_handler() -> None:
    """TorchServe's `kservev2` envelope reads request 0 of a batch alone and turns FP32 into INT64."""
    assert not any("envelope" in key for key in [*properties(), *yaml.safe_load(model_config(SETTINGS))])


def test_what_stands_in_the_configuration_of_a_model() -> None:
    config = yaml.safe_load(model_config(SETTINGS))
    assert config["maxBatchDelay"] == 5
    assert config["responseTimeout"] >= 60  # a slower answer costs the worker its life
    assert config["startupTimeout"] >= 120
    assert config["jobQueueSize"] >= 100
    assert config["deployer"]["intra_op_threads"] == 1


def test_threads_and_workers_share_the_cores(lookup_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers of two threads each on two cores ran 2.4 times slower than two of one."""
    monkeypatch.setattr(sys.modules[choose_settings.__module__], "usable_cores", lambda: 8)
    manifest = read_bundle(lookup_bundle).manifest
    for workers, threads in ((None, 4), (1, 8), (3, 2), (8, 1), (20, 1)):
        chosen = choose_settings(manifest, batch_size=None, max_batch_delay_ms=None, workers=workers)
        assert (chosen.workers, chosen.intra_op_threads) == (workers or 2, threads)


def test_the_handlers_file_is_one_that_the_loader_takes() -> None:
    """Imported by its base name: that name is nobody else's, no import is relative, one class is defined."""
    assert importlib.util.find_spec(HANDLER.stem) is None
    tree = ast.parse(HANDLER.read_text())
    assert sum(isinstance(node, ast.ClassDef) for node in tree.body) == 1
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


class Context:
    """What a handler sees of TorchServe's context, and what it tells it."""

    def __init__(self, folder: Path, headers: list[dict[str, Any]] | None = None) -> None:
        self.system_properties = {"model_dir": str(folder)}
        self.model_yaml_config = {"deployer": {"intra_op_threads": 1, "max_request_bytes": 1000}}
        self.headers = headers or []
        self.statuses: dict[int, int] = {}
        self.types: dict[int, str] = {}

    def get_all_request_header(self, index: int) -> dict[str, Any]:
        return self.headers[index]

    def set_response_status(self, code: int, phrase: str, idx: int) -> None:
        assert phrase == HTTPStatus(code).phrase
        self.statuses[idx] = code

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.types[idx] = value

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        assert isinstance(value, str)


@pytest.fixture(scope="module")
def handler(lookup_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> DeployerHandler:
    folder = tmp_path_factory.mktemp("model")
    (folder / "bundle").symlink_to(lookup_bundle)
    before = torch.get_num_threads()
    made = DeployerHandler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handlers.deployer_handler, "report", lambda _: None)
        made.initialize(Context(folder))
    torch.set_num_threads(before)
    return made


def test_the_handler_hands_its_threads_to_the_runtime(
    lookup_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def opens(*given: Any, **_: Any) -> Predictor:
        opened.append(given)
        return predictor_of("lookup")

    monkeypatch.setattr(handlers.deployer_handler.Predictor, "open", opens)
    monkeypatch.setattr(handlers.deployer_handler, "report", lambda _: None)
    DeployerHandler().initialize(Context(tmp_path))
    assert opened == [(tmp_path / "bundle", 1)]


def test_one_answer_a_request_whatever_the_batch_holds(handler: DeployerHandler, tmp_path: Path) -> None:
    """An exception out of `handle`, or a list of another length, would be a 503 for every request of the batch."""
    items: list[dict[str, Any]] = [
        {"body": bytearray(b'{"ids": [0, 1, 2]}')}, {"body": b'{"ids": [0, 1'}, {}, {"file": b"a form"},
        {"body": '{"ids": [3, 4, 5]}'}, {"body": {"ids": [6, 7, 8]}}, {"body": None}, {"data": b'{"ids": [9, 9, 9]}'},
        {"body": b" " * 1001}, {"body": b"\x80\x81"},
    ]  # fmt: skip
    headers: list[dict[str, Any]] = [{"Content-Type": JSON} for _ in items]
    headers[3] = {"content-type": "multipart/form-data; boundary=x", "file": {"content-type": "image/png"}}
    headers[2] = {"body": {"content-type": None}}
    context = Context(tmp_path, headers)
    bodies = handler.handle(items, context)
    assert len(bodies) == len(items)
    assert [context.statuses[i] for i in range(len(items))] == [200, 400, 400, 415, 200, 200, 400, 200, 413, 400]
    assert set(context.types.values()) == {JSON}
    values = [list(msgspec.json.decode(bodies[index])["outputs"].values()) for index in (0, 4, 5, 7)]
    assert values == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]], [[9, 9, 9]]]
    fault = msgspec.json.decode(bodies[8])["error"]
    assert (fault["expected"], fault["got"]) == ("at most 1000 bytes", "1001 bytes")


def test_a_failing_model_fails_its_own_request_alone(
    handler: DeployerHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = handler.predictor._runner

    def poisoned(arrays: Any) -> Any:
        if (arrays["ids"] == 7).any():
            raise MemoryError("no room for 7")
        return runner(arrays)

    monkeypatch.setattr(handler.predictor, "_runner", poisoned)
    context = Context(tmp_path, [{}] * 3)
    handler.handle([{"body": b'{"ids": [%d, 0, 0]}' % value} for value in (6, 7, 8)], context)
    assert context.statuses == {0: 200, 1: 500, 2: 200}


# ------------------------------------------------------------------------------------------------- one real server


class Lookup(nn.Module):
    """ids (batch, 3) in 0..9 → the same as float32, looked up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 1, _weight=torch.arange(10.0).reshape(10, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).flatten(1)


class Mean(nn.Module):
    """The means of a volume's blocks of eight by eight by eight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool3d(x, 8)


LOOKUP = ModelSpec(
    "lookup", (TensorSpec("ids", "int64", ("batch", 3), low=0, high=9),), dims={"batch": Dim(1, 8, 16)}, batch="batch"
)
SIDE = 72  # such a volume takes 7.1 MB as JSON, more than TorchServe takes by default
VOLUME = ModelSpec("volume", (TensorSpec("x", "float32", (1, 1, SIDE, SIDE, SIDE)),))
VALUE = np.float32(1 / 3)
DELAY_MS = 50


@pytest.fixture(scope="module")
def lookup_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = load_checkpoint(
        model=f"{__file__}:Lookup", spec=LOOKUP, samples={"ids": np.array([[0, 1, 2], [7, 8, 9]])}
    )
    return export(checkpoint, Target("onnx"), tmp_path_factory.mktemp("lookup"))[0].path


@pytest.fixture(scope="module")
def server(lookup_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Started where the environment asks for another configuration, a snapshot and decoded requests."""
    folder = tmp_path_factory.mktemp("traps")
    volume = load_checkpoint(
        model=f"{__file__}:Mean", spec=VOLUME, samples={"x": np.full((1, 1, SIDE, SIDE, SIDE), VALUE)}
    )
    bundles = [lookup_bundle, export(volume, Target("onnx"), folder)[0].path]
    archives = [
        package(bundles[0], output=folder, batch_size=8, max_batch_delay_ms=DELAY_MS, workers=1),
        package(bundles[1], output=folder, workers=1),
    ]
    harm = folder / "harm.properties"
    entry = {"defaultVersion": True, "marName": "0.mar", "minWorkers": 1, "maxWorkers": 1, "batchSize": 1}
    models = json.dumps({"lookup": {"1.0": {**entry, "maxBatchDelay": 900, "responseTimeout": 1}}})
    harm.write_text(f"enable_envvars_config=true\nbatch_size=1\nmodels={models}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TS_CONFIG_FILE", str(harm))
        patch.setenv("TS_DECODE_INPUT_REQUEST", "true")
        patch.setenv("TS_DISABLE_TOKEN_AUTHORIZATION", "true")
        patch.setenv("LOG_LOCATION", str(folder / "elsewhere"))
        patch.setenv("METRICS_LOCATION", str(folder / "elsewhere"))
        with Server(archives, port=0, management_port=0, metrics_port=0) as running:
            yield running
    assert not (folder / "elsewhere").exists()


def owner(server: Server, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.token}", **more}


async def post_all(server: Server, path: str, bodies: list[bytes]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as client:
        headers = owner(server, **{"Content-Type": JSON})
        return await asyncio.gather(
            *(client.post(server.inference_url + path, content=body, headers=headers) for body in bodies)
        )


def test_settings_of_the_environment_do_not_win(server: Server) -> None:
    described = server.describe("lookup", "1.0") or {}
    found = [described[key] for key in ("batchSize", "maxBatchDelay", "responseTimeout", "minWorkers", "maxWorkers")]
    assert found == [8, DELAY_MS, 125, 2, 2]  # two connections to one worker
    assert httpx.get(f"{server.inference_url}/ping", trust_env=False).status_code == 400  # without the token


def test_tokens_outlive_the_server_and_lie_in_its_folder(server: Server) -> None:
    """By default they expire after 60 minutes, and everything is answered with 400 from then on."""
    document = json.loads((server.folder / "key_file.json").read_text())
    for kind in ("inference", "management"):
        year = int(document[kind]["expiration time"][:4])
        assert year >= time.gmtime().tm_year + 50
    assert Path(psutil.Process(server.pid).cwd()) == server.folder


def test_sockets_lie_in_the_folder_of_the_instance(server: Server) -> None:
    """By default all servers of a machine share /tmp/.ts.sock.9000; Java does not heed TMPDIR."""
    paths = {
        connection.laddr
        for process in session_members(server.pid)
        for connection in process.net_connections("unix")
        if isinstance(connection.laddr, str) and ".ts.sock" in connection.laddr
    }
    assert len(paths) == 4  # two connections to the worker of each model
    assert all(Path(path).is_relative_to(server.folder / "tmp") for path in paths)


def test_concurrent_requests_of_the_open_inference_protocol_keep_their_own_values(server: Server) -> None:
    """By TorchServe's envelope all but the first of a batch get 503, and FP32 becomes INT64."""
    bodies = [
        json.dumps({"id": str(n), "inputs": [{"name": "ids", "shape": [1, 3], "datatype": "INT64", "data": [n, 1, 2]}]})
        for n in range(10)
    ]
    responses = asyncio.run(post_all(server, "/v2/models/lookup/infer", [body.encode() for body in bodies]))
    for number, response in enumerate(responses):
        assert response.status_code == 200, response.text
        document = response.json()
        [output] = document["outputs"]
        assert (document["id"], output["datatype"], output["data"]) == (str(number), "FP32", [number, 1, 2])
    assert max(int(response.headers["x-deployer-run-requests"]) for response in responses) > 1


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v2/health/ready", 200), ("/v2/models/lookup", 404), ("/v2/models/lookup/ready", 404),
     ("/v2/models/lookup/versions/1.0", 501)],
)  # fmt: skip
def test_routes_that_exist_and_those_that_do_not(server: Server, path: str, status: int) -> None:
    """docs/protocol.md says so."""
    assert httpx.get(server.inference_url + path, headers=owner(server), trust_env=False).status_code == status


def test_histograms_are_in_the_metrics(server: Server) -> None:
    """TorchServe has counters of microseconds, and histograms that begin at 5 ms; what it was not told of it drops."""

    def series() -> dict[str, float]:
        text = httpx.get(server.metrics_url, trust_env=False).text
        found = re.findall(r'^(deployer_\w+)\{model_name="lookup",model_version="1.0",([^ ]*)\} (\S+)$', text, re.M)
        return {f"{name} {re.sub(',?Hostname=.*', '', labels)}": float(value) for name, labels, value in found}

    time.sleep(1.5 * METRICS_PERIOD_S)  # what was counted before may still be on its way
    before = series()

    def growth() -> dict[str, float]:
        return {name: value - before.get(name, 0) for name, value in series().items()}

    asyncio.run(post_all(server, "/predictions/lookup", [b'{"ids": [0, 1, 2]}'] * 10 + [b"{"] * 3))
    deadline_s = time.monotonic() + 30
    while growth().get('deployer_errors_total status="400"', 0) < 3 or growth()["deployer_run_requests_sum "] < 10:
        assert time.monotonic() < deadline_s, growth()
        time.sleep(0.2)
    time.sleep(0.2)
    grown = growth()
    for stage in ("decode", "wait", "infer", "encode"):
        counts = [value for name, value in grown.items() if f'bucket stage="{stage}"' in name]
        assert len(counts) == 16
        assert grown[f'deployer_stage_seconds_bucket stage="{stage}",le="+Inf"'] == 10 == max(counts)
        assert grown[f'deployer_stage_seconds_count stage="{stage}"'] == 10
        assert grown[f'deployer_stage_seconds_sum stage="{stage}"'] > 0
    assert grown["deployer_run_requests_sum "] == 10
    assert 1 <= grown["deployer_run_requests_count "] <= 10
    assert grown['deployer_errors_total status="400"'] == 3


def test_one_bad_request_in_a_batch_is_its_own_over_http(server: Server) -> None:
    """Malformed, ragged, beyond the table on either side, not an integer, misnamed: each its own 400."""
    bodies = [
        b'{"ids": [0, 1, 2]}', b'{"ids": [0, 1', b'{"ids": [[1, 2], [3]]}', b'{"ids": [0, 1, 10]}',
        b'{"ids": [0, -1, 2]}', b'{"ids": [1.5, 2, 0]}', b'{"idz": [1, 2, 3]}', b'{"ids": [2, 3, 4]}',
    ]  # fmt: skip
    responses = asyncio.run(post_all(server, "/predictions/lookup", bodies))
    assert [response.status_code for response in responses] == [200, 400, 400, 400, 400, 400, 400, 200]
    assert [list(responses[index].json()["outputs"].values()) for index in (0, 7)] == [[[0, 1, 2]], [[2, 3, 4]]]
    for index, value in ((3, "10"), (4, "-1")):
        message = responses[index].json()["error"]["message"]
        assert f"holds {value} at index" in message
        assert "from 0 to 9" in message


def test_a_body_over_torchserves_default_is_answered(server: Server) -> None:
    """The archive carries a limit that follows from the model's spec."""
    volume = {"x": np.full((1, 1, SIDE, SIDE, SIDE), VALUE)}
    body = msgspec.json.encode({"inputs": {"x": volume["x"].tolist()}})
    assert len(body) > 6_553_500
    response = httpx.post(
        server.endpoints[1].url, content=body, headers=owner(server, **{"Content-Type": JSON}), timeout=60
    )
    assert response.status_code == 200, response.text
    [value] = response.json()["outputs"].values()
    np.testing.assert_allclose(np.array(value), np.full((1, 1, 9, 9, 9), VALUE), rtol=1e-5)


def test_a_body_over_the_models_limit_is_413_with_limit_and_size(server: Server) -> None:
    body = b'{"ids": [' + b"0.25," * 1_500_000 + b"0]}"
    headers = owner(server, **{"Content-Type": JSON})
    response = httpx.post(server.endpoints[0].url, content=body, headers=headers, timeout=60)
    assert response.status_code == 413
    fault = response.json()["error"]
    assert (fault["expected"], fault["got"]) == ("at most 6553500 bytes", f"{len(body)} bytes")
    assert predict(server.endpoints[0].url, np.arange(3), token=server.token).outputs


def test_deep_nesting_is_400(server: Server) -> None:
    body = b'{"ids": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    [response] = asyncio.run(post_all(server, "/predictions/lookup", [body]))
    assert response.status_code == 400
    assert "nested too deeply" in response.json()["error"]["message"]


def test_a_length_that_lies_costs_nobody_anything(server: Server) -> None:
    """A client that promises more than it sends waits alone; what it promised is never allocated or guessed."""
    host, port = server.inference_url.removeprefix("http://").split(":")
    worker = (server.describe("lookup", "1.0") or {})["workers"][0]["pid"]
    body = b'{"ids": [1, 2, 3]}'
    head = (
        f"POST /predictions/lookup HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body) + 1_000_000}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=1) as liar:
        liar.sendall(head.encode() + body)
        with pytest.raises(TimeoutError):
            liar.recv(1)
        answered = predict(server.endpoints[0].url, np.arange(3), token=server.token, accept=NPY)
    np.testing.assert_array_equal(answered.outputs[""], [0, 1, 2])
    assert (server.describe("lookup", "1.0") or {})["workers"][0]["pid"] == worker


def test_gzip_is_refused_by_name_not_decoded(server: Server) -> None:
    import gzip

    response = httpx.post(
        server.endpoints[0].url, content=gzip.compress(npy_bytes(np.arange(3))),
        headers=owner(server, **{"Content-Type": NPY, "Content-Encoding": "gzip"}), timeout=60,
    )  # fmt: skip
    assert (response.status_code, "gzip" in response.json()["error"]["message"]) == (415, True)


def test_a_form_of_many_fields_is_refused_and_costs_nothing(server: Server) -> None:
    """CVE-2024-29025: netty keeps every field of a form in an object of its own."""
    frontend = psutil.Process(server.pid)
    fields = "&".join(f"f{number}=1" for number in range(200_000))
    parts = "".join(f'--x\r\nContent-Disposition: form-data; name="f{n}"\r\n\r\n1\r\n' for n in range(20_000))
    for kind, body in (
        ("application/x-www-form-urlencoded", fields),
        ("multipart/form-data; boundary=x", parts + "--x--"),
    ):
        headers = owner(server, **{"Content-Type": kind})
        response = httpx.post(server.endpoints[0].url, content=body.encode(), headers=headers, timeout=60)
        assert 400 <= response.status_code < 500, (kind, response.status_code, response.text[:200])
    answer = predict(server.endpoints[0].url, {"ids": np.array([[0, 1, 2]])}, token=server.token)
    assert [array.shape[0] for array in answer.outputs.values()] == [1]
    assert frontend.is_running()


def test_every_request_on_a_connection_is_asked_for_the_token(server: Server) -> None:
    """One that was smuggled behind a right one is refused all the same."""
    port = int(server.inference_url.rpartition(":")[2])
    body = b'{"ids": [[0, 1, 2]]}'
    head = f"POST /predictions/lookup HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n"
    right = f"{head}Authorization: Bearer {server.token}\r\n\r\n".encode() + body
    smuggled = f"{head}\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        seen = b""
        for sent, marks in ((right, 1), (smuggled, 2)):
            connection.sendall(sent)
            while seen.count(b"HTTP/1.1 ") < marks and (block := connection.recv(65536)):
                seen += block
    assert re.findall(rb"HTTP/1\.1 (\d+)", seen) == [b"200", b"400"]
    assert b"Token" in seen


def test_no_listener_speaks_tls(server: Server) -> None:
    import ssl

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    ports = [
        connection.laddr.port
        for process in session_members(server.pid)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(ports) == 5
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain, pytest.raises((ssl.SSLError, OSError)):
            context.wrap_socket(plain)


def test_malformed_requests_over_http_hurt_nobody(server: Server, lookup_bundle: Path) -> None:
    """Some of those of `tests/hostile.py`, through Java, all at once: no 5xx, and right ones answered as alone."""
    drawn: list[tuple[bool, Request]] = []

    @seed(3)
    @hypothesis_settings(
        max_examples=60, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(batches(LOOKUP))
    def draw(batch: list[tuple[bool, Request]]) -> None:
        drawn.extend((right, request) for right, request in batch if carried(request))

    draw()
    assert len(drawn) > 100
    responses = asyncio.run(post_requests(server, [request for _, request in drawn]))
    with Predictor.open(lookup_bundle) as predictor:
        for (right, request), response in zip(drawn, responses, strict=True):
            assert response.status_code < 500, (request, response.text)
            if right:
                [lone] = predictor.answer([request])
                assert (response.status_code, response.content) == (200, lone.body), request
    assert sum(response.status_code != 200 for response in responses) > 50


def carried(request: Request) -> bool:
    """Whether HTTP takes its headers; the other clients are refused by Java, or by their own library."""
    texts = (request.content_type, request.accept, request.header_length)
    return all(text.isascii() and text.isprintable() and text == text.strip() for text in texts)


async def post_requests(server: Server, requests: list[Request]) -> list[httpx.Response]:
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=httpx.Limits(max_connections=24)) as client:
        return await asyncio.gather(
            *(
                client.post(
                    server.endpoints[0].url,
                    content=bytes(request.body),
                    headers=owner(
                        server,
                        **{"Content-Type": request.content_type, "Accept": request.accept},
                        **({HEADER_LENGTH: request.header_length} if request.header_length else {}),
                    ),
                )
                for request in requests
            )
        )
