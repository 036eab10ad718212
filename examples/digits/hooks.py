"""A picture over HTTP, its digit back.

curl --data-binary @seven.png -H "Content-Type: image/png" … → {"digit": "7", "probability": 0.99}
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

SIZE = 8
DARKEST = 16  # scikit-learn's digits have 17 shades
_PIXEL_LIMIT = 4_000_000


def preprocess(request: Any) -> dict[str, np.ndarray] | None:
    """A picture of any size, dark ink on light paper or light on dark, as image (1, 8, 8) in 0..1."""
    if not request.content_type.startswith("image/"):
        return None
    try:
        with Image.open(io.BytesIO(request.body), formats=("PNG", "JPEG", "BMP", "GIF", "WEBP")) as picture:
            if picture.width * picture.height > _PIXEL_LIMIT:
                raise ValueError(f"the picture has {picture.width} x {picture.height} pixels, too many")
            grey = picture.convert("L").resize((SIZE, SIZE), Image.Resampling.BOX)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"no picture: {error}") from error
    pixels = np.asarray(grey, np.float32) / 255
    ink = 1 - pixels if np.median(pixels) > 0.5 else pixels
    return {"image": (np.round(ink * DARKEST) / DARKEST)[np.newaxis].astype(np.float32)}


def postprocess(outputs: dict[str, np.ndarray]) -> dict[str, Any]:
    logits = outputs["logits"].astype(np.float64)
    shares = np.exp(logits - logits.max())
    return {"digit": str(int(logits.argmax())), "probability": float(shares.max() / shares.sum())}


def samples() -> list[tuple[bytes, str]]:
    """A one, drawn here: a bar of two columns."""
    pixels = np.full((SIZE, SIZE), 255, np.uint8)
    pixels[1:7, 3:5] = 0
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST).save(buffer, "PNG")
    return [(buffer.getvalue(), "image/png")]
