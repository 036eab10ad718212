"""TorchServe's handler for every bundle: it opens `bundle/` and hands each batch to `deployer.predictor`.

TorchServe's loader imports this file by its base name and wants exactly one class defined in it.
"""

import json
import logging
import os
import socket
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

from deployer.predictor import SERIES, Predictor, Request, growth

METRICS_PERIOD_S = 2.0


class DeployerHandler:
    """One worker's open model."""

    def initialize(self, context: Any) -> None:
        """Open and warm the bundle that stands beside this file in the archive. A failure ends the worker."""
        # The worker logs two lines a request at INFO, which the frontend would read, match and write.
        logging.getLogger().setLevel(logging.WARNING)
        settings = (context.model_yaml_config or {}).get("deployer", {})
        bundle = Path(context.system_properties["model_dir"]) / "bundle"
        hooks = bundle.with_name("hooks") / "main.py"
        self.predictor = Predictor.open(
            bundle,
            settings.get("intra_op_threads"),
            hooks_file=hooks if hooks.is_file() else None,
            max_request_bytes=settings.get("max_request_bytes"),
        )
        threading.Thread(target=report, args=(self.predictor,), name="metrics", daemon=True).start()

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[bytes]:
        """One body per request, in order; status and content type are set per request."""
        responses = self.predictor.answer([self._request(item, index, context) for index, item in enumerate(data)])
        for index, response in enumerate(responses):
            context.set_response_status(response.status, HTTPStatus(response.status).phrase, idx=index)
            context.set_response_content_type(index, response.content_type)
            context.set_response_header(index, "x-deployer-run-requests", str(response.run_requests))
            for name, value in response.headers.items():
                context.set_response_header(index, name, value)
        return [response.body for response in responses]

    def _request(self, item: dict[str, Any], index: int, context: Any) -> Request:
        """What TorchServe delivers as a Request.

        HTTP: the body is in `body`, as a bytearray. gRPC: in `data`, without headers. A form leaves its fields and no
        `body`; its content type is refused by name. Header names have the case that the client gave them; the key
        `body` among them is TorchServe's own.
        """
        headers = {name.lower(): str(value) for name, value in context.get_all_request_header(index).items()}
        body = item.get("body", item.get("data", b""))
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
