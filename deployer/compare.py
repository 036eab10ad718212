"""Two servers, or two versions of a model, given the same requests: where they agree, and how long each takes.

    report = compare(url_of_the_old, url_of_the_new, "requests.jsonl", max_abs_error=1e-4)

Each request goes to both, one right after the other, the first of the two in turn: what the machine does meanwhile hits
both alike. Answers are taken as JSON, which carries float32 to the last digit. A is what B is held to.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from deployer.bench.statistics import Latency, summarize
from deployer.bundle import Bundle, read_bundle
from deployer.client import BODIES, encode, failure
from deployer.errors import RequestError, SampleError, ServerError, UsageError, first_line
from deployer.protocol import JSON, Encoded, decode_answer, decode_request, oip
from deployer.samples import read_samples
from deployer.spec import Array, Arrays, ModelSpec, numpy_dtype
from deployer.validate import Measure, measure_of

log = logging.getLogger(__name__)

SIDES = ("a", "b")
_REASONS_KEPT = 10
_LINES = (".jsonl", ".ndjson")


class OutputAgreement(msgspec.Struct, frozen=True):
    """One output over all requests that both answered; `bit_equal` of them have it equal to the last bit and sign of
    zero. `max_rel_error` is the largest |a − b| / max(|a|, |b|)."""

    compared: int
    bit_equal: int
    max_abs_error: float
    max_rel_error: float


class CompareReport(msgspec.Struct, frozen=True):
    """`requests` were sent to both, `answered` with a result by both. `bit_equal` of these have every value of every
    output equal; `labels_equal` of `labels_compared` labels are. `statuses` counts the pairs that differ, as `200/503`,
    0 where no answer came. `latency` is in milliseconds, of answered pairs alone, `p50_ratio` and `p99_ratio` are B's
    over A's, `pair_ratio` the median of the pairs' own ratios. `reasons` are the first ten of what is not agreement;
    `disagreements` counts them all."""

    url_a: str
    url_b: str
    requests: int
    answered: int
    bit_equal: int
    labels_equal: int
    labels_compared: int
    outputs: dict[str, OutputAgreement]
    statuses: dict[str, int]
    latency: dict[str, Latency]
    p50_ratio: float | None
    p99_ratio: float | None
    pair_ratio: float | None
    tolerance: str
    disagreements: int
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()
    schema_version: int = 1

    @property
    def passed(self) -> bool:
        return not self.disagreements


@dataclass(frozen=True)
class _Reply:
    status: int
    latency_ms: float
    outputs: Mapping[str, Array] | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""


def compare(
    url_a: str,
    url_b: str,
    requests: str | Path,
    *,
    bundle: str | Path | None = None,
    max_abs_error: float | None = None,
    max_rel_error: float | None = None,
    token_a: str | None = None,
    token_b: str | None = None,
    body: str | None = None,
    rounds: int = 1,
    timeout_s: float = 60.0,
) -> CompareReport:
    """Send every request of a file to both, `rounds` times.

    The file holds samples (.npz, .npy, .safetensors; each row is a request where all arrays have as many), or request
    bodies as JSON, one a line (.jsonl). Statuses, outputs and shapes must be alike; values too, within `max_abs_error`
    or `max_rel_error` where one is given (either is enough where both are), else within the tolerance of `bundle`, else
    they are reported alone.

    Raises SampleError, UsageError, BundleError, and ServerError where a server does not answer the first request.
    """
    opened = read_bundle(bundle) if bundle is not None else None
    encoded = _read_requests(Path(requests), opened.spec if opened is not None else None, body)
    for name, limit in (("--max-abs-error", max_abs_error), ("--max-rel-error", max_rel_error)):
        if limit is not None and not limit >= 0:
            raise UsageError(f"{name} {limit:g}: 0 or more is expected")
    judge = _Judge(opened, max_abs_error, max_rel_error)
    clients = [_Client(url, token, timeout_s) for url, token in ((url_a, token_a), (url_b, token_b))]
    try:
        for client in clients:
            client.check(encoded[0])  # also the warm-up, which is in no figure
        tally = _Tally()
        for turn in range(rounds):
            for number, request in enumerate(encoded):
                order = (0, 1) if (number + turn) % 2 == 0 else (1, 0)
                replies = {index: clients[index].send(request) for index in order}
                tally.note(number, request, replies[0], replies[1], judge)
    finally:
        for client in clients:
            client.close()
    return tally.report(url_a, url_b, judge)


def _read_requests(path: Path, spec: ModelSpec | None, body: str | None) -> list[Encoded]:
    if path.suffix.lower() in _LINES:
        if body not in (None, "json"):
            raise UsageError(f"'{path}' is sent as it is, which --body {body} contradicts; give samples")
        return _read_lines(path)
    if path.suffix.lower() == ".json":
        return [encode(path, body)]
    arrays = read_samples(path)
    if body is None and list(arrays) != [""]:
        body = "json" if all(_finite(array) for array in arrays.values()) else "npz"
    kind = body or "npy"
    if kind not in BODIES:
        encode(path, kind)  # says what there is
    return [encode(row[""] if list(row) == [""] else row, kind) for row in _rows(arrays, spec)]


def _finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _read_lines(path: Path) -> list[Encoded]:
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise SampleError(
            f"no requests in '{path}': {error.strerror}; give .jsonl, .npz, .npy or .safetensors"
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            msgspec.json.decode(line, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise SampleError(f"'{path}', line {number}: no valid JSON: {error}") from error
    if not lines:
        raise SampleError(f"'{path}' holds no requests; one JSON body a line is expected")
    return [Encoded(line, JSON) for line in lines]


def _rows(arrays: Arrays, spec: ModelSpec | None) -> list[dict[str, Array]]:
    """Each row as a batch of one: along the spec's batch axis, without a spec along axis 0 where all have as many."""
    axes = dict.fromkeys(arrays, 0)
    if spec is not None:
        if spec.batch is None:
            return [dict(arrays)]
        batched = {tensor.name: tensor.axis_of(spec.batch) for tensor in spec.inputs}
        if list(arrays) == [""]:
            batched = {"": next(iter(batched.values()))}
        if any(batched.get(name) is None for name in arrays):
            return [dict(arrays)]
        axes = {name: batched[name] or 0 for name in arrays}
    counts = {array.shape[axes[name]] if array.ndim > axes[name] else None for name, array in arrays.items()}
    if len(counts) != 1 or None in counts:
        return [dict(arrays)]
    [count] = counts
    return [{name: array.take([row], axis=axes[name]) for name, array in arrays.items()} for row in range(count or 0)]


