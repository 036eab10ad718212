"""mosec: raw bytes in and out."""

from typing import Any

import numpy as np
from mosec import Server, Worker
from session import DELAY_MS, MAX_BATCH, open_model, row_of


class Inference(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.run = open_model()

    def deserialize(self, data: bytes) -> Any:
        return row_of(data)

    def forward(self, data: list[Any]) -> list[Any]:
        return list(self.run(np.stack(data)))

    def serialize(self, data: Any) -> bytes:
        return data.tobytes()


if __name__ == "__main__":
    server = Server()
    server.append_worker(Inference, num=1, max_batch_size=MAX_BATCH, max_wait_time=DELAY_MS)
    server.run()
