from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from paceline.protocol.errors import InvalidInput, PeerUnavailable
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.protocol.trace_context import TraceContext, decode_tracestate
from paceline.runtime import metrics, span_export, telemetry
from paceline.runtime.config import TraceSettings
from paceline.runtime.otel_environment import sampler_from
from paceline.runtime.spans import FinishedSpan
from tests.e2e.cluster import eventually
from tests.rpc.otlp import Receiver, attributes_of, length_ms, otlp_receiver

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
    mode="matches",
)
SLOW = replace(RECORD, round_ms=90)
NAME = "chat tiny"
TRACE_ID, SPAN_ID = "a" * 32, "b" * 16
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with otlp_receiver() as (receiver, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        yield receiver
        telemetry.shutdown()


def request(
    *records: RoundRecord, headers: dict[str, str] | None = None, settings: TraceSettings | None = None
) -> list[str]:
    """The coordinator's part of one request; returns the trace contexts of its rounds."""
    assert telemetry.configure("coordinator", settings)
    with telemetry.start_request(NAME, headers or {}) as trace:
        rounds = [trace.start_round() for _ in records]
        for round_, record in zip(rounds, records, strict=True):
            round_.finish(record, time.perf_counter())
    telemetry.shutdown()
    return [round_.traceparent for round_ in rounds]


def serve(
    service: str, traceparent: str, name: str, timings: StepTimings, settings: TraceSettings | None = None
) -> None:
    assert telemetry.configure(service, settings)
    telemetry.record_step(traceparent, name, timings)
    telemetry.shutdown()


def test_one_request_is_one_trace_with_the_lengths_and_words_of_its_records(receiver: Receiver) -> None:
    (traceparent,) = request(RECORD)
    serve("target", traceparent, "verify", TARGET_TIMINGS)
    serve("draft", traceparent, "draft", DRAFT_TIMINGS)
    assert len({span.trace_id for _, span in receiver.spans}) == 1
    assert len({span.span_id for _, span in receiver.spans}) == len(receiver.spans)
    assert [span.name for _, span in receiver.spans if not span.parent_span_id] == [NAME]
    path = f"coordinator/{NAME}", "coordinator/round"
    parts_of = {
        path[:1]: {"coordinator/round"},
        path: {f"coordinator/{part}" for part in ("draft", "verify", "accept")} | {"target/verify", "draft/draft"},
        (*path, "target/verify"): {f"target/{part}" for part in ("queue", "forward", "sample")},
        (*path, "draft/draft"): {f"draft/{part}" for part in ("queue", "forward", "sample")},
    }
    assert receiver.tree() == {path[:1]} | {(*above, part) for above, parts in parts_of.items() for part in parts}
    parts = {name: receiver.one("coordinator", name) for name in ("round", "draft", "verify", "accept")}
    lengths = {name: length_ms(span) for name, span in parts.items()}
    assert lengths == pytest.approx({"round": 20, "draft": 5, "verify": 14.5, "accept": 0.5}, abs=1e-3)
    whole, *inner = parts.values()
    begins, ends = ([getattr(span, f"{edge}_time_unix_nano") for span in inner] for edge in ("start", "end"))
    assert [*begins, whole.end_time_unix_nano] == [whole.start_time_unix_nano, *ends], "one behind the other"
    assert length_ms(receiver.one("target", "forward")) == pytest.approx(10, abs=1e-3)
    attributes = attributes_of(parts["round"])
    facts = {
        "paceline.accepted": 2,
        "paceline.cache_hit": True,
        "paceline.drafter": "ngram",
        "paceline.mode": "matches",
    }
    assert attributes.items() >= facts.items()
    assert attributes_of(parts["verify"])["paceline.target.forward_ms"] == 10
    assert attributes_of(receiver.one("target", "verify")) == {"paceline.rows": 9, "paceline.sessions": 1}


def test_a_self_started_rounds_parts_are_cut_at_its_start(receiver: Receiver) -> None:
    """The target began it before the coordinator had the verdict before it: its part is longer than the round."""
    request(replace(RECORD, round_ms=12, draft_wait_ms=0, wire_ms=0, self_started=True))
    round_, verify = (receiver.one("coordinator", name) for name in ("round", "verify"))
    assert verify.start_time_unix_nano == round_.start_time_unix_nano
    assert length_ms(verify) == pytest.approx(11.5, abs=1e-3)


def test_a_clients_trace_and_its_vendors_state_go_on_and_to_what_the_request_causes(receiver: Receiver) -> None:
    telemetry.configure("coordinator")
    with telemetry.start_request(NAME, {"traceparent": PARENT, "tracestate": "one=1, two=2"}) as trace:
        sent = dict(telemetry.outgoing())
        trace.start_round().finish(RECORD, time.perf_counter())
        trace.describe({"gen_ai.usage.output_tokens": 3})
    assert telemetry.outgoing() == ()
    telemetry.shutdown()
    root = receiver.one("coordinator", NAME)
    assert sent == {"traceparent": f"00-{TRACE_ID}-{root.span_id.hex()}-01", "tracestate": "one=1,two=2"}
    assert attributes_of(root)["gen_ai.usage.output_tokens"] == 3
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    round_ = receiver.one("coordinator", "round")
    assert root.trace_state == round_.trace_state == "one=1,two=2"
    assert (root.flags, round_.flags) == (0x301, 0x101), "the one's parent is in another process"


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ("a=1,,b@c=x y", "a=1,b@c=x y"),
        ("A=1", ""),
        ("a=ä", ""),
        ("a=1,b=" + "x" * 512, ""),
        (",".join(f"k{i}=1" for i in range(33)), ""),
    ],
    ids=["empty member", "capital", "not ASCII", "long", "many"],
)
def test_a_state_that_is_not_valid_counts_for_nothing(sent: str, taken: str) -> None:
    assert decode_tracestate(sent) == taken
    context = TraceContext.of(PARENT, sent)
    assert context is not None
    assert context.state == taken
    assert TraceContext.of("", "a=1") is None


