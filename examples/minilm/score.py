"""Real sentences to calibrate INT8 with: the first paragraphs of docstrings of Python's standard library.

deployer export CHECKPOINT --format onnx --precision int8 --calibration examples/minilm/score.py:calibration

There are no labels: the embeddings of held-out sentences are held to the eager model's.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from make_checkpoint import tokenize

MODULES = (
    "argparse", "ast", "asyncio", "collections", "csv", "datetime", "decimal", "difflib", "email", "heapq", "json",
    "logging", "os", "pathlib", "random", "re", "shutil", "socket", "statistics", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "typing", "unittest", "urllib.parse", "zipfile",
)  # fmt: skip
CALIBRATION_SENTENCES = 96
BATCH_SIZE = 8


def sentences() -> list[str]:
    """Some hundred paragraphs of 20 to 300 characters, none twice."""
    found: dict[str, None] = {}
    for module in MODULES:
        for _, member in inspect.getmembers(pkgutil.resolve_name(module)):
            text = " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split())
            if 20 < len(text) < 300:
                found[text] = None
    return list(found)


def calibration() -> Iterator[dict[str, np.ndarray]]:
    """input_ids and attention_mask, int64 (8, longest), twelve times."""
    chosen = sentences()[:CALIBRATION_SENTENCES]
    for start in range(0, len(chosen), BATCH_SIZE):
        yield tokenize(chosen[start : start + BATCH_SIZE])
