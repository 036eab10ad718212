"""What is sent over HTTP while measuring, and how its answers are told right from wrong.

With a bundle the answers are held to its reference, by the gate's tolerance. Without one there is no reference: the
first answer is taken for right, and every later answer to the same body must equal it (`FirstAnswer` says how).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from deployer.client import encode
from deployer.errors import RequestError, SampleError, UsageError
from deployer.protocol import JSON, NPY, Decoded, decode_request, parse_npy
from deployer.samples import check_samples, read_samples
from deployer.spec import Array, Arrays, TensorSpec, numpy_dtype

if TYPE_CHECKING:
    from deployer.bundle import Bundle
    from deployer.validate import Measure

#: what --body takes, and its media type
BODIES = {"json": JSON, "npy": NPY}
_RTOL = 1e-4
_ATOL_SCALE = 2e-5


class Checker(Protocol):
    """Tells whether `body` is a right answer to payload number `payload`."""

    def is_right(self, payload: int, body: bytes) -> bool: ...


@dataclass(frozen=True)
class Traffic:
    """Request bodies, sent in turn; `items` is how many items each holds, None where nothing says so.

    `checker` is None where the first answer of the server has yet to become the reference.
    """

    bodies: tuple[bytes, ...]
    body: str
    items: int | None
    checker: Checker | None

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": BODIES[self.body], "Accept": BODIES[self.body]}


def make_traffic(*, bundle: str | Path | None, input_path: str | Path | None, body: str | None) -> Traffic:
    """Bodies from `input_path`, or from the real samples of `bundle`; at least one of the two is needed.

    Without `input_path` each row of the samples is its own request (the whole samples where rows cannot be sent
    alone). `body` None is npy for an `.npy` file without a bundle, else json. Raises UsageError or SampleError.
    """
    if body is not None and body not in BODIES:
        raise UsageError(f"--body {body} is unknown; {' or '.join(BODIES)} is expected")
    file = Path(input_path) if input_path is not None else None
    if bundle is not None:
        return _from_bundle(Path(bundle), file, body)
    if file is None:
        raise UsageError("a URL alone does not say what to send; add --bundle BUNDLE or --input FILE (.json, .npy, …)")
    return _from_file(file, body)


def _from_file(path: Path, body: str | None) -> Traffic:
    data, kind = _read_input(path, body, name="")
    return Traffic((data,), kind, None, None)


def _read_input(path: Path, body: str | None, name: str) -> tuple[bytes, str]:
    """The body to send and its kind; `name` is the sole input's, for a bare array, "" where it is not known."""
    if path.suffix.lower() == ".json":
        if body == "npy":
            raise UsageError(f"'{path}' is sent as it is, which --body npy contradicts; give an .npy or .npz file")
        return encode(path).body, "json"
    arrays = read_samples(path)
    if list(arrays) == [""]:
        if body == "json" and not name:
            raise UsageError(f"'{path}' does not say the input's name; add --bundle, or give an .npz or .json file")
        arrays, body = {name: arrays[""]}, body or ("json" if name else "npy")
    return _encode(arrays, body or "json"), body or "json"


def _encode(arrays: Arrays, body: str) -> bytes:
    """Raises SampleError for values that JSON cannot carry, UsageError for several inputs in npy."""
    if body == "npy" and len(arrays) != 1:
        raise UsageError(f"--body npy carries one input, not {len(arrays)} ({', '.join(arrays)}); use --body json")
    return encode(next(iter(arrays.values())) if body == "npy" else arrays).body


def _from_bundle(path: Path, input_path: Path | None, body: str | None) -> Traffic:
    from deployer.bundle import read_bundle
    from deployer.validate import measure_of

    bundle = read_bundle(path)
    spec = bundle.spec
    if body == "npy" and (len(spec.inputs), len(spec.outputs)) != (1, 1):
        raise UsageError(
            f"--body npy carries one input and one output; '{spec.name}' has {len(spec.inputs)} and "
            f"{len(spec.outputs)}, use --body json"
        )
    if input_path is None:
        kind = body or "json"
        requests, answers, items = _recorded_requests(bundle)
        bodies = tuple(_encode(arrays, kind) for arrays in requests)
    else:
        data, kind = _read_input(input_path, body, spec.inputs[0].name if len(spec.inputs) == 1 else "")
        bodies = (data,)
        requests, answers, items = _computed_answer(bundle, data, kind)
    checker = ReferenceAnswers(measure_of(bundle), requests, answers, kind)
    return Traffic(bodies, kind, items, checker)


def _recorded_requests(bundle: Bundle) -> tuple[list[dict[str, Array]], list[dict[str, Array]], int]:
    """Requests from the samples, their reference answers, and the items in each request.

    Each row alone, or all of the samples as one request where rows depend on each other or have no common axis.
    """
    inputs, outputs = bundle.samples()
    spec = bundle.spec
    first = spec.inputs[0]
    axis = first.axis_of(spec.batch)
    count = inputs[first.name].shape[axis] if axis is not None else 1
    if spec.batch is None or not (spec.stackable and bundle.manifest.batch_independent):
        return [inputs], [outputs], count
    return (
        [_row(spec.inputs, inputs, spec.batch, row) for row in range(count)],
        [_row(spec.outputs, outputs, spec.batch, row) for row in range(count)],
        1,
    )