def test_failed_request_ends_its_round_and_says_why(receiver: Receiver) -> None:
    telemetry.configure("coordinator")
    with pytest.raises(PeerUnavailable), telemetry.start_request(NAME, {}) as trace:
        trace.start_round()
        raise PeerUnavailable("target at h:1 is gone")
    telemetry.shutdown()
    for name in (NAME, "round"):
        status = receiver.one("coordinator", name).status
        assert status.code == 2
        assert "target at h:1 is gone" in status.message
    assert attributes_of(receiver.one("coordinator", NAME))["error.type"] == "PeerUnavailable"


def test_a_share_is_sampled_and_all_services_know(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    telemetry.configure("coordinator")
    for low in ("00", "7f", "80", "ff"):
        headers = {"traceparent": f"00-{'a' * 16}{low * 8}-{'b' * 16}-01"}
        with telemetry.start_request(NAME, headers) as trace:
            assert trace.start_round().traceparent.endswith("-01"), "the client's decision holds"
    taken = {low: sampler_from(_ratio(0.5)).samples("a" * 16 + low * 8, None) for low in ("00", "7f", "80", "ff")}
    assert taken == {"00": True, "7f": True, "80": False, "ff": False}
    assert not sampler_from(_ratio(0.0)).samples("0" * 31 + "1", None)
    assert sampler_from(_ratio(1.0)).samples("f" * 32, None)


def _ratio(ratio: float) -> dict[str, str]:
    return {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": str(ratio)}


def test_a_request_that_is_not_sampled_exports_nothing(receiver: Receiver) -> None:
    (traceparent,) = request(SLOW, headers=UNSAMPLED)
    assert traceparent.endswith("-00")
    serve("target", traceparent, "verify", TARGET_TIMINGS)
    assert receiver.spans == []


def test_slow_rounds_are_exported_though_not_sampled_below_their_request(receiver: Receiver) -> None:
    settings = TraceSettings(slow_round_ms=50)
    rounds = request(RECORD, SLOW, RECORD, headers=UNSAMPLED, settings=settings)
    slow_step = replace(TARGET_TIMINGS, service_ms=60)
    serve("target", rounds[0], "verify", TARGET_TIMINGS, settings)
    serve("target", rounds[1], "verify", slow_step, settings)
    root = receiver.one("coordinator", NAME)
    assert attributes_of(root)["paceline.slow"] is True
    assert length_ms(receiver.one("coordinator", "round")) == pytest.approx(90, abs=1e-3)
    path = (f"coordinator/{NAME}", "coordinator/round", "target/verify", "target/forward")
    assert path in receiver.tree()


def test_slow_requests_are_exported_with_last_rounds(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MOST_HELD", 3)
    request(*[RECORD] * 5, headers=UNSAMPLED, settings=TraceSettings(slow_request_ms=60_000))
    assert receiver.spans == []
    request(*[RECORD] * 5, headers=UNSAMPLED, settings=TraceSettings(slow_request_ms=1e-6))
    assert sum(span.name == "round" for _, span in receiver.spans) == 3, "memory is bounded"
    assert receiver.one("coordinator", NAME).span_id


def test_a_receiver_that_does_not_answer_costs_spans_and_no_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(span_export, "LAST_SECONDS", 0.1)
    assert telemetry.configure("coordinator")
    began = time.perf_counter()
    with caplog.at_level(logging.WARNING), telemetry.start_request(NAME, {}) as trace:
        for _ in range(1000):
            trace.start_round().finish(RECORD, 0.0)
        assert time.perf_counter() - began < 1, "a thousand rounds at a millisecond each; they take 3 µs"
        assert telemetry._tracing is not None
        telemetry._tracing.queue._wake.set()
        eventually(lambda: "spans dropped" in caplog.text, "what was lost is said")
    telemetry.shutdown()


def test_what_otlp_has_no_number_for_is_text_and_what_it_has_nothing_for_is_lost_alone(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    huge = {"seed": (1 << 64) - 1, "most": (1 << 63) - 1, "max_tokens": 10**30}
    assert telemetry.configure("gateway")
    with caplog.at_level(logging.ERROR):
        telemetry.start_request("lost", {}, {"name": "\ud800"}).end()
        telemetry.start_request(NAME, {}, huge).end()
        telemetry.shutdown()
    assert [span.name for _, span in receiver.spans] == [NAME]
    assert attributes_of(receiver.spans[0][1]) == huge | {"seed": str((1 << 64) - 1), "max_tokens": str(10**30)}
    assert "spans lost" in caplog.text


def test_what_came_right_before_the_end_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    queue, sent = span_export.SpanQueue("coordinator", {}), list[object]()
    queue.close()
    monkeypatch.setattr(queue._exporter, "send", sent.append)
    queue.put(FinishedSpan(TraceContext("a" * 32, "b" * 16, True), "", NAME, 0, 1))
    queue._run()  # as a thread that looked at what waits before this came, and now sees that it must end
    assert len(sent) == 1


def test_off_passes_a_clients_context_on_and_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    assert not telemetry.configure("coordinator")
    headers = {"traceparent": PARENT, "tracestate": "one=1"}
    with telemetry.start_request(NAME, headers) as trace:
        round_ = trace.start_round()
        assert trace.traceparent == round_.traceparent == PARENT
        assert dict(telemetry.outgoing()) == headers
        round_.finish(RECORD, 0.0)
        round_.end()
    telemetry.record_step(PARENT, "verify", TARGET_TIMINGS)
    with telemetry.start_request(NAME, {"tracestate": "one=1"}) as trace:
        assert trace.start_round().traceparent == ""
        assert telemetry.outgoing() == ()


OFF = [(telemetry, "OTEL_TRACES_EXPORTER", "none"), (metrics, "OTEL_METRICS_EXPORTER", "none")]
NOT_SPOKEN = [
    (telemetry, "OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
    (telemetry, "OTEL_TRACES_SAMPLER", "jaeger_remote"),
    (telemetry, "OTEL_TRACES_SAMPLER_ARG", "1.5"),
    (telemetry, "OTEL_BSP_SCHEDULE_DELAY", "soon"),
    (metrics, "OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
]


@pytest.mark.parametrize(("exporting", "name", "value"), OFF + NOT_SPOKEN)
def test_what_we_do_not_speak_is_refused_and_standard_switches_turn_it_off(
    exporting: ModuleType, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv(name, value)
    if (exporting, name, value) in OFF:
        assert not exporting.configure("target")
    else:
        with pytest.raises(InvalidInput, match=name):
            exporting.configure("target")


def test_off_needs_no_library_of_theirs() -> None:
    program = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('opentelemetry', 'prometheus_client'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "from paceline.runtime import metrics, telemetry\n"
        "from paceline.client.tracing import start_call\n"
        "from paceline.client import GenerateRequest\n"
        "assert telemetry.configure('x') is False\n"
        "with telemetry.start_request('x', {}) as trace:\n"
        "    trace.start_round().end()\n"
        "with start_call(GenerateRequest(prompt='x')) as call:\n"
        "    assert call.metadata == ()\n"
        "assert metrics.configure('x') is False\n"
        "assert metrics.exposition()[0] == b''\n"
        "metrics.step_done(1.0, 1, 1)\n"
        "assert not {'opentelemetry', 'prometheus_client'} & sys.modules.keys()\n"
        "import os\n"
        "os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = 'http://127.0.0.1:1'\n"
        "for ask in (telemetry.configure, lambda name: metrics.configure(name, prometheus=True)):\n"
        "    try:\n"
        "        ask('x')\n"
        "    except telemetry.Unsupported as error:\n"
        "        print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.count("paceline[otel]") == 2
