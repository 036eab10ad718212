"""TorchServe's handler for every bundle: it opens `bundle/` and hands each batch to `deployer.predictor`.

TorchServe's loader imports this file by its base name and wants exactly one class defined in it.
"""

import gc
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from deployer.package import torchserve_pair
from deployer.package.torchserve_codec import WireAnswer, WireBatch
from deployer.package.torchserve_worker import Guard, Limits
from deployer.predictor import SERIES, Predictor, Request, Response, growth

METRICS_PERIOD_S = 2.0


class DeployerHandler:
    """One worker's open model."""

    def initialize(self, context: Any) -> None:
        """Open and warm the bundle that stands beside this file in the archive. A failure ends the worker."""
        # The worker logs two lines a request at INFO, which the frontend would read, match and write.
        logging.getLogger().setLevel(logging.WARNING)
        config = context.model_yaml_config or {}
        settings = config.get("deployer", {})
        folder = Path(context.system_properties["model_dir"])
        place: torchserve_pair.Computing | torchserve_pair.Passing | None = None
        if torchserve_pair.is_worker():
            gathers_s = config["maxBatchDelay"] / 1000
            place = torchserve_pair.take_place(folder, alone=settings["workers"] == 1, gathers_s=gathers_s)
        if isinstance(place, torchserve_pair.Passing):
            torchserve_pair.serve_by(place)
            return
        bundle = folder / "bundle"
        hooks = bundle.with_name("hooks") / "main.py"
        openapi = bundle.with_name("openapi.json")
        self.predictor = Predictor.open(
            bundle,
            settings.get("intra_op_threads"),
            hooks_file=hooks if hooks.is_file() else None,
            max_request_bytes=settings.get("max_request_bytes"),
            openapi=openapi.read_bytes() if openapi.is_file() else None,
        )
        limits = Limits(
            config.get("batchSize", 1),
            settings.get("workers", 1),
            settings.get("response_timeout_s", math.inf),
            settings.get("max_queue_wait_s", math.inf),
        )
        self.guard = Guard(self.predictor, limits, os.environ)
        self.place = place
        if place is not None:
            place.ready(self.answer, limits.batch_size)
            torchserve_pair.serve_by(place)
        gc.collect()
        gc.freeze()  # what is there stays: later collections need not walk through torch
        threading.Thread(target=report, args=(self.predictor,), name="metrics", daemon=True).start()

    def answer(self, batch: WireBatch) -> list[WireAnswer]:
        """The requests of one message, answered in order."""
        requests = [_request(request.headers, request.parameters) for request in batch]
        place = self.place
        late = None if place is None else lambda answers: place.send_last(_wire(answers))
        return _wire(self.guard.answer(requests, late))

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[bytes]:
        """The same where TorchServe's own reader and writer are in use: one body per request, in order; status and
        headers are set per request."""
        requests = []
        for index, item in enumerate(data):
            headers = {name.lower(): str(value) for name, value in context.get_all_request_header(index).items()}
            requests.append(_request(headers, item))
        responses = self.guard.answer(requests)
        for index, response in enumerate(responses):
            context.set_response_status(response.status, HTTPStatus(response.status).phrase, idx=index)
            context.set_response_content_type(index, response.content_type)
            for name, value in _headers(response).items():
                context.set_response_header(index, name, value)
        return [response.body for response in responses]


def _wire(responses: list[Response]) -> list[WireAnswer]:
    return [
        WireAnswer(response.status, response.content_type, _headers(response), response.body) for response in responses
    ]


def _headers(response: Response) -> dict[str, str]:
    return {"x-deployer-run-requests": str(response.run_requests), **response.headers}


def _request(headers: Mapping[str, str], item: Mapping[str, Any]) -> Request:
    """What TorchServe delivers as a Request.

    HTTP: the body is in `body`. gRPC: in `data`, without headers. A form leaves its fields and no `body`; its content
    type is refused by name. `headers` have names in small letters.
    """
    body = item.get("body")
    if body is None:
        body = item.get("data", b"")
    if isinstance(body, str):  # a server that was told to decode requests itself
        body = body.encode()
    elif not isinstance(body, bytes | bytearray):
        body = json.dumps(body).encode()
    return Request(
        body,
        headers.get("content-type", ""),
        headers.get("accept", ""),
        headers.get("inference-header-content-length", ""),
        hooks=headers.get("x-deployer-hooks", "").lower() != "off",
        headers=headers,
        describe=headers.get("url_path", ""),  # what follows /predictions/NAME/VERSION/
    )


def report(predictor: Predictor) -> None:
    """Tell the frontend every few seconds, on standard output, by how much the worker's counters grew."""
    before: Any = {}
    while True:
        now = predictor.meters.read()
        for line in metric_lines(predictor, before, now):
            os.write(1, line.encode())  # a short write to a pipe is whole; sys.stdout would hold a lock at exit
        before = now
        time.sleep(METRICS_PERIOD_S)


def metric_lines(predictor: Predictor, before: Any, now: Any) -> list[str]:
    """What grew in the form that the frontend reads: a counter of its own for each, over all workers."""
    end = f"#type:COUNTER|#hostname:{socket.gethostname()},{int(time.time())}"
    lines = []
    for (name, values), value in growth(before, now).items():
        unit, labels = SERIES[name]
        own = (predictor.spec.name, predictor.spec.version)
        pairs = zip(("model_name", "model_version", *labels), (*own, *values), strict=True)
        dimensions = ",".join(f"{label}:{text}" for label, text in pairs)
        lines.append(f"[METRICS]{name}.{unit}:{value:.12g}|#{dimensions}|{end}\n")
    return lines
