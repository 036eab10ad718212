"""The parity check against servers that answer by the real predictor: a right one passes, each fault is named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deployer.bundle import read_bundle
from deployer.cli.verify import command
from deployer.errors import UsageError
from deployer.parity import verify
from deployer.predictor import Predictor, Request, Response
from deployer.protocol import JSON, encode_error
from deployer.protocol.oip import HEADER_LENGTH


class Turn:
    """What a faulty server remembers: the answer before this one."""

    last: Response | None = None


Change = Callable[[int, Response, Turn], Response | None]


@contextmanager
def serving(bundle: Path, change: Change | None = None) -> Iterator[str]:
    """The real predictor of a bundle behind a plain HTTP server; `change` spoils answer number n, None drops it."""
    predictor = Predictor.open(bundle)
    lock, turn = threading.Lock(), Turn()
    count = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal count
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = Request(
                body, self.headers.get("Content-Type", ""), self.headers.get("Accept", ""),
                self.headers.get(HEADER_LENGTH, ""),
            )  # fmt: skip
            with lock:
                [response] = predictor.answer([request])
                changed = change(count, response, turn) if change else response
                turn.last, count = response, count + 1
            if changed is None:
                self.close_connection = True
                return
            self.send_response(changed.status)
            for name, value in {"Content-Type": changed.content_type, **changed.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(changed.body)))
            self.end_headers()
            self.wfile.write(changed.body)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: Any) -> None:
            pass  # a client that went away is part of the script

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/predictions/digits"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("form", ["onnx", "torchscript"])
def test_a_right_server_passes_in_every_form_bit_by_bit(digits_bundles: Mapping[str, Path], form: str) -> None:
    with serving(digits_bundles[form]) as url:
        report = verify(url, digits_bundles[form])
    assert report.passed, report.reasons
    assert report.forms == ("json", "npy", "npz", "safetensors", "oip", "oip-binary", "json, answered in npz")
    assert report.right == report.sent == 2 * 3 * 7
    assert report.refused == report.wrong == 7
    assert report.bit_equal == report.bit_compared == 3 * 4


def nudge(response: Response) -> Response:
    """Another first digit of the first number in a JSON answer."""
    return Response(200, response.body.replace(b'"logits":[', b'"logits":[9', 1), response.content_type)


CHANGES: dict[str, tuple[Change, str]] = {
    "the answer of the one before": (lambda n, r, t: t.last if n > 25 and r.status == 200 else r, "together"),
    "another number": (lambda n, r, t: nudge(r) if r.content_type == JSON else r, "sample 0 as json"),
    "a batch that fails as a whole": (
        lambda n, r, t: Response(503, encode_error("Prediction failed")) if n > 25 else r,
        "together, sample .* status 503",
    ),
    "wrong requests get through": (
        lambda n, r, t: Response(200, b"{}") if r.status == 400 else r,
        "a wrong request was answered with status 200",
    ),
    "no answer": (lambda n, r, t: None if n == 3 else r, "alone, sample 0 as safetensors: no answer"),
}


@pytest.mark.parametrize("fault", CHANGES)
def test_each_way_of_being_wrong_is_named(digits_bundles: Mapping[str, Path], fault: str) -> None:
    change, said = CHANGES[fault]
    with serving(digits_bundles["onnx"], change) as url:
        report = verify(url, digits_bundles["onnx"], bits=False)
    assert not report.passed
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(" | ".join(report.reasons))
    assert len(report.reasons) <= 10


def test_the_verb(digits_bundles: Mapping[str, Path]) -> None:
    bundle = str(digits_bundles["onnx"])
    with serving(digits_bundles["onnx"]) as url:
        done = CliRunner().invoke(command, [url, "--bundle", bundle, "--json"])
        table = CliRunner().invoke(command, [url, "--bundle", bundle])
    assert (done.exit_code, table.exit_code) == (0, 0)
    assert "bit by bit" in table.output
    with pytest.raises(UsageError, match="is no URL"):
        verify("nonsense", read_bundle(bundle), bits=False)
    refused = CliRunner().invoke(command, [url, "--bundle", bundle])
    assert "no answer" in str(refused.exception)
