"""Media types: which kind of body a request holds, and which kind of answer it accepts."""

from __future__ import annotations

import re
from functools import lru_cache

from deployer.errors import RequestError
from deployer.protocol import npy
from deployer.spec import ModelSpec

JSON = "application/json"
NPY = "application/x-npy"
NPZ = "application/x-npz"
SAFETENSORS = "application/x-safetensors"

#: kinds of body and answer; the first is what a client that does not care gets
KINDS = (JSON, NPY, NPZ, SAFETENSORS)
#: other names of the same
_ALIASES = {"text/json": JSON, "application/safetensors": SAFETENSORS, "application/vnd.safetensors": SAFETENSORS}
#: any bytes: the first of them tell
BINARY = "application/octet-stream"

_GZIP_MAGIC = b"\x1f\x8b"
_ZIP_MAGIC = b"PK\x03\x04"
_SNIFFED_BYTES = 16


def body_kind(body: bytes | bytearray | memoryview, content_type: str) -> str:
    """One of KINDS, from the content type and, where that is silent, from the first bytes.

    Raises RequestError, 415 for a type, charset or compression that is not taken, 400 for a body that is not of its
    type.
    """
    start = bytes(body[:_SNIFFED_BYTES])
    media, _, parameters = content_type.partition(";")
    media = media.strip().lower()
    media = _ALIASES.get(media, media)
    if start.startswith(_GZIP_MAGIC):
        raise _unsupported("the body is gzip-compressed", "an uncompressed body", "gzip")
    seen = _seen_kind(start)
    if media == BINARY:
        if seen in (None, JSON):
            raise _no_such_body(BINARY, "a .npy, .npz or .safetensors file", start)
        return seen
    if media in (NPY, NPZ, SAFETENSORS):
        if seen != media:
            raise _no_such_body(media, f"a .{media.partition('-')[2]} file", start)
        return media
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", parameters, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise _unsupported(f"charset {charset[1]} is not supported", "utf-8", charset[1])
    if media == JSON:
        return JSON
    if not media:
        return seen or JSON
    raise _unsupported(f"content type '{media}' is not supported", " or ".join(KINDS), media)


def _seen_kind(start: bytes) -> str | None:
    """What the first bytes are: each of the binary kinds has a mark of its own."""
    if start.startswith(npy.MAGIC):
        return NPY
    if start.startswith(_ZIP_MAGIC):
        return NPZ
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") >= 2 and start[:1] not in b" \t\r\n{[":
        return SAFETENSORS
    return JSON if start.lstrip()[:1] in (b"{", b"[") else None


def _no_such_body(media: str, expected: str, start: bytes) -> RequestError:
    return RequestError(
        f"content type {media}, but the body is no such file: it starts with {start[:8]!r}; send {expected}",
        expected=expected,
        got=repr(start[:8]),
    )


def _unsupported(message: str, expected: str, got: str) -> RequestError:
    return RequestError(
        f"{message}; send {expected}", field="content-type", expected=expected, got=got, http_status=415
    )


def choose_answer(accept: str, spec: ModelSpec) -> str:
    """The kind of answer that the Accept header prefers; JSON when it does not care.

    Raises RequestError (406) when it allows none, or .npy alone for a model of several outputs.
    """
    wanted = dict(zip(KINDS, _qualities(accept), strict=True))
    if wanted[NPY] > 0 and len(spec.outputs) != 1:
        wanted[NPY] = 0.0
        if max(wanted.values()) <= 0:
            names = ", ".join(tensor.name for tensor in spec.outputs)
            raise RequestError(
                f"a .npy answer holds one array, this model has {len(spec.outputs)} outputs ({names}); accept {JSON}",
                field="accept",
                expected=f"{JSON}, {NPZ} or {SAFETENSORS}",
                got=accept,
                http_status=406,
            )
    best = max(KINDS, key=lambda kind: wanted[kind])  # the first of equals
    if wanted[best] <= 0:
        raise RequestError(
            f"Accept '{accept}' allows none of {', '.join(KINDS)}",
            field="accept",
            expected=" or ".join(KINDS),
            got=accept,
            http_status=406,
        )
    return best


@lru_cache(maxsize=256)
def _qualities(accept: str) -> tuple[float, ...]:
    """What an Accept header gives each of KINDS. Clients send the same few; a server's limit on headers bounds them."""
    return tuple(_quality(accept, kind) for kind in KINDS)


def _quality(accept: str, kind: str) -> float:
    """The q that an Accept header gives a media type; its most specific range counts (RFC 9110, 12.5.1)."""
    ranges: dict[str, float] = {}
    for part in accept.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        q = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        if name:
            name = _ALIASES.get(name, name)
            ranges[name] = float(q) if re.fullmatch(r"[01](\.\d{1,3})?", q) else 0.0
    if not ranges:
        return 1.0 if kind == JSON else 0.5
    specific = [kind, *([BINARY] if kind != JSON else []), f"{kind.split('/')[0]}/*", "*/*"]
    return next((ranges[name] for name in specific if name in ranges), 0.0)