def _row(tensors: Sequence[TensorSpec], arrays: Arrays, batch: str, row: int) -> dict[str, Array]:
    """Row `row` of each array along its batch axis, which is dropped."""
    return {tensor.name: arrays[tensor.name].take(row, axis=tensor.shape.index(batch)) for tensor in tensors}


def _computed_answer(
    bundle: Bundle, data: bytes, kind: str
) -> tuple[list[dict[str, Array]], list[dict[str, Array]], int]:
    """The user's request, what the bundle answers to it here (the reference for the server's answers), its items."""
    from deployer.runtime import open_bundle

    spec = bundle.spec
    try:
        request: Decoded = decode_request(data, BODIES[kind], spec)
        arrays = check_samples(spec, request.arrays)
    except (RequestError, SampleError) as error:
        raise SampleError(f"the input does not fit '{bundle.path}': {error}") from error
    with open_bundle(bundle) as runner:
        outputs = runner(arrays)
    if request.one_item and spec.batch is not None:
        return [arrays], [_row(spec.outputs, outputs, spec.batch, 0)], 1
    return [arrays], [outputs], request.sizes.get(spec.batch or "", 1)


class ReferenceAnswers:
    """Right is what the gate would pass: the reference's names, shapes, dtypes and, within tolerance, values."""

    def __init__(self, measure: Measure, requests: Sequence[Arrays], answers: Sequence[Arrays], body: str) -> None:
        self._measure = measure
        self._spec = measure.spec
        self._requests = requests
        self._answers = answers
        self._body = body

    def is_right(self, payload: int, body: bytes) -> bool:
        expected = self._answers[payload]
        try:
            got = self._decode(body)
        except (ValueError, TypeError, OverflowError, RecursionError, msgspec.DecodeError, RequestError):
            return False
        return sorted(got) == sorted(expected) and all(
            check.passed for check in self._measure.check("", self._requests[payload], got, expected)
        )

    def _decode(self, body: bytes) -> dict[str, Array]:
        if self._body == "npy":
            return {self._spec.outputs[0].name: parse_npy(body)}
        outputs = msgspec.json.decode(body, type=_Answer).outputs
        dtypes = {tensor.name: numpy_dtype(tensor.dtype) for tensor in self._spec.outputs}
        return {name: np.asarray(value, dtype=dtypes.get(name)) for name, value in outputs.items()}


class _Answer(msgspec.Struct):
    outputs: dict[str, Any]


class FirstAnswer:
    """Right is what equals the first answer: byte by byte, or as JSON or npy of the same structure, integers and text
    equal, and floats a, b within |a − b| ≤ 1e-4·|b| + 2e-5·rms, rms being the root mean square of the first answer's
    floats.

    There is a tolerance because a server that batches may compute one request inside different batches.
    """

    def __init__(self, body: bytes, kind: str) -> None:
        self._body = body
        self._kind = kind
        self._structure, self._leaves = self._parse(body)
        floats = [leaf for leaf in self._leaves if isinstance(leaf, float) and math.isfinite(leaf)]
        self._atol = _ATOL_SCALE * math.sqrt(math.fsum(leaf**2 for leaf in floats) / len(floats)) if floats else 0.0

    def _parse(self, body: bytes) -> tuple[Any, list[Any]]:
        try:
            if self._kind == "npy":
                array = parse_npy(body)
                return (array.shape, array.dtype.name), array.ravel().tolist()
            leaves: list[Any] = []
            return _structure(msgspec.json.decode(body), leaves), leaves
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, RequestError):
            return None, [body]  # neither JSON nor npy: equal bytes alone are right

    def is_right(self, payload: int, body: bytes) -> bool:
        if body == self._body:
            return True
        structure, leaves = self._parse(body)
        return (
            structure == self._structure
            and len(leaves) == len(self._leaves)
            and all(self._close(got, expected) for got, expected in zip(leaves, self._leaves, strict=True))
        )

    def _close(self, got: Any, expected: Any) -> bool:
        kinds = {type(got), type(expected)}
        if kinds != {float} and kinds != {int, float}:
            return len(kinds) == 1 and bool(got == expected)
        if not (math.isfinite(got) and math.isfinite(expected)):
            return got == expected or (math.isnan(got) and math.isnan(expected))
        return bool(abs(got - expected) <= _RTOL * abs(expected) + self._atol)


def _structure(value: Any, leaves: list[Any]) -> Any:
    """The keys and lengths of parsed JSON; numbers, texts, booleans and nulls are appended to `leaves` in order."""
    if isinstance(value, dict):
        return {key: _structure(value[key], leaves) for key in sorted(value)}
    if isinstance(value, list):
        return [_structure(item, leaves) for item in value]
    leaves.append(value)
    return None


def describe(body: bytes, limit_chars: int = 200) -> str:
    """An answer in one line, for a message: printable characters only, a terminal must not obey a server."""
    text = " ".join(body[: 10 * limit_chars].decode(errors="replace").split())
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text if len(text) <= limit_chars else text[: limit_chars - 1] + "…"
