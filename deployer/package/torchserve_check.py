"""Try an unpacked archive as a worker of TorchServe would; runs in a process of its own.

    python -m deployer.package.torchserve_check FOLDER RESULT.json

TorchServe's loader imports the handler from FOLDER and initialises it; one batch of real samples with a wrong request
among them goes through its service, in the frontend's own wire format.
"""

from __future__ import annotations

import importlib
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from deployer.bundle import read_bundle
from deployer.hooks import HOOKS_OFF, Hooks
from deployer.package.mar import BUNDLE_FOLDER, HOOKS_FOLDER, HOOKS_MAIN, MANIFEST
from deployer.package.probe import BAD_BODY, Probe, judge, judge_refusal, make_probes
from deployer.package.torchserve import Verdict
from deployer.protocol import JSON


@dataclass(frozen=True)
class _Answer:
    request_id: str
    content_type: str
    status: int
    body: bytes


def check(folder: Path) -> Verdict:
    """Load FOLDER by TorchServe's loader, send one mixed batch, judge every answer."""
    service = _load(folder)
    bundle = read_bundle(folder / BUNDLE_FOLDER)
    probes = make_probes(bundle)
    bodies = [(probe.body, probe.content_type, probe.accept) for probe in probes]
    bodies.insert(1, (BAD_BODY, JSON, JSON))  # among the good ones, not after them
    answers = _parse(service.predict([_message(str(index), *body) for index, body in enumerate(bodies)]))
    if [answer.request_id for answer in answers] != [str(index) for index in range(len(bodies))]:
        return Verdict(False, f"{len(bodies)} requests got {len(answers)} answers")
    refused = answers.pop(1)
    reasons = [judge_refusal(refused.status, refused.body)]
    reasons += [
        judge(probe, bundle, answer.status, answer.body, answer.content_type)
        for probe, answer in zip(probes, answers, strict=True)
    ]
    reasons += _check_hooks(service, folder / HOOKS_FOLDER / HOOKS_MAIN, probes[0])
    reason = next((reason for reason in reasons if reason), "")
    return Verdict(not reason, reason)


def _check_hooks(service: Any, path: Path, probe: Probe) -> list[str]:
    """What is wrong with the user's hooks: each of their samples must be answered, without them a usual request."""
    if not path.is_file():
        return []
    samples = Hooks.load(path).sample_requests()
    bodies = [(body, content_type, "") for body, content_type in samples] or [(probe.body, probe.content_type, "")]
    answers = _parse(service.predict([_message(str(index), *body, hooks=True) for index, body in enumerate(bodies)]))
    return [
        f"the hooks' sample {answer.request_id} ({bodies[index][1]}) was answered with status {answer.status}: "
        f"{answer.body[:300].decode(errors='replace')}"
        for index, answer in enumerate(answers)
        if answer.status != 200
    ]


def _load(folder: Path) -> Any:
    import ts
    from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
    from ts.model_loader import ModelLoaderFactory

    model = msgspec.json.decode((folder / MANIFEST).read_bytes())["model"]
    # The loader answers a failed import by trying a handler of its own, and hides the cause: import it here first.
    importlib.import_module(Path(model["handler"]).stem)
    metrics = MetricsCacheYamlImpl(str(Path(ts.__file__).parent / "configs" / "metrics.yaml"))
    metrics.initialize_cache()
    metrics.model_name = model["modelName"]
    service = ModelLoaderFactory.get_model_loader().load(
        model["modelName"], str(folder), model["handler"], None, 1, None, True, metrics
    )
    service.set_cl_socket(None)
    return service


def _message(request_id: str, body: bytes, content_type: str, accept: str, *, hooks: bool = False) -> dict[str, Any]:
    """One request as `ts.protocol.otf_message_handler` hands it to the service with `decode_input_request=false`."""
    headers = {"Content-Type": content_type, "Accept": accept, "explain": "False", "url_path": ""}
    if not hooks:
        headers |= HOOKS_OFF
    return {
        "requestId": request_id.encode(),
        "headers": [{"name": name.encode(), "value": value.encode()} for name, value in headers.items()],
        "parameters": [{"name": "body", "contentType": content_type, "value": bytearray(body)}],
    }


def _parse(message: bytes) -> list[_Answer]:
    """The answers in a message of `create_predict_response`: lengths and counts are big-endian int32."""
    position = 0

    def number() -> int:
        nonlocal position
        position += 4
        return int(struct.unpack_from("!i", message, position - 4)[0])

    def data() -> bytes:
        nonlocal position
        length = number()
        position += length
        return bytes(message[position - length : position])

    number()
    data()
    answers = []
    while (length := number()) != -1:
        position += length
        request_id = message[position - length : position].decode()
        content_type, status = data().decode(), number()
        data()
        for _ in range(number()):
            data()
            data()
        answers.append(_Answer(request_id, content_type, status, data()))
    return answers


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(check(Path(sys.argv[1]))))