class _Client:
    """One server over one connection that is kept."""

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        self._url = url
        self._token = token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # trust_env off: a proxy of the environment must see neither the token nor a loopback request
        self._client = httpx.Client(timeout=timeout_s, trust_env=False, headers=headers)

    def close(self) -> None:
        self._client.close()

    def _post(self, request: Encoded) -> httpx.Response:
        headers = {"Content-Type": request.content_type, "Accept": JSON, **request.headers}
        return self._client.post(self._url, content=request.body, headers=headers)

    def check(self, request: Encoded) -> None:
        """Raises for a server that does not answer, refuses the token or has no such model; not for a refused
        request, on which both may agree."""
        try:
            response = self._post(request)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise UsageError(f"'{self._url}' is no URL ({first_line(error)})") from error
        except httpx.HTTPError as error:
            reason = first_line(error) or type(error).__name__
            raise ServerError(f"{self._url} does not answer ({reason}); `deployer serve` starts a server") from error
        refused = failure(response, len(request.body), with_token=bool(self._token)) if response.is_error else None
        if isinstance(refused, ServerError):
            raise ServerError(f"{self._url}: {refused}", status=refused.status)

    def send(self, request: Encoded) -> _Reply:
        started = time.perf_counter()
        try:
            response = self._post(request)
        except httpx.HTTPError as error:
            return _Reply(0, (time.perf_counter() - started) * 1e3, fault=first_line(error) or type(error).__name__)
        latency_ms = (time.perf_counter() - started) * 1e3
        if response.status_code != 200:
            return _Reply(response.status_code, latency_ms)
        try:
            header_bytes = oip.header_length(response.headers.get(oip.HEADER_LENGTH, ""))
            answer = decode_answer(response.content, response.headers.get("content-type", ""), header_bytes)
        except RequestError as error:
            return _Reply(200, latency_ms, fault=f"no result: {error}")
        return _Reply(200, latency_ms, answer["outputs"], answer.get("labels") or {})


