"""One request to a served model, and every failure in one line.

answer = predict("http://127.0.0.1:8080/predictions/digits", {"image": image}, token=token)
answer.outputs["logits"]
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from deployer.errors import DeployerError, RequestError, SampleError, ServerError, UsageError, first_line, nearest
from deployer.protocol import JSON, NPY, NPZ, SAFETENSORS, Encoded, decode_answer, encode_request, oip
from deployer.samples import read_samples
from deployer.spec import Array, Arrays

TIMEOUT_S = 60.0
_PAUSE_S = 1.0  # before a server that is overloaded and says no time is asked again

#: how named arrays are sent: name of the form → kind of `protocol.encode_request`
BODIES = {
    "json": JSON,
    "npy": NPY,
    "npz": NPZ,
    "safetensors": SAFETENSORS,
    "oip": "oip",
    "oip-binary": "oip-binary",
}
_OF_FILE = {".npy": "npy", ".npz": "npz", ".safetensors": "safetensors"}


@dataclass(frozen=True)
class Answer:
    """What a model answered. JSON outputs are float64, int64 or bool, null as NaN; a .npy output has the name ""."""

    outputs: dict[str, Array]
    model: str = ""
    version: str = ""
    labels: Mapping[str, Any] | None = None


def predict(
    url: str,
    inputs: Arrays | Array | str | Path,
    *,
    token: str | None = None,
    accept: str = JSON,
    timeout_s: float = TIMEOUT_S,
    body: str | None = None,
    retry_s: float = 0.0,
) -> Answer:
    """Send one request and parse the answer. A server that is overloaded (503) is asked again when it says, or after a
    second, for `retry_s` in all.

    `inputs` are named arrays, one array, or a file. `body` is one of BODIES; None sends named arrays as JSON, one array
    as .npy, .npy, .npz and .safetensors files as such, and .json files always as they are. `accept`
    application/x-npy asks for the sole output bit by bit, application/x-npz for all.
    Raises SampleError for a file that cannot be read, UsageError for a URL that is none, RequestError for a request
    that the server refused, ServerError for everything else.
    """
    request = encode(inputs, body)
    headers = {"Content-Type": request.content_type, "Accept": accept, **request.headers}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    response = _post_again(url, request.body, headers, timeout_s, retry_s)
    if response.status_code != 200:
        raise failure(response, len(request.body), with_token=bool(token))
    try:
        header_bytes = oip.header_length(response.headers.get(oip.HEADER_LENGTH, ""))
        answer = decode_answer(response.content, response.headers.get("content-type", ""), header_bytes)
    except RequestError as error:
        raise ServerError(f"{url} answered with something else than a result: {error}", status=200) from error
    return Answer(answer["outputs"], str(answer.get("model", "")), str(answer.get("version", "")), answer.get("labels"))


def encode(inputs: Arrays | Array | str | Path, body: str | None = None) -> Encoded:
    """A request and its headers; `body` as in `predict`. Raises SampleError, UsageError."""
    if body is not None and body not in BODIES:
        raise UsageError(f"--body {body} is unknown{nearest(body, BODIES)}")
    if isinstance(inputs, str | Path):
        path = Path(inputs)
        if path.suffix.lower() == ".json":
            if body not in (None, "json"):
                raise UsageError(f"'{path}' is sent as it is, which --body {body} contradicts; give an .npz file")
            return Encoded(_read_json(path), JSON)
        inputs = read_samples(path)
        body = body or _OF_FILE.get(path.suffix.lower())
    if isinstance(inputs, np.ndarray):
        inputs = {"": inputs}
        body = body or "npy"
    if list(inputs) == [""] and body != "npy":
        raise UsageError(f"a lone array has no input's name, which --body {body} needs; give an .npz file")
    try:
        return encode_request(inputs, BODIES[body or "json"])
    except RequestError as error:
        raise SampleError(str(error)) from error


def _read_json(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        msgspec.json.decode(data, type=msgspec.Raw)
    except FileNotFoundError as error:
        raise SampleError(f"no input file '{path}'; give a .json, .npy, .npz or .safetensors file") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise SampleError(f"'{path}' is no valid JSON: {error}") from error
    return data


def read_token(path: Path) -> str:
    """The bearer token in a file. Raises UsageError."""
    try:
        token = path.read_text().strip()
    except FileNotFoundError as error:
        raise UsageError(f"no token file '{path}'; `deployer serve` prints where its own is") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"'{path}' does not hold a token; `deployer serve` prints where its own is") from error
    if not token or len(token.split()) != 1 or not token.isascii():
        raise UsageError(f"'{path}' does not hold one token alone; `deployer serve` prints where its own is")
    return token


def _post_again(url: str, body: bytes, headers: dict[str, str], timeout_s: float, retry_s: float) -> httpx.Response:
    deadline_s = time.monotonic() + retry_s
    while True:
        response = _post(url, body, headers, timeout_s)
        pause_s = _retry_after_s(response)
        pause_s = _PAUSE_S if pause_s is None else pause_s
        if response.status_code != 503 or time.monotonic() + pause_s > deadline_s:
            return response
        time.sleep(pause_s)


def _post(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> httpx.Response:
    try:
        # trust_env off: a proxy of the environment must see neither the token nor a loopback request.
        with httpx.Client(timeout=timeout_s, trust_env=False) as client:
            return client.post(url, content=body, headers=headers)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UsageError(
            f"'{url}' is no URL ({first_line(error)}); give one such as http://127.0.0.1:8080/predictions/NAME"
        ) from error
    except httpx.ConnectError as error:
        raise ServerError(
            f"nothing answers at {url} ({first_line(error)}); `deployer serve` starts a server"
        ) from error
    except httpx.TimeoutException as error:
        raise ServerError(f"no answer from {url} within {timeout_s:g} s; raise --timeout-s or see its log") from error
    except httpx.HTTPError as error:
        raise ServerError(f"the connection to {url} broke: {first_line(error) or type(error).__name__}") from error


class _Fault(msgspec.Struct):
    message: str = ""
    field: str = ""
    expected: str = ""
    got: str = ""


class _Body(msgspec.Struct):
    """An error's body: ours (`error`), or TorchServe's own (`code`, `type`, `message`)."""

    error: _Fault | None = None
    type: str = ""
    message: str = ""


def failure(response: httpx.Response, sent_bytes: int = 0, *, with_token: bool = True) -> DeployerError:
    """An answer that is no result, as the error to raise: what the server said, and what to do about it."""
    status, body = response.status_code, _error_body(response.content)
    if body.error is not None and status < 500:
        return RequestError(
            f"the server refused the request ({status}): {body.error.message}",
            field=body.error.field,
            expected=body.error.expected,
            got=body.error.got,
            http_status=status,
        )
    if body.error is not None:
        verb = "refused the request" if status == 503 else "failed"
        return ServerError(
            f"the server {verb} ({status}): {body.error.message}", status=status, retry_after_s=_retry_after_s(response)
        )
    said = body.message or first_line(ValueError(response.text)) if response.content else response.reason_phrase
    if status == 401 or "InvalidKey" in body.type:
        hint = "it differs from the server's, or the server is stopping" if with_token else "none was sent"
        return ServerError(f"the server refused the token ({hint}); give --token-file with its file", status=status)
    match status:
        case 413:
            said = f"a body of {sent_bytes} bytes is larger than the server allows; send fewer items at once"
        case 503 if "no worker" in said:
            said = "no worker is free: the queue is full or every worker is starting anew; try again in a moment"
        case 500 | 507 if "Worker died" in said:  # 507: it was killed
            said = "the worker that had the request died and is being restarted; try again in a moment"
        case 404:
            said = f"{said}; check the model's name and version in the URL"
    return ServerError(f"the server answered {status}: {said}", status=status, retry_after_s=_retry_after_s(response))


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None  # a date is not what our workers send


def _error_body(content: bytes) -> _Body:
    try:
        return msgspec.json.decode(content, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Body()
