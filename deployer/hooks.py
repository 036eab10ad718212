"""User code around a served model: a file with plain functions.

    def preprocess(request):           # request.body: bytes, request.content_type, request.accept
        return {"image": array}        # one item or a batch, as in any request; None: not mine, read it as usual

    def postprocess(outputs):          # {"logits": array}, of the one request
        return {"digit": "7"}          # JSON; or str (text/plain), bytes, or (bytes, content type)

    def samples():                     # requests that preprocess must take; `deployer package` tries them
        return [(png_bytes, "image/png")]

Each function may be missing; `samples` must be there where `preprocess` is. `postprocess` answers the requests that
`preprocess` took, or every request where there is no `preprocess`. A ValueError of `preprocess` is the request's own
400; anything else that either raises is a 500 of that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from deployer.errors import ModelError, RequestError, UsageError, first_line
from deployer.protocol import JSON, Encoded
from deployer.references import load_module
from deployer.spec import Array, Arrays, in_c_order

#: a request with this header is read and answered as if there were no hooks: the checks of a server send it
HOOKS_OFF = {"X-Deployer-Hooks": "off"}

_BINARY = "application/octet-stream"
_TEXT = "text/plain; charset=utf-8"
_FUNCTIONS = ("preprocess", "postprocess", "samples")


@dataclass(frozen=True)
class HookRequest:
    """What `preprocess` gets: one request as it came over the wire."""

    body: bytes
    content_type: str
    accept: str


@dataclass(frozen=True)
class Hooks:
    """The functions of one file; see the head of this module."""

    preprocess: Callable[[HookRequest], Mapping[str, Any] | None] | None
    postprocess: Callable[[Mapping[str, Array]], Any] | None
    samples: Callable[[], Any] | None

    @classmethod
    def load(cls, path: str | Path) -> Hooks:
        """Import a hooks file. Raises ModelError when it does not import, UsageError when it defines no hook."""
        module = load_module(Path(path))
        found = {name: getattr(module, name, None) for name in _FUNCTIONS}
        for name, function in found.items():
            if function is not None and not callable(function):
                raise UsageError(f"'{path}': {name} is a {type(function).__name__}; a function is expected")
        if found["preprocess"] is None and found["postprocess"] is None:
            raise UsageError(f"'{path}' defines neither preprocess nor postprocess; define one of them")
        if found["preprocess"] is not None and found["samples"] is None:
            raise UsageError(
                f"'{path}' defines preprocess and no samples(); return a list of (body, content type) there, so that "
                "preprocess can be tried before it is served"
            )
        return cls(**found)

    def arrays(self, request: HookRequest) -> dict[str, Array] | None:
        """What `preprocess` makes of a request; None where it leaves it. Raises RequestError for its ValueError."""
        if self.preprocess is None:
            return None
        try:
            made = self.preprocess(request)
        except ValueError as error:
            raise RequestError(
                f"the request cannot be read: {first_line(error)}", expected="what preprocess takes", got=str(error)
            ) from error
        if made is None:
            return None
        if not isinstance(made, Mapping):
            raise ModelError(f"preprocess returned a {type(made).__name__}; a mapping of names to arrays is expected")
        return {str(name): in_c_order(np.asarray(array)) for name, array in made.items()}

    def answer(self, outputs: Arrays) -> Encoded:
        """What `postprocess` makes of one request's outputs. Raises ModelError for what is no answer."""
        if self.postprocess is None:
            raise ModelError("there is no postprocess")
        made = self.postprocess(outputs)
        content_type = ""
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], str):
            made, content_type = made
        if isinstance(made, bytes | bytearray):
            return Encoded(bytes(made), content_type or _BINARY)
        if isinstance(made, str):
            return Encoded(made.encode(), content_type or _TEXT)
        try:
            return Encoded(msgspec.json.encode(made, enc_hook=_plain), content_type or JSON)
        except (TypeError, ValueError) as error:
            raise ModelError(f"postprocess returned what JSON cannot carry: {first_line(error)}") from error

    def sample_requests(self) -> list[tuple[bytes, str]]:
        """(body, content type) of each sample; empty without preprocess. Raises ModelError."""
        if self.preprocess is None or self.samples is None:
            return []
        made = list(self.samples())
        if not made:
            raise ModelError("samples() of the hooks returned nothing; return at least one (body, content type)")
        for entry in made:
            if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], bytes | bytearray)):
                raise ModelError("samples() of the hooks must return (bytes, content type) pairs")
        return [(bytes(body), str(content_type)) for body, content_type in made]


def _plain(value: Any) -> Any:
    """numpy's arrays and numbers as JSON's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")
