"""The client against a server that misbehaves on purpose: each failure is one line that says what to do."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from deployer.cli.predict import command
from deployer.client import encode, predict
from deployer.errors import DeployerError, RequestError, SampleError, ServerError, UsageError
from deployer.protocol import JSON, NPY, NPZ, SAFETENSORS, Encoded, encode_error, npy_bytes, parse_npy

OUTPUTS = {"model": "m", "version": "2", "outputs": {"y": [[1.5, None]], "n": [7]}, "labels": {"y": ["cat"]}}


class Scripted(BaseHTTPRequestHandler):
    """Answers what the test put on the server, and keeps what arrived."""

    def do_POST(self) -> None:
        server: Any = self.server
        server.got = (dict(self.headers), self.rfile.read(int(self.headers["Content-Length"])))
        if server.script is None:
            server.release.wait(10)
            return
        status, content_type, body = server.script
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as running:
        running.script, running.got, running.release = (
            (200, JSON, json.dumps(OUTPUTS).encode()),
            None,
            threading.Event(),
        )  # type: ignore[attr-defined]
        running.url = f"http://127.0.0.1:{running.server_port}/predictions/m"  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running
        running.release.set()  # type: ignore[attr-defined]
        running.shutdown()
        thread.join()


def torchserve_error(code: int, kind: str, message: str) -> tuple[int, str, bytes]:
    return code, JSON, json.dumps({"code": code, "type": kind, "message": message}).encode()


def test_an_answer_is_named_arrays_labels_and_who_answered(server: Any) -> None:
    answer = predict(server.url, {"x": np.ones((1, 2), np.float32)}, token="abc")
    assert (answer.model, answer.version, answer.labels) == ("m", "2", {"y": ["cat"]})
    np.testing.assert_array_equal(answer.outputs["y"], [[1.5, np.nan]])
    assert (answer.outputs["n"].dtype, answer.outputs["n"].tolist()) == (np.int64, [7])
    sent, body = server.got
    assert (sent["Content-Type"], sent["Accept"], sent["Authorization"]) == (JSON, JSON, "Bearer abc")
    assert json.loads(body) == {"inputs": {"x": [[1.0, 1.0]]}}


def test_one_array_goes_and_comes_bit_by_bit(server: Any) -> None:
    array = np.array([np.nan, -0.0, 1e-45], np.float32)
    server.script = (200, NPY, npy_bytes(array))
    answer = predict(server.url, array, accept=NPY)
    assert answer.outputs[""].tobytes() == array.tobytes()
    sent, body = server.got
    assert (sent["Content-Type"], sent["Accept"], "Authorization" in sent) == (NPY, NPY, False)
    assert parse_npy(body).tobytes() == array.tobytes()


def test_files_of_every_kind_become_bodies(tmp_path: Path) -> None:
    array = np.arange(3, dtype=np.int64)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", x=array, flag=np.array(True))
    (tmp_path / "a.json").write_text(' {"x": [0, 1, 2]} ')
    assert encode(tmp_path / "a.npy") == Encoded(npy_bytes(array), NPY)
    sent = encode(tmp_path / "a.npz")
    assert sent.content_type == NPZ
    with np.load(io.BytesIO(sent.body)) as arrays:
        assert {name: arrays[name].tolist() for name in arrays} == {"x": [0, 1, 2], "flag": True}
    sent = encode(tmp_path / "a.npz", "json")
    assert (json.loads(sent.body), sent.content_type) == ({"inputs": {"x": [0, 1, 2], "flag": True}}, JSON)
    save_file({"x": array}, tmp_path / "a.safetensors")
    assert encode(tmp_path / "a.safetensors").content_type == SAFETENSORS
    assert encode(str(tmp_path / "a.json")) == Encoded(b' {"x": [0, 1, 2]} ', JSON)
    document = json.loads(encode(tmp_path / "a.npz", "oip").body)
    assert document["inputs"][0] == {"name": "x", "shape": [3], "datatype": "INT64", "data": [0, 1, 2]}


@pytest.mark.parametrize(("name", "body"), [("a.json", "npz"), ("a.npy", "json"), ("a.npz", "xml")])
def test_forms_that_do_not_go_with_a_file_are_refused(tmp_path: Path, name: str, body: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UsageError, match=body):
        encode(tmp_path / name, body)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY")
    np.save(tmp_path / "object.npy", np.array([None]), allow_pickle=True)
    np.savez(tmp_path / "nan.npz", x=np.array([np.nan]))
    (tmp_path / "text.txt").write_text("1 2 3")
    for name in ("bad.json", "deep.json", "bad.npy", "object.npy", "text.txt", "absent.json", "absent.npy"):
        with pytest.raises(SampleError, match=name):
            encode(tmp_path / name)
    with pytest.raises(SampleError, match=r"'x' holds NaN.*\.npy"):
        encode(tmp_path / "nan.npz", "json")


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        (
            (400, JSON, encode_error("no such input", field="z", expected="x", got="z")),
            RequestError,
            r"\(400\): no such",
        ),
        ((500, JSON, encode_error("the model failed")), ServerError, r"failed \(500\): the model failed"),
        (torchserve_error(400, "InvalidKeyException", "Token Authorization failed."), ServerError, "--token-file"),
        (
            torchserve_error(404, "ModelNotFoundException", "Model not found: m"),
            ServerError,
            "Model not found: m; check",
        ),
        (
            torchserve_error(503, "ServiceUnavailableException", 'Model "m" has no worker to serve inference request.'),
            ServerError,
            "queue is full",
        ),
        (torchserve_error(500, "InternalServerException", "Worker died."), ServerError, "is being restarted"),
        ((413, "", b""), ServerError, "a body of 22 bytes is larger"),
        ((502, "text/html", b"<html>\n<b>bad gateway</b>"), ServerError, "502: <html>"),
        ((204, "", b""), ServerError, "204: No Content"),
        ((401, "text/plain", b"who?"), ServerError, "--token-file"),
        ((200, "text/html", b"<html>"), ServerError, "something else than a result"),
        ((200, JSON, b'{"status": "Healthy"}'), ServerError, "holds no outputs"),
    ],
)
def test_every_refusal_is_one_line_with_a_way_out(server: Any, script: Any, kind: type, said: str) -> None:
    server.script = script
    with pytest.raises(kind, match=said) as caught:
        predict(server.url, {"x": np.array([1.0])})
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, DeployerError)


def test_a_refused_request_names_the_field(server: Any) -> None:
    server.script = (415, JSON, encode_error("no", field="content-type", expected="a", got="b"))
    with pytest.raises(RequestError) as caught:
        predict(server.url, {"x": np.array([1.0])})
    error = caught.value
    assert (error.field, error.expected, error.got, error.http_status) == ("content-type", "a", "b", 415)


def test_nobody_there_is_said() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/predictions/m"
        with pytest.raises(ServerError, match=r"nothing answers at .*`deployer serve`"):
            predict(url, np.ones(1))


def test_a_server_that_never_answers_is_said(server: Any) -> None:
    server.script = None
    with pytest.raises(ServerError, match=r"within 0\.2 s; raise --timeout-s"):
        predict(server.url, np.ones(1), timeout_s=0.2)


@pytest.mark.parametrize("url", ["predictions/m", "ftp://host/x", "http://", "http://host:port/x", "file:///etc/hosts"])
def test_what_is_no_url_is_said(url: str) -> None:
    with pytest.raises((UsageError, ServerError)) as caught:
        predict(url, np.ones(1))
    assert "\n" not in str(caught.value)


def test_a_proxy_of_the_environment_sees_nothing(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert predict(server.url, np.ones(1), token="secret").model == "m"


# --------------------------------------------------------------------------------------------------- command line


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.ones(2, np.float32))
    return tmp_path / "x.npy"


def test_the_answer_is_printed_or_saved(server: Any, sample: Path, tmp_path: Path) -> None:
    printed = run(server.url, "--input", sample)
    assert printed.exit_code == 0
    assert "y [1, 2]: ['cat']" in printed.output
    document = json.loads(run(server.url, "--input", sample, "--json").output)
    assert document == {"schema_version": 1, "saved": None} | OUTPUTS
    assert run(server.url, "--input", sample, "-o", tmp_path / "y.npz").exit_code == 0
    with np.load(tmp_path / "y.npz") as saved:
        assert sorted(saved.files) == ["n", "y"]
    assert run(server.url, "--input", sample, "-o", tmp_path / "y.json").exit_code == 0
    assert json.loads((tmp_path / "y.json").read_text())["outputs"]["n"] == [7]
    server.script = (200, NPY, npy_bytes(np.ones(3, np.float32)))
    assert run(server.url, "--input", sample, "-o", tmp_path / "y.npy").exit_code == 0
    assert np.load(tmp_path / "y.npy").dtype == np.float32


def test_the_token_file_reaches_the_server(server: Any, sample: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    assert run(server.url, "--input", sample, "--token-file", tmp_path / "token").exit_code == 0
    assert server.got[0]["Authorization"] == "Bearer abc"
    for text in ("", "two words", "ümlaut"):
        (tmp_path / "token").write_text(text)
        failed = run(server.url, "--input", sample, "--token-file", tmp_path / "token")
        assert isinstance(failed.exception, UsageError)
    assert isinstance(run(server.url, "--input", sample, "--token-file", tmp_path / "none").exception, UsageError)


def test_an_output_of_another_kind_is_refused_before_anything_is_sent(server: Any, sample: Path) -> None:
    assert isinstance(run(server.url, "--input", sample, "-o", "y.txt").exception, UsageError)
    assert server.got is None


def test_an_overloaded_server_is_asked_again_when_it_says(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the seconds that it names, a second where it names none, and not beyond what is allowed."""
    import deployer.client as client

    real, pauses = client._post, []
    scripted = [
        httpx.Response(503, headers={"retry-after": "2"}, content=encode_error("too much")),
        httpx.Response(503, content=b"{}"),
    ]
    monkeypatch.setattr(client, "_post", lambda *given: scripted.pop(0) if scripted else real(*given))
    monkeypatch.setattr(client.time, "sleep", pauses.append)
    assert predict(server.url, {"x": np.ones(1, np.float32)}, retry_s=60).model == "m"
    assert pauses == [2.0, 1.0]
    scripted[:] = [httpx.Response(503, headers={"retry-after": "9"}, content=encode_error("too much"))]
    with pytest.raises(ServerError, match=r"refused the request \(503\): too much") as refused:
        predict(server.url, {"x": np.ones(1, np.float32)}, retry_s=5)
    assert (refused.value.retry_after_s, pauses) == (9.0, [2.0, 1.0])
