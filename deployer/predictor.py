"""The engine-neutral core of serving: requests in, as many answers out, each with its own status.

    predictor = Predictor.open("build/digits-onnx-fp32", threads=1)
    [response] = predictor.answer([Request(b'{"image": […]}', "application/json", "")])

Requests are decoded and checked one by one. Those that may share a run are stacked along the declared batch axis, up
to the largest batch that the model was exported for, padded to the longest where a mask was seen to switch padding off;
the rest run alone. A run that fails is taken apart, so that a
fault stays with the request that caused it. Adapters to servers (`handlers/`) stay thin.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from deployer.bundle import read_bundle
from deployer.description import DESCRIPTIONS, METADATA, OPENAPI, OPENAPI_TYPE, encode, model_metadata
from deployer.errors import RequestError, first_line
from deployer.hooks import HookRequest, Hooks
from deployer.meters import SERIES, Meters, growth
from deployer.padding import cut_outputs, pad_inputs
from deployer.protocol import JSON, Decoded, check_arrays, choose_answer, decode_request, encode_error, oip, respond
from deployer.runtime import Runner, open_bundle
from deployer.signature import configured_key, verify
from deployer.spec import Array, Arrays
from deployer.tracing import Served, Stage, Tracing, open_tracing

__all__ = ["SERIES", "Meters", "Predictor", "Request", "Response", "growth"]

log = logging.getLogger(__name__)


class Request(msgspec.Struct, frozen=True):
    """One request as it came over the wire."""

    body: bytes | bytearray | memoryview
    content_type: str = ""
    accept: str = ""
    #: the header of the Open Inference Protocol's binary part, as it came; "" without it
    header_length: str = ""
    #: False: read and answered as usual, whatever hooks there are
    hooks: bool = True
    #: what stands in its path behind the model's: one of `description.DESCRIPTIONS`, or nothing
    describe: str = ""
    #: the headers that it came with, names in small letters; a caller's span is among them (`deployer.tracing`)
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        """Without the headers: the token is among them."""
        return f"Request({len(self.body)} bytes, {self.content_type!r}, accept={self.accept!r})"


class Response(msgspec.Struct, frozen=True):
    """One answer. `run_requests` is the number of requests that shared the model run behind it (0: none was made);
    `headers` are those that the body needs beside its content type."""

    status: int
    body: bytes
    content_type: str = JSON
    run_requests: int = 0
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


class _Work(msgspec.Struct, frozen=True):
    """A checked request: where its answer goes, its arrays, its number of rows along the batch axis; `hooked` says that
    the user's postprocess answers it."""

    index: int
    decoded: Decoded
    answer_kind: str
    rows: int
    hooked: bool = False


