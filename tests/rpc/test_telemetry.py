from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from paceline.protocol.errors import InvalidInput, PeerUnavailable
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.runtime import telemetry

ROOT = Path(__file__).resolve().parents[2]
TARGET_TIMINGS = StepTimings(queue_ms=2, forward_ms=10, sample_ms=1, service_ms=13.5, rows=9, sessions=1)
DRAFT_TIMINGS = StepTimings(queue_ms=0.5, forward_ms=3, sample_ms=0.5, service_ms=4, rows=3, sessions=1)
RECORD = RoundRecord(
    base_length=7,
    round_ms=20,
    draft_wait_ms=5,
    wire_ms=1,
    target=TARGET_TIMINGS,
    accept_ms=0.5,
    proposed=3,
    accepted=2,
    cache_hit=True,
    drafter="ngram",
    draft=DRAFT_TIMINGS,
)


class Receiver(otlp_grpc.TraceServiceServicer):
    """An OTLP receiver: keeps every span beside its service's name."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(names["service.name"], span) for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def tree(self) -> set[tuple[str, ...]]:
        """Each span as its path of names from the root, services first seen in brackets."""
        by_id = {span.span_id: (service, span) for service, span in self.spans}

        def path(span_id: bytes) -> tuple[str, ...]:
            if span_id not in by_id:
                return ()
            service, span = by_id[span_id]
            return (*path(span.parent_span_id), f"{service}/{span.name}")

        return {path(span.span_id) for _, span in self.spans}

    def one(self, service: str, name: str) -> Any:
        found = [span for owner, span in self.spans if (owner, span.name) == (service, name)]
        assert len(found) == 1
        return found[0]


@contextmanager
def otlp_receiver() -> Iterator[tuple[Receiver, str]]:
    """A receiver that listens on loopback, and its endpoint."""
    receiver = Receiver()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        otlp_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield receiver, f"http://127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with otlp_receiver() as (receiver, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        yield receiver
        telemetry.shutdown()


def _generate(traceparent: str = "") -> str:
    """The coordinator's part of one generation of one round; returns the round's trace context."""
    assert telemetry.configure("coordinator")
    with telemetry.start_generation(traceparent) as generation:
        round_trace = generation.start_round()
        round_trace.finish(RECORD, time.time_ns())
    telemetry.shutdown()
    return round_trace.traceparent


def _serve(service: str, traceparent: str, name: str, timings: StepTimings) -> None:
    assert telemetry.configure(service)
    telemetry.record_step(traceparent, name, timings)
    telemetry.shutdown()


def test_one_request_is_one_trace_with_three_services_under_one_root(receiver: Receiver) -> None:
    traceparent = _generate()
    _serve("target", traceparent, "verify", TARGET_TIMINGS)
    _serve("draft", traceparent, "draft", DRAFT_TIMINGS)
    assert len({span.trace_id for _, span in receiver.spans}) == 1
    assert [span.name for _, span in receiver.spans if not span.parent_span_id] == ["generate"]
    root, round_ = "coordinator/generate", "coordinator/round"
    verify, draft = "target/verify", "draft/draft"
    assert receiver.tree() == {
        (root,),
        (root, round_),
        (root, round_, "coordinator/draft"),
        (root, round_, "coordinator/verify"),
        (root, round_, "coordinator/accept"),
        (root, round_, verify),
        (root, round_, verify, "target/queue"),
        (root, round_, verify, "target/forward"),
        (root, round_, verify, "target/sample"),
        (root, round_, draft),
        (root, round_, draft, "draft/queue"),
        (root, round_, draft, "draft/forward"),
        (root, round_, draft, "draft/sample"),
    }


def test_spans_have_the_record_lengths_and_words(receiver: Receiver) -> None:
    traceparent = _generate()
    _serve("target", traceparent, "verify", TARGET_TIMINGS)
    lengths = {
        name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        for name in ("draft", "verify", "accept")
        for span in [receiver.one("coordinator", name)]
    }
    assert lengths == {"draft": 5, "verify": 14.5, "accept": 0.5}
    assert receiver.one("coordinator", "verify").start_time_unix_nano == (
        receiver.one("coordinator", "draft").end_time_unix_nano
    )
    forward = receiver.one("target", "forward")
    assert (forward.end_time_unix_nano - forward.start_time_unix_nano) / 1e6 == 10
    attributes = {a.key: a.value for a in receiver.one("coordinator", "round").attributes}
    assert attributes["paceline.accepted"].int_value == 2
    assert attributes["paceline.cache_hit"].bool_value
    assert attributes["paceline.drafter"].string_value == "ngram"
    assert {a.key: a.value.int_value for a in receiver.one("target", "verify").attributes} == {
        "paceline.rows": 9,
        "paceline.sessions": 1,
    }


def test_clients_trace_is_continued(receiver: Receiver) -> None:
    trace_id, span_id = "a" * 32, "b" * 16
    _generate(f"00-{trace_id}-{span_id}-01")
    generate = receiver.one("coordinator", "generate")
    assert (generate.trace_id.hex(), generate.parent_span_id.hex()) == (trace_id, span_id)


def test_failed_generation_ends_its_round_and_says_why(receiver: Receiver) -> None:
    telemetry.configure("coordinator")
    with pytest.raises(PeerUnavailable), telemetry.start_generation() as generation:
        generation.start_round()
        raise PeerUnavailable("target at h:1 is gone")
    telemetry.shutdown()
    for name in ("generate", "round"):
        status = receiver.one("coordinator", name).status
        assert status.code == 2
        assert "target at h:1 is gone" in status.message


def test_off_passes_a_clients_context_on_and_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    assert not telemetry.configure("coordinator")
    with telemetry.start_generation("tp") as generation:
        round_trace = generation.start_round()
        assert generation.traceparent == round_trace.traceparent == "tp"
        round_trace.finish(RECORD, 0)
        round_trace.end()
    telemetry.record_step("tp", "verify", TARGET_TIMINGS)
    with telemetry.start_generation() as generation:
        assert generation.start_round().traceparent == ""


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_standard_switches_turn_it_off(off: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for name, value in off.items():
        monkeypatch.setenv(name, value)
    assert not telemetry.configure("coordinator")


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")]
)
def test_exporters_that_we_do_not_speak_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=name):
        telemetry.configure("coordinator")


def test_off_needs_no_opentelemetry() -> None:
    program = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'opentelemetry':\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "from paceline.runtime import telemetry\n"
        "assert telemetry.configure('x') is False\n"
        "with telemetry.start_generation() as generation:\n"
        "    generation.start_round().end()\n"
        "assert 'opentelemetry' not in sys.modules\n"
        "import os\n"
        "os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = 'http://127.0.0.1:1'\n"
        "try:\n"
        "    telemetry.configure('x')\n"
        "except telemetry.Unsupported as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "paceline[otel]" in result.stdout


def test_off_is_cheap() -> None:
    self_started = time.perf_counter()
    for _ in range(10_000):
        generation = telemetry.start_generation()
        generation.start_round().finish(RECORD, 0)
        telemetry.record_step("", "verify", TARGET_TIMINGS)
    # Half a second for 10,000 is 50 µs each, twenty times what it takes.
    assert time.perf_counter() - self_started < 0.5
