"""What INT8 needs to know of the digits: real inputs to calibrate with, and a metric over labelled ones.

deployer export examples/digits/checkpoint --format onnx --precision int8 \
    --calibration examples/digits/score.py:calibration --metric examples/digits/score.py:accuracy --max-drop 0.005
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

CALIBRATION_IMAGES = 320
BATCH_SIZE = 64

_DIGITS = load_digits()
_IMAGES = (_DIGITS.images.astype(np.float32) / 16)[:, np.newaxis]
#: as train.py divides them: what calibrates was trained on, what scores was not
_TRAIN, _TEST = train_test_split(range(len(_IMAGES)), test_size=0.2, random_state=0, stratify=_DIGITS.target)


def calibration() -> Iterator[dict[str, np.ndarray]]:
    """image (64, 1, 8, 8), five times, of the training set."""
    for start in range(0, CALIBRATION_IMAGES, BATCH_SIZE):
        yield {"image": _IMAGES[_TRAIN[start : start + BATCH_SIZE]]}


def accuracy(predict: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> float:
    """The share of the 360 held-out digits that are read rightly."""
    logits = predict({"image": _IMAGES[_TEST]})["logits"]
    return float((logits.argmax(1) == _DIGITS.target[_TEST]).mean())