class Predictor:
    """An open bundle that answers requests. A context manager; one thread at a time."""

    def __init__(
        self,
        runner: Runner,
        *,
        batch_independent: bool,
        hooks: Hooks | None = None,
        padded: Collection[str] = (),
        max_request_bytes: int | None = None,
        openapi: bytes | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._runner = runner
        self._hooks = hooks
        self._max_request_bytes = max_request_bytes
        self._openapi = openapi
        self._tracing = tracing
        self._stages: list[Stage] = []
        self._platform = "deployer"
        self.spec = runner.spec
        #: what was counted since the start
        self.meters = Meters()
        self._arrived_s = 0.0
        #: requests share runs: every tensor has the batch axis, and the gate saw no row influence another
        self.stacks = runner.spec.stackable and batch_independent
        #: Dims along which requests that share a run are padded to the longest
        self.padded = frozenset(padded)

    @classmethod
    def open(
        cls,
        bundle_folder: str | Path,
        threads: int | None = None,
        hooks_file: str | Path | None = None,
        max_request_bytes: int | None = None,
        openapi: bytes | None = None,
    ) -> Predictor:
        """Verify and open a bundle with `threads` compute threads, and run its samples once: what compiles or allocates
        on first use has done so when this returns. `hooks_file` is the user's (`deployer.hooks`); a body of more than
        `max_request_bytes` is refused with 413. `openapi` is the document that describes the engine's routes, which a
        request may ask for (`deployer.description`).

        Where the environment names a public key (`deployer.signature`), the bundle's folder and that of the hooks must
        each be signed with it.

        Raises BundleError, IntegrityError, MachineError; ModelError, UsageError for the hooks file.
        """
        if key := configured_key():
            sys.dont_write_bytecode = True  # it would lie among the signed files of the hooks
            for folder in (Path(bundle_folder), *([Path(hooks_file).parent] if hooks_file is not None else [])):
                verify(folder, key)
        hooks = Hooks.load(hooks_file) if hooks_file is not None else None
        bundle = read_bundle(bundle_folder)
        independent = bundle.manifest.batch_independent
        padded = [dim for dim, reason in bundle.manifest.padding.items() if not reason]
        predictor = cls(
            open_bundle(bundle, threads=threads),
            batch_independent=independent,
            hooks=hooks,
            padded=padded,
            max_request_bytes=max_request_bytes,
            openapi=openapi,
            tracing=open_tracing(bundle.spec),
        )
        predictor._platform = f"deployer_{bundle.manifest.target.format}"
        predictor._warm_up(bundle.samples()[0])
        return predictor

    def _warm_up(self, samples: Arrays) -> None:
        """All samples in one run, and one row alone: compilers treat a size of 1 apart."""
        self._runner(samples)
        batch = self.spec.batch
        if self.stacks and batch is not None and self.spec.dims[batch].min == 1:
            axes = {tensor.name: tensor.shape.index(batch) for tensor in self.spec.inputs}
            self._runner({name: array.take([0], axis=axes[name]) for name, array in samples.items()})

    def close(self) -> None:
        self._runner.close()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def answer(self, requests: Sequence[Request]) -> list[Response]:
        """One response per request, in the same order. Never raises for what a request holds or the model does:
        status 400, 406, 413 or 415 where the request is at fault, 500 where the model or the server is."""
        self._arrived_s = time.perf_counter()
        answers: dict[int, Response] = {}
        works = []
        for index, request in enumerate(requests):
            checked = self._check(index, request)
            if isinstance(checked, Response):
                answers[index] = checked
            else:
                works.append(checked)
        for run in self._runs(works):
            answers.update(self._run_or_split(run))
        responses = [answers[index] for index in range(len(requests))]
        for response in responses:
            if response.status >= 400:
                self.meters.error(response.status)
        if self._tracing is not None:
            self._trace(self._tracing, requests, responses)
        return responses

    def _trace(self, tracing: Tracing, requests: Sequence[Request], responses: Sequence[Response]) -> None:
        served = [
            Served(request.headers, len(request.body), response.status, len(response.body), response.run_requests)
            for request, response in zip(requests, responses, strict=True)
        ]
        stages, self._stages = self._stages, []
        try:
            tracing.record(served, stages, self._arrived_s, time.perf_counter())
        except Exception as error:  # noqa: BLE001 - whatever becomes of its spans, a request is answered
            log.warning("spans were lost: %s: %s", type(error).__name__, first_line(error))

    def _check(self, index: int, request: Request) -> _Work | Response:
        started_s = time.perf_counter()
        try:
            if request.describe:
                return self._describe(request.describe)
            decoded, hooked = self._decode(request)
            kind = JSON if hooked else choose_answer(request.accept, self.spec)
        except RequestError as error:
            return _refusal(error)
        except Exception as error:  # noqa: BLE001 - whatever a body does to a parser, its neighbours are answered
            return _server_fault(error)
        done_s = time.perf_counter()
        self.meters.stages["decode"].observe(done_s - started_s)
        if self._tracing is not None:
            self._stages.append(Stage(index, "decode", started_s, done_s))
        return _Work(index, decoded, kind, decoded.sizes.get(self.spec.batch or "", 1), hooked)

    def _describe(self, what: str) -> Response:
        if what == METADATA:
            return Response(200, encode(model_metadata(self.spec, self._platform)))
        if what == OPENAPI and self._openapi is not None:
            return Response(200, self._openapi, OPENAPI_TYPE)
        known = ", ".join(DESCRIPTIONS if self._openapi is not None else (METADATA,))
        raise RequestError(
            f"the model has nothing at '{what[:40]}'; it has {known}",
            field="path", expected=known, got=what[:40], http_status=404,
        )  # fmt: skip

    def _decode(self, request: Request) -> tuple[Decoded, bool]:
        """A request's arrays, and whether the user's postprocess answers it."""
        limit = self._max_request_bytes
        if limit is not None and len(request.body) > limit:
            raise RequestError(
                f"the body has {len(request.body)} bytes, '{self.spec.name}' takes at most {limit}; send fewer rows, "
                f"or the same in a binary body",
                expected=f"at most {limit} bytes",
                got=f"{len(request.body)} bytes",
                http_status=413,
            )
        hooks = self._hooks if request.hooks else None
        if hooks is not None and hooks.preprocess is not None:
            arrays = hooks.arrays(HookRequest(bytes(request.body), request.content_type, request.accept))
            if arrays is not None:
                return check_arrays(arrays, self.spec), hooks.postprocess is not None
        decoded = decode_request(
            request.body, request.content_type, self.spec, oip.header_length(request.header_length)
        )
        return decoded, hooks is not None and hooks.preprocess is None

    def _runs(self, works: Sequence[_Work]) -> list[list[_Work]]:
        """Requests that share a run: equal sizes of every other Dim but the padded ones, together no more rows than the
        batch Dim's max.

        Its min needs no care here: every request holds it alone.
        """
        if not self.stacks or self.spec.batch is None:
            return [[work] for work in works]
        limit = self.spec.dims[self.spec.batch].max
        free = {self.spec.batch, *self.padded}
        fixed = [name for name in self.spec.dims if name not in free]
        runs: list[list[_Work]] = []
        open_run: dict[tuple[int | None, ...], tuple[list[_Work], int]] = {}
        for work in works:
            key = tuple([work.decoded.sizes.get(name) for name in fixed])
            run, rows = open_run.get(key, ([], 0))
            if not run or rows + work.rows > limit:
                run, rows = [], 0
                runs.append(run)
            run.append(work)
            open_run[key] = run, rows + work.rows
        return runs

    def _run_or_split(self, run: Sequence[_Work]) -> dict[int, Response]:
        try:
            return self._run(run)
        except Exception as error:  # noqa: BLE001 - a model may fail in any way; each request gets an answer
            if len(run) > 1:
                log.debug("a run of %d requests failed (%s); running them one by one", len(run), first_line(error))
                return {index: response for work in run for index, response in self._run_or_split([work]).items()}
            response = _refusal(error) if isinstance(error, RequestError) else _server_fault(error)
            return {run[0].index: response}

    def _run(self, run: Sequence[_Work]) -> dict[int, Response]:
        started_s = time.perf_counter()
        outputs = self._runner(self._stacked(run))
        ran_s = time.perf_counter()
        stages = self.meters.stages
        stages["wait"].observe(started_s - self._arrived_s, len(run))
        stages["infer"].observe(ran_s - started_s, len(run))
        self.meters.runs.observe(len(run))
        if self._tracing is not None:
            for work in run:
                self._stages.append(Stage(work.index, "wait", self._arrived_s, started_s))
                self._stages.append(Stage(work.index, "infer", started_s, ran_s))
        responses = {}
        start = 0
        for work in run:
            own = outputs if len(run) == 1 else self._rows(outputs, slice(start, start + work.rows))
            own = cut_outputs(self.spec, own, work.decoded.sizes, self.padded) if self.padded and len(run) > 1 else own
            start += work.rows
            if work.decoded.one_item:
                own = self._rows(own, 0)
            responses[work.index] = self._respond(work, own, len(run))
            done_s = time.perf_counter()
            stages["encode"].observe(done_s - ran_s)
            if self._tracing is not None:
                self._stages.append(Stage(work.index, "encode", ran_s, done_s))
            ran_s = done_s
        return responses

    def _respond(self, work: _Work, outputs: Arrays, run_requests: int) -> Response:
        if work.hooked and self._hooks is not None:
            try:
                made = self._hooks.answer(outputs)
            except Exception as error:  # noqa: BLE001 - user code may raise anything; its neighbours are answered
                return _server_fault(error, "postprocess")
        else:
            made = respond(outputs, self.spec, work.answer_kind, work.decoded.ask)
        return Response(200, made.body, made.content_type, run_requests, made.headers)

    def _stacked(self, run: Sequence[_Work]) -> Arrays:
        if len(run) == 1:
            return run[0].decoded.arrays
        longest = {name: max(work.decoded.sizes[name] for work in run) for name in self.padded}
        rows = [pad_inputs(self.spec, work.decoded.arrays, longest) if longest else work.decoded.arrays for work in run]
        return {
            tensor.name: np.concatenate(
                [arrays[tensor.name] for arrays in rows], axis=self.spec.batch_axes[tensor.name]
            )
            for tensor in self.spec.inputs
        }

    def _rows(self, outputs: Arrays, which: slice | int) -> dict[str, Array]:
        """Some rows of every output, along that output's own batch axis; of a number the one row without that axis."""
        axes = self.spec.batch_axes
        return {name: array[(slice(None),) * axes[name] + (which,)] for name, array in outputs.items()}


def _refusal(error: RequestError) -> Response:
    body = encode_error(str(error), field=error.field, expected=error.expected, got=error.got)
    return Response(error.http_status, body)


def _server_fault(error: BaseException, who: str = "the model") -> Response:
    message = f"{who} failed on this request with {type(error).__name__}: {first_line(error)}"
    log.warning("%s", message)
    return Response(500, encode_error(message))