class _Judge:
    """What is agreement of values."""

    def __init__(self, bundle: Bundle | None, max_abs_error: float | None, max_rel_error: float | None) -> None:
        self._spec = bundle.spec if bundle is not None else None
        self._measure: Measure | None = None
        self._limits = (max_abs_error, max_rel_error)
        if max_abs_error is not None or max_rel_error is not None:
            named = zip(("absolute", "relative"), self._limits, strict=True)
            limits = [f"{name} error {limit:g}" for name, limit in named if limit is not None]
            self.tolerance = " or ".join(limits)
        elif bundle is not None:
            self._measure = measure_of(bundle)
            self.tolerance = f"that of the bundle's gate ({bundle.manifest.target.precision})"
        else:
            self.tolerance = "none: values are reported, and held to nothing"

    def fault(self, request: Encoded, a: Mapping[str, Array], b: Mapping[str, Array]) -> str:
        """How the values of B are not those of A, or nothing."""
        if self._measure is not None and self._spec is not None:
            return self._fault_of_bundle(self._measure, self._spec, request, a, b)
        if self._limits == (None, None):
            return ""
        for name, expected in a.items():
            errors, relative = differences(expected, b[name])
            bad = np.ones(errors.shape, bool)
            for limit, found in zip(self._limits, (errors, relative), strict=True):
                if limit is not None:
                    bad &= ~(found <= limit)
            if bad.any():
                return f"output '{name}' differs by {errors[bad].max():.3g} (relative {relative[bad].max():.3g})"
        return ""

    def _fault_of_bundle(
        self, measure: Measure, spec: ModelSpec, request: Encoded, a: Mapping[str, Array], b: Mapping[str, Array]
    ) -> str:
        dtypes = {tensor.name: numpy_dtype(tensor.dtype) for tensor in spec.outputs}
        if sorted(dtypes) != sorted(a):
            return f"the outputs {', '.join(a)} are not the bundle's, {', '.join(dtypes)}"
        header_bytes = oip.header_length(request.headers.get(oip.HEADER_LENGTH, ""))
        try:
            inputs = decode_request(request.body, request.content_type, spec, header_bytes).arrays
        except RequestError as error:
            return f"the request is none for the bundle's model: {error}"
        got, expected = ({name: side[name].astype(dtype) for name, dtype in dtypes.items()} for side in (b, a))
        checks = measure.check("", inputs, got, expected)
        return next((f"output '{check.output}': {check.reason}" for check in checks if not check.passed), "")


def differences(a: Array, b: Array) -> tuple[Array, Array]:
    """|a − b| and |a − b| / max(|a|, |b|), elementwise; 0 where both are equal or both NaN, infinite where one is."""
    one, other = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        errors = np.where(same, 0.0, np.abs(one - other))
        errors = np.where(np.isnan(errors), np.inf, errors)
        relative = np.where(same, 0.0, errors / np.maximum(np.abs(one), np.abs(other)))
    return errors, np.where(np.isnan(relative), np.inf, relative)


