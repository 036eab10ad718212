"""How a package batches, and what follows from the spec: one set of settings for every engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from deployer.bundle import Manifest
from deployer.errors import UsageError
from deployer.machine import usable_cores
from deployer.spec import ANY, ModelSpec, TensorSpec

log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_DELAY_MS = 2
DEFAULT_WORKERS = 2
DEFAULT_RESPONSE_TIMEOUT_S = 120
DEFAULT_MAX_QUEUE_WAIT_S = 10

_DELAY_LIMIT_MS = 2**31 - 1  # TorchServe drops what is no Java int, and takes 100
_WORKERS_LIMIT = 1024
_THREADS_LIMIT = 1024
_SECONDS_LIMIT = 86_400
_QUEUE_BYTES = 256 << 20
_QUEUE_LIMIT = 1000

_BODY_FLOOR_BYTES = 6_553_500  # TorchServe's own default; smaller limits would only surprise
_BODY_CEILING_BYTES = 2**31 - 1  # limits are Java ints
_JSON_BYTES_PER_VALUE = 26  # "-2.2250738585072014e-308" and a comma; brackets are counted with them
_JSON_FRAME_BYTES = 64 * 1024
_ANY_SIZE = 10_000  # an output axis that follows from data has no bound; this many entries are allowed for


@dataclass(frozen=True)
class Settings:
    """`batch_size` requests at most share a run; the first of them waits `max_batch_delay_ms` at most for others.

    Each of `workers` processes computes with `intra_op_threads` threads. Bodies larger than the two limits are refused
    by the server.

    `job_queue_size` requests wait at most, and none much longer than `max_queue_wait_s`: what is beyond either is
    answered 503. A run that takes longer than `response_timeout_s` is answered 504 and its worker started anew.
    """

    batch_size: int
    max_batch_delay_ms: int
    workers: int
    intra_op_threads: int
    max_request_bytes: int
    max_response_bytes: int
    job_queue_size: int
    response_timeout_s: int
    max_queue_wait_s: int


def choose_settings(
    manifest: Manifest,
    *,
    batch_size: int | None,
    max_batch_delay_ms: int | None,
    workers: int | None,
    intra_op_threads: int | None = None,
    response_timeout_s: int | None = None,
    max_queue_wait_s: int | None = None,
) -> Settings:
    """Settings for a bundle; None means: the batch Dim's typical size (1 where requests cannot share a run), 2 ms,
    two workers (one on a single core), the cores of this machine shared out among them, 120 s for a run, 10 s of
    waiting.

    Raises UsageError that names the option and the reason.
    """
    spec = manifest.spec
    obstacle = why_not_stackable(manifest)
    if batch_size is None and obstacle:
        log.warning("requests for '%s' cannot share a run, %s: the batch size is 1", spec.name, obstacle)
    if batch_size is None:
        batch_size = 1 if obstacle or spec.batch is None else spec.dims[spec.batch].typical
    max_batch_delay_ms = DEFAULT_MAX_BATCH_DELAY_MS if max_batch_delay_ms is None else max_batch_delay_ms
    workers = min(DEFAULT_WORKERS, usable_cores()) if workers is None else workers
    if batch_size < 1:
        raise UsageError(f"--batch-size {batch_size}: at least 1 is expected")
    if max_batch_delay_ms < 1:
        raise UsageError(
            f"--max-batch-delay-ms {max_batch_delay_ms}: at least 1 is expected (TorchServe reads 0 as 100)"
        )
    if max_batch_delay_ms > _DELAY_LIMIT_MS:
        raise UsageError(f"--max-batch-delay-ms {max_batch_delay_ms}: at most {_DELAY_LIMIT_MS} is expected")
    if workers < 1:
        raise UsageError(f"--workers {workers}: at least 1 is expected")
    if workers > _WORKERS_LIMIT:
        raise UsageError(f"--workers {workers}: at most {_WORKERS_LIMIT} is expected")
    if intra_op_threads is not None and not 1 <= intra_op_threads <= _THREADS_LIMIT:
        raise UsageError(f"--intra-op-threads {intra_op_threads}: 1 to {_THREADS_LIMIT} is expected")
    if batch_size > 1 and obstacle:
        raise UsageError(f"--batch-size {batch_size}: requests for '{spec.name}' cannot share a run, {obstacle}; use 1")
    if batch_size > 1 and spec.batch is not None and batch_size > spec.dims[spec.batch].max:
        raise UsageError(
            f"--batch-size {batch_size} is above {spec.dims[spec.batch].max}, the largest '{spec.batch}' that "
            f"'{spec.name}' was exported and validated for; lower it or export with a larger max"
        )
    return Settings(
        batch_size,
        max_batch_delay_ms,
        workers,
        intra_op_threads or max(1, usable_cores() // workers),
        body_limit_bytes(spec, spec.inputs),
        body_limit_bytes(spec, spec.outputs),
        queue_size(spec, batch_size, workers),
        _seconds("--response-timeout-s", response_timeout_s, DEFAULT_RESPONSE_TIMEOUT_S),
        _seconds("--max-queue-wait-s", max_queue_wait_s, DEFAULT_MAX_QUEUE_WAIT_S),
    )


def _seconds(option: str, given: int | None, usual: int) -> int:
    if given is not None and not 1 <= given <= _SECONDS_LIMIT:
        raise UsageError(f"{option} {given}: 1 to {_SECONDS_LIMIT} is expected")
    return usual if given is None else given


def queue_size(spec: ModelSpec, batch_size: int, workers: int) -> int:
    """How many requests may wait: as many of the largest single items, as JSON, as fit into 256 MB, at most 1000, and
    enough that each worker finds a full batch or two."""
    values = sum(
        math.prod(1 if size == spec.batch else _largest(size, spec) for size in tensor.shape) for tensor in spec.inputs
    )
    fitting = _QUEUE_BYTES // max(1, values * _JSON_BYTES_PER_VALUE)
    return max(2 * batch_size * workers, min(_QUEUE_LIMIT, fitting))


def why_not_stackable(manifest: Manifest) -> str:
    """Why requests cannot share a run, or nothing."""
    spec = manifest.spec
    if spec.batch is None:
        return "it declares no batch axis"
    lacking = [tensor.name for tensor in (*spec.inputs, *spec.outputs) if tensor.axis_of(spec.batch) is None]
    if lacking:
        return f"'{lacking[0]}' has no batch axis '{spec.batch}'"
    if not manifest.batch_independent:
        return manifest.batch_reason or "the gate did not see that a row in a batch is answered as the row alone"
    return ""


def body_limit_bytes(spec: ModelSpec, tensors: Sequence[TensorSpec]) -> int:
    """The largest JSON body that these tensors can make with every Dim at its max; at least TorchServe's default."""
    values = sum(math.prod(_largest(size, spec) for size in tensor.shape) for tensor in tensors)
    return min(max(values * _JSON_BYTES_PER_VALUE + _JSON_FRAME_BYTES, _BODY_FLOOR_BYTES), _BODY_CEILING_BYTES)


def _largest(size: int | str, spec: ModelSpec) -> int:
    if isinstance(size, int):
        return size
    return _ANY_SIZE if size == ANY else spec.dims[size].max
