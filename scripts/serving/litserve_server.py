"""LitServe: it parses every body as JSON or a form, so the bytes come as base64 in JSON."""

import base64
import os
from typing import Any

import litserve
import numpy as np
from fastapi import Request
from session import DELAY_MS, MAX_BATCH, open_model, row_of


class Api(litserve.LitAPI):
    def setup(self, device: Any) -> None:
        self.run = open_model()

    def decode_request(self, request: Request) -> Any:
        return row_of(base64.b64decode(request["data"]))

    def batch(self, inputs: list[Any]) -> Any:
        return np.stack(inputs)

    def predict(self, x: Any) -> Any:
        return self.run(x)

    def unbatch(self, output: Any) -> Any:
        return list(output)

    def encode_response(self, output: Any) -> Any:
        return {"data": base64.b64encode(output.tobytes()).decode()}


if __name__ == "__main__":
    server = litserve.LitServer(
        Api(max_batch_size=MAX_BATCH, batch_timeout=DELAY_MS / 1000), accelerator="cpu", workers_per_device=1
    )
    server.run(host="127.0.0.1", port=int(os.environ["BENCH_PORT"]), generate_client_file=False, log_level="error")
