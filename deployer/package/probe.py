"""Real requests made of a bundle's samples, and the verdict on their answers: what a package and a server are held to.

The answers are compared with the eager model's outputs by the gate's own tolerance. One more request is wrong on
purpose, and must be refused by name while its neighbours are answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from deployer.bundle import Bundle
from deployer.errors import RequestError
from deployer.package.settings import why_not_stackable
from deployer.protocol import JSON, NPY, decode_answer, encode_inputs, npy_bytes, oip
from deployer.spec import Array, Arrays, TensorSpec
from deployer.validate import measure_of

#: an input that no model has: TensorSpec names are identifiers
BAD_FIELD = "no such input"
BAD_BODY = msgspec.json.encode({"inputs": {BAD_FIELD: [1]}})

_ROWS = 3


@dataclass(frozen=True)
class Probe:
    """The body of a request for `inputs`, which must be answered with `expected`."""

    body: bytes
    content_type: str
    accept: str
    inputs: dict[str, Array]
    expected: dict[str, Array]


def make_probes(bundle: Bundle) -> list[Probe]:
    """The samples, in JSON and, where one array makes a body, in .npy."""
    cases = sample_cases(bundle)
    if len(cases) == 1:
        cases = cases * 2
    return [_probe(arrays, expected, binary=index % 2 == 1) for index, (arrays, expected) in enumerate(cases)]


def sample_cases(bundle: Bundle) -> list[tuple[dict[str, Array], dict[str, Array]]]:
    """Inputs of a request and the eager model's outputs for it: one item after the other where requests are single
    items, else the samples as they are."""
    spec = bundle.spec
    inputs, outputs = bundle.samples()
    cases = [(inputs, outputs)]
    if spec.batch is not None and not why_not_stackable(bundle.manifest) and spec.dims[spec.batch].min == 1:
        rows = inputs[spec.inputs[0].name].shape[spec.inputs[0].shape.index(spec.batch)]
        cases = [
            (_row(spec.inputs, inputs, spec.batch, row), _row(spec.outputs, outputs, spec.batch, row))
            for row in range(min(rows, _ROWS))
        ]
    return cases


def _row(tensors: Sequence[TensorSpec], arrays: Arrays, batch: str, row: int) -> dict[str, Array]:
    return {tensor.name: arrays[tensor.name].take(row, axis=tensor.shape.index(batch)) for tensor in tensors}


def _probe(arrays: dict[str, Array], expected: dict[str, Array], *, binary: bool) -> Probe:
    accept = NPY if binary and len(expected) == 1 else JSON
    if binary and len(arrays) == 1:
        return Probe(npy_bytes(next(iter(arrays.values()))), NPY, accept, arrays, expected)
    return Probe(encode_inputs(arrays), JSON, accept, arrays, expected)


def judge(probe: Probe, bundle: Bundle, status: int, body: bytes, content_type: str, header_length: str = "") -> str:
    """What is wrong with the answer to a probe, or nothing. `header_length` is the answer's `oip.HEADER_LENGTH`."""
    if status != 200:
        return f"a sample was answered with status {status}: {body[:300].decode(errors='replace')}"
    try:
        outputs: dict[str, Array] = decode_answer(body, content_type, oip.header_length(header_length))["outputs"]
    except RequestError as error:
        return f"the answer to a sample cannot be read: {error}"
    if list(outputs) == [""]:
        outputs = {bundle.spec.outputs[0].name: outputs[""]}
    if sorted(outputs) != sorted(probe.expected):
        return f"a sample was answered with outputs {sorted(outputs)} instead of {sorted(probe.expected)}"
    expected = probe.expected
    if content_type.startswith(JSON):
        expected = {name: _through_json(array) for name, array in expected.items()}
    typed = {name: _typed(outputs[name], array) for name, array in expected.items()}
    for check in measure_of(bundle).check("the sample", probe.inputs, typed, expected):
        if not check.passed:
            return f"output '{check.output}' of a sample differs from the eager model's: {check.reason}"
    return ""


def _through_json(array: Array) -> Array:
    """What JSON can carry: infinities arrive as null, which reads as NaN."""
    return np.where(np.isfinite(array), array, np.nan).astype(array.dtype) if array.dtype.kind == "f" else array


def _typed(got: Array, expected: Array) -> Array:
    """JSON's numbers as the output's dtype, where that changes no value."""
    if got.size == 0 and expected.size == 0:
        return expected
    if got.dtype.kind == expected.dtype.kind or (expected.dtype.kind == "f" and got.dtype.kind in "iu"):
        return got.astype(expected.dtype)
    if expected.dtype.kind == "u" and got.dtype.kind == "i" and (got >= 0).all():
        return got.astype(expected.dtype)
    return got


def judge_refusal(status: int, body: bytes) -> str:
    """What is wrong with the answer to BAD_BODY, or nothing: a 400 that names the field is right."""
    try:
        document: Any = msgspec.json.decode(body)
        field = document["error"]["field"]
    except (msgspec.DecodeError, KeyError, TypeError):
        field = None
    if (status, field) == (400, BAD_FIELD):
        return ""
    return (
        f"a wrong request was answered with status {status} and {body[:200].decode(errors='replace')}, not its own 400"
    )
