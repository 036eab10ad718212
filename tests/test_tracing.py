"""Spans of requests: what they tell, whose children they are, and that nothing is done where nobody asks for them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

from deployer.errors import MachineError, UsageError
from deployer.formats import Loaded
from deployer.package import package
from deployer.predictor import Predictor, Request
from deployer.protocol import JSON, encode_request
from deployer.runtime import Runner
from deployer.serve import Server
from deployer.spec import Arrays
from deployer.tracing import Tracing, is_asked_for, open_tracing
from tests.hostile import LOOKUP, look_up
from tests.test_serve_torchserve import ANY_PORT

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
STAGES = ["decode", "wait", "infer", "encode"]


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def predictor_into(spans: InMemorySpanExporter, call: Any = look_up, **options: Any) -> Predictor:
    provider = TracerProvider(**options)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    runner = Runner(LOOKUP, Loaded(call, "arithmetic"))
    return Predictor(runner, batch_independent=True, tracing=Tracing(provider, LOOKUP))


def right(row: list[int], traceparent: str = "") -> Request:
    body = encode_request({"ids": np.array([row])}, JSON).body
    return Request(body, JSON, headers={"traceparent": traceparent} if traceparent else {})


def roots(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]


def children(spans: InMemorySpanExporter, root: ReadableSpan) -> list[ReadableSpan]:
    return [s for s in spans.get_finished_spans() if s.parent is not None and s.parent.span_id == root.context.span_id]


# ------------------------------------------------------------------------------------------------------- what they tell


def test_every_request_of_a_batch_has_a_span_with_its_stages(spans: InMemorySpanExporter) -> None:
    before_ns = time.time_ns()
    answers = predictor_into(spans).answer([right([0, 1, 2]), right([3, 4, 5]), Request(b"{", JSON)])
    after_ns = time.time_ns()
    assert [answer.status for answer in answers] == [200, 200, 400]
    first, second, refused = roots(spans)
    for root, run_requests, status in ((first, 2, 200), (second, 2, 200), (refused, 0, 400)):
        assert root.name == "predict lookup"
        assert root.attributes is not None
        assert root.attributes["deployer.run.requests"] == run_requests
        assert root.attributes["http.response.status_code"] == status
        assert root.attributes["deployer.model.version"] == "1.0"
        assert root.status.status_code is StatusCode.UNSET
        assert root.parent is None
    assert first.attributes is not None
    assert first.attributes["http.request.body.size"] == len(right([0, 1, 2]).body)
    assert first.attributes["http.response.body.size"] == len(answers[0].body)
    for root in (first, second):
        stages = children(spans, root)
        assert [stage.name for stage in stages] == STAGES
        assert all(stage.start_time <= stage.end_time for stage in stages)
        assert all(root.start_time <= stage.start_time and stage.end_time <= root.end_time for stage in stages)
        assert before_ns - 10**7 <= root.start_time <= root.end_time <= after_ns + 10**7
    assert children(spans, refused) == []
    runs = [children(spans, root)[2] for root in (first, second)]
    assert (runs[0].start_time, runs[0].end_time) == (runs[1].start_time, runs[1].end_time)  # they shared it


def test_a_callers_span_is_the_parent(spans: InMemorySpanExporter) -> None:
    predictor_into(spans).answer([right([0, 1, 2], TRACEPARENT), right([3, 4, 5]), right([6, 7, 8], "nonsense")])
    mine, other, wrong = roots(spans)
    assert f"{mine.context.trace_id:032x}" == TRACE
    assert mine.parent is not None
    assert f"{mine.parent.span_id:016x}" == PARENT
    assert {span.context.trace_id for span in children(spans, mine)} == {mine.context.trace_id}
    assert other.parent is None
    assert wrong.parent is None
    assert len({span.context.trace_id for span in (mine, other, wrong)}) == 3


def test_a_caller_that_does_not_sample_is_heeded(spans: InMemorySpanExporter) -> None:
    predictor = predictor_into(spans, sampler=ParentBased(ALWAYS_OFF))
    predictor.answer([right([0, 1, 2], f"00-{TRACE}-{PARENT}-00"), right([0, 1, 2], TRACEPARENT)])
    assert len(roots(spans)) == 1


def test_a_fault_of_the_model_is_an_error_of_its_own_request(spans: InMemorySpanExporter) -> None:
    def fail(arrays: Arrays) -> Any:
        if 9 in arrays["ids"]:
            raise RuntimeError("nine")
        return look_up(arrays)

    answers = predictor_into(spans, fail).answer([right([0, 1, 2]), right([9, 9, 9])])
    assert [answer.status for answer in answers] == [200, 500]
    fine, failed = roots(spans)
    assert (fine.status.status_code, failed.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert [stage.name for stage in children(spans, fine)] == STAGES
    assert [stage.name for stage in children(spans, failed)] == ["decode"]


def test_spans_that_cannot_be_written_cost_no_answer(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    predictor = predictor_into(spans)
    monkeypatch.setattr("opentelemetry.propagate.extract", lambda headers: 1 / 0)
    assert [answer.status for answer in predictor.answer([right([0, 1, 2])])] == [200]
    assert "spans were lost: ZeroDivisionError" in caplog.text


def test_a_request_does_not_show_its_headers() -> None:
    """The token is among them."""
    assert "secret" not in repr(Request(b"", headers={"authorization": "Bearer secret"}))


# ---------------------------------------------------------------------------------------------------------- who asks


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_SDK_DISABLED": "True"}, False),
    ],
)
def test_the_standard_variables_decide(environment: dict[str, str], asked: bool) -> None:
    assert is_asked_for(environment) == asked
    assert asked or open_tracing(LOOKUP, environment) is None


def test_what_is_not_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="OTEL_TRACES_EXPORTER is 'zipkin'; otlp, console or none is expected"):
        open_tracing(LOOKUP, {"OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(UsageError, match="protocol 'grpc' is asked for; http/protobuf"):
        open_tracing(LOOKUP, {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})

    def lack(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lack)
    with pytest.raises(MachineError, match=r"pip install 'deployer\[otel\]'"):
        open_tracing(LOOKUP, {"OTEL_TRACES_EXPORTER": "otlp"})


def test_where_nobody_asks_nothing_is_imported(digits_bundles: Mapping[str, Path]) -> None:
    code = (
        "import sys\nfrom deployer.predictor import Predictor, Request\n"
        f"with Predictor.open({str(digits_bundles['onnx'])!r}) as predictor:\n"
        "    predictor.answer([Request(b'{}', 'application/json')])\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -------------------------------------------------------------------------------------------------------- a real server


class Receiver(ThreadingHTTPServer):
    """What a collector is to an exporter."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[ExportTraceServiceRequest] = []

    def spans(self) -> list[Any]:
        return [s for r in list(self.received) for part in r.resource_spans for q in part.scope_spans for s in q.spans]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        message = ExportTraceServiceRequest()
        message.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/traces"
        self.server.received.append(message)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_real_server_tells_a_collector(
    digits_bundles: Mapping[str, Path], tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables reach the worker through `deployer serve` and Java, the caller's header through Java."""
    archive = package(digits_bundles["onnx"], output=tmp_path, workers=1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "digits-service")
    with Server([archive], **ANY_PORT) as server:
        headers = {"Authorization": f"Bearer {server.token}", "Content-Type": JSON, "traceparent": TRACEPARENT}
        body = server.endpoints[0].sample.read_bytes()
        answer = httpx.post(server.endpoints[0].url, content=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200
        mine: list[Any] = []
        deadline = time.monotonic() + 30
        while len(mine) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
            mine = [span for span in receiver.spans() if span.trace_id.hex() == TRACE]
    [root] = [span for span in mine if span.parent_span_id.hex() == PARENT]
    assert root.name == "predict digits"
    stages = sorted(
        (span for span in mine if span.parent_span_id == root.span_id), key=lambda s: s.start_time_unix_nano
    )
    assert sorted(span.name for span in stages) == sorted(STAGES)
    [service] = {
        attribute.value.string_value
        for message in receiver.received
        for part in message.resource_spans
        for attribute in part.resource.attributes
        if attribute.key == "service.name"
    }
    assert service == "digits-service"
