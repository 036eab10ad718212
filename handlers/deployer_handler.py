"""TorchServe's handler for every bundle: it opens `bundle/` and hands each batch to `deployer.predictor`.

TorchServe's loader imports this file by its base name and wants exactly one class defined in it.
"""

import json
import logging
from http import HTTPStatus
from pathlib import Path
from typing import Any

from deployer.predictor import Predictor, Request


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
