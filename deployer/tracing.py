"""OpenTelemetry spans of requests, where the standard OTEL_* variables of the environment ask for them.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 deployer serve model_store/digits.mar

A span for each request, with a child for each of its stages (`deployer.meters.STAGES`), written after the batch was
answered, from the times that were taken anyway. A request's `traceparent` (W3C Trace Context; OTEL_PROPAGATORS may
ask for others) makes it a child of the caller's span.
Without these variables nothing of OpenTelemetry is imported and no time is taken.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deployer.errors import MachineError, UsageError
from deployer.spec import ModelSpec

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

INSTALL = "pip install 'deployer[otel]'"

_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DISABLED = "OTEL_SDK_DISABLED"
_SERVICE = ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")
_OTLP, _CONSOLE, _NONE = "otlp", "console", "none"
_HTTP = "http/protobuf"
_ERROR_STATUS = 500


@dataclass(frozen=True)
class Stage:
    """What one stage of the request at `index` of a batch took, on the clock of time.perf_counter."""

    index: int
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Served:
    """One answered request, as a span tells it."""

    headers: Mapping[str, str]
    request_bytes: int
    status: int
    response_bytes: int
    run_requests: int


class Tracing:
    """Writes the spans of answered batches."""

    def __init__(self, provider: TracerProvider, spec: ModelSpec) -> None:
        self._tracer = provider.get_tracer("deployer")
        self._name = f"predict {spec.name}"
        self._model = {"deployer.model.name": spec.name, "deployer.model.version": spec.version}

    def record(self, served: Sequence[Served], stages: Sequence[Stage], start_s: float, end_s: float) -> None:
        """The spans of one batch, which was worked on from `start_s` to `end_s`."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        epoch_ns = time.time_ns() - time.perf_counter_ns()

        def at(moment_s: float) -> int:
            return epoch_ns + int(moment_s * 1e9)

        for index, request in enumerate(served):
            own = [stage for stage in stages if stage.index == index]
            span = self._tracer.start_span(
                self._name,
                context=extract(request.headers),
                kind=SpanKind.SERVER,
                attributes={
                    **self._model,
                    "deployer.run.requests": request.run_requests,
                    "http.request.body.size": request.request_bytes,
                    "http.response.body.size": request.response_bytes,
                    "http.response.status_code": request.status,
                },
                start_time=at(start_s),
            )
            if span.is_recording():
                for stage in own:
                    child = self._tracer.start_span(
                        stage.name, context=set_span_in_context(span), start_time=at(stage.start_s)
                    )
                    child.end(at(stage.end_s))
                if request.status >= _ERROR_STATUS:
                    span.set_status(StatusCode.ERROR)
            span.end(at(max((stage.end_s for stage in own if request.status < _ERROR_STATUS), default=end_s)))


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether the variables of the environment ask for traces. By OpenTelemetry's own rules "otlp" is the default; here
    one of them must be set."""
    if environment.get(_DISABLED, "").strip().lower() == "true" or environment.get(_EXPORTER) == _NONE:
        return False
    return any(environment.get(name) for name in (_EXPORTER, *_ENDPOINTS))


def open_tracing(spec: ModelSpec, environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """What the environment asks for, or None. Raises MachineError (not installed), UsageError (an exporter or protocol
    that is not had here)."""
    if not is_asked_for(environment):
        return None
    exporter = environment.get(_EXPORTER) or _OTLP
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), _HTTP)
    if exporter not in (_OTLP, _CONSOLE):
        raise UsageError(f"{_EXPORTER} is '{exporter}'; {_OTLP}, {_CONSOLE} or {_NONE} is expected")
    if exporter == _OTLP and protocol != _HTTP:
        raise UsageError(f"the OTLP protocol '{protocol}' is asked for; {_HTTP} is what is spoken here")
    try:
        missing = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise MachineError("the environment asks for OpenTelemetry traces; its packages are missing", install=INSTALL)
    return Tracing(_provider(_exporter(exporter), environment), spec)


def _exporter(name: str) -> SpanExporter:
    if name == _CONSOLE:
        import sys

        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)  # a worker's standard output is read for metrics
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()  # address, headers, timeout and the rest from the environment


def _provider(exporter: SpanExporter, environment: Mapping[str, str]) -> TracerProvider:
    """Sampler, limits, resource and the batching of exports are read from the environment by the SDK itself."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own: dict[str, Any] = {} if any(environment.get(name) for name in _SERVICE) else {"service.name": "deployer"}
    provider = TracerProvider(resource=Resource.create({**own, "process.pid": os.getpid()}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
