"""The same ONNX artifact for every server, with the settings that the benchmark gives in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import onnxruntime

MAX_BATCH = int(os.environ.get("BENCH_MAX_BATCH", "16"))
DELAY_MS = int(os.environ.get("BENCH_DELAY_MS", "2"))
THREADS = int(os.environ.get("BENCH_THREADS", "1"))
SHAPE = tuple(int(size) for size in os.environ.get("BENCH_SHAPE", "3072").split(","))


def open_model() -> Callable[[np.ndarray], np.ndarray]:
    """float32 (batch, *SHAPE) → float32 (batch, 10)."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(os.environ["BENCH_MODEL"], options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    outputs = [session.get_outputs()[0].name]

    def run(rows: np.ndarray) -> np.ndarray:
        return session.run(outputs, {name: rows})[0]

    run(np.zeros((1, *SHAPE), np.float32))
    return run


def row_of(body: bytes) -> np.ndarray:
    """One item from its bytes."""
    return np.frombuffer(body, np.float32).reshape(SHAPE)
