"""A sentence over HTTP, its embedding back. Reads `tokenizer.json`, which stands beside it in the package.

curl --data "A cat sleeps." -H "Content-Type: text/plain" … → {"embedding": [0.02, …]}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

MAX_TOKENS = 128
_TOKENIZER = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
_TOKENIZER.enable_truncation(MAX_TOKENS)
_TOKENIZER.no_padding()


def preprocess(request: Any) -> dict[str, np.ndarray] | None:
    """One sentence in UTF-8 as input_ids and attention_mask, int64 (sequence,)."""
    if not request.content_type.startswith("text/plain"):
        return None
    text = request.body.decode("utf-8")  # a UnicodeDecodeError is a ValueError: the request's own 400
    if not text.strip():
        raise ValueError("the sentence is empty")
    ids = np.array(_TOKENIZER.encode(text).ids, np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def postprocess(outputs: dict[str, np.ndarray]) -> dict[str, Any]:
    return {"embedding": outputs["embedding"]}


def samples() -> list[tuple[bytes, str]]:
    return [(b"A cat sleeps.", "text/plain"), ("Une phrase en français.".encode(), "text/plain; charset=utf-8")]
