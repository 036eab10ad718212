"""BentoML with its adaptive batching: the bytes come as base64 in JSON, which it parses faster than numbers."""

import base64

import bentoml
import numpy as np
from session import MAX_BATCH, open_model, row_of


@bentoml.service(workers=1, metrics={"enabled": False}, traffic={"timeout": 60, "max_concurrency": 256})
class Model:
    def __init__(self) -> None:
        self.run = open_model()

    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH, max_latency_ms=60_000)
    def predict(self, data: list[str]) -> list[str]:
        rows = self.run(np.stack([row_of(base64.b64decode(text)) for text in data]))
        return [base64.b64encode(row.tobytes()).decode() for row in rows]