class _Tally:
    def __init__(self) -> None:
        self._requests = self._answered = self._equal = self._labels = self._labels_equal = 0
        self._outputs: dict[str, list[tuple[bool, float, float]]] = {}
        self._statuses: Counter[str] = Counter()
        self._latencies: tuple[list[float], list[float]] = ([], [])
        self._disagreements = 0
        self._reasons: list[str] = []

    def note(self, number: int, request: Encoded, a: _Reply, b: _Reply, judge: _Judge) -> None:
        self._requests += 1
        reason = self._compare(request, a, b, judge)
        if reason:
            self._disagreements += 1
            self._reasons = [*self._reasons, f"request {number + 1}: {reason}"][:_REASONS_KEPT]

    def _compare(self, request: Encoded, a: _Reply, b: _Reply, judge: _Judge) -> str:
        if a.status != b.status:
            self._statuses[f"{a.status}/{b.status}"] += 1
            return f"A answers {a.status or a.fault}, B {b.status or b.fault}"
        if a.outputs is None or b.outputs is None:
            faults = [f"{side}: {reply.fault}" for side, reply in zip("AB", (a, b), strict=True) if reply.fault]
            return "; ".join(faults)  # refused alike is agreement
        self._answered += 1
        for latencies, reply in zip(self._latencies, (a, b), strict=True):
            latencies.append(reply.latency_ms)
        if sorted(a.outputs) != sorted(b.outputs):
            return f"A has the outputs {', '.join(a.outputs)}, B {', '.join(b.outputs)}"
        shapes = [name for name, array in a.outputs.items() if array.shape != b.outputs[name].shape]
        if shapes:
            name = shapes[0]
            return f"output '{name}' has the shape {a.outputs[name].shape} of A and {b.outputs[name].shape} of B"
        equal = []
        for name, array in a.outputs.items():
            errors, relative = differences(array, b.outputs[name])
            equal.append(array.dtype == b.outputs[name].dtype and array.tobytes() == b.outputs[name].tobytes())
            largest = (float(errors.max(initial=0)), float(relative.max(initial=0)))
            self._outputs.setdefault(name, []).append((equal[-1], *largest))
        self._equal += all(equal)
        self._note_labels(a.labels, b.labels)
        return judge.fault(request, a.outputs, b.outputs)

    def _note_labels(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
        for name in sorted({*a, *b}):
            ours, theirs = (side.get(name) for side in (a, b))
            ours, theirs = (side if isinstance(side, list) else [side] for side in (ours, theirs))
            self._labels += max(len(ours), len(theirs))
            self._labels_equal += sum(one == other for one, other in zip(ours, theirs, strict=False))

    def report(self, url_a: str, url_b: str, judge: _Judge) -> CompareReport:
        outputs = {
            name: OutputAgreement(
                len(seen), sum(one[0] for one in seen), max(one[1] for one in seen), max(one[2] for one in seen)
            )
            for name, seen in self._outputs.items()
        }
        a, b = (summarize(latencies) for latencies in self._latencies)
        pairs = [theirs / ours for ours, theirs in zip(*self._latencies, strict=True) if ours > 0]
        return CompareReport(
            url_a=url_a,
            url_b=url_b,
            requests=self._requests,
            answered=self._answered,
            bit_equal=self._equal,
            labels_equal=self._labels_equal,
            labels_compared=self._labels,
            outputs=outputs,
            statuses=dict(sorted(self._statuses.items())),
            latency={"a": a, "b": b},
            p50_ratio=_ratio(a.p50_ms, b.p50_ms),
            p99_ratio=_ratio(a.p99_ms, b.p99_ms),
            pair_ratio=summarize(pairs).p50_ms if pairs else None,
            tolerance=judge.tolerance,
            disagreements=self._disagreements,
            reasons=tuple(self._reasons),
            notes=a.notes,
        )


def _ratio(a: float | None, b: float | None) -> float | None:
    return b / a if a and b is not None and math.isfinite(b / a) else None
