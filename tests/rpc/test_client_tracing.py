"""The client's span: below the caller's, sent on, and ended however the stream ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.client import Client
from paceline.protocol import codec
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import Finished, FinishReason, GenerateEvent, Provenance, Started, Tokens
from paceline.protocol.records import GenerationStats
from paceline.runtime import telemetry

EVENTS: tuple[GenerateEvent, ...] = (
    Started(7, (1, 2, 3), "tiny"),
    Tokens((5,), "a", (Provenance.TARGET,), (), (1,)),
    Finished(FinishReason.STOP, "", GenerationStats(rounds=1, committed=1)),
)


class StubOfEvents:
    """What a channel gives, without one: notes the metadata and answers with events."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, str]] = []

    def Generate(self, message: Any, timeout: float | None, metadata: Any) -> Any:
        self.metadata.append(dict(metadata))
        return CallOfEvents()


class CallOfEvents:
    def __iter__(self) -> Iterator[Any]:
        return iter([codec.encode_generate_event(event) for event in EVENTS])

    def cancel(self) -> None:
        return


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def client() -> Iterator[Client]:
    with Client("127.0.0.1:1") as client:
        client._stub = StubOfEvents()
        yield client


def test_the_span_is_sent_on(exporter: InMemorySpanExporter, client: Client) -> None:
    client.generate(prompt="x", model="tiny", seed=7)
    (span,) = exporter.get_finished_spans()
    context = span.get_span_context()
    assert context is not None
    sent = f"00-{context.trace_id:032x}-{context.span_id:016x}-"
    assert client._stub.metadata[0]["traceparent"].startswith(sent)
    assert span.name == "text_completion tiny"
    assert span.kind is trace.SpanKind.CLIENT
    assert span.attributes is not None
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.attributes["gen_ai.usage.input_tokens"] == 3


def test_a_reader_that_stops_has_made_no_error(exporter: InMemorySpanExporter, client: Client) -> None:
    events = client.stream(prompt="x")
    next(events)
    assert exporter.get_finished_spans() == ()
    events.close()  # type: ignore[attr-defined]
    (span,) = exporter.get_finished_spans()
    assert span.status.is_ok


def test_a_refusal_is_said_without_what_was_refused(
    exporter: InMemorySpanExporter, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise InvalidInput.of("prompt", "secret words", "shorter")

    monkeypatch.setattr(client._stub, "Generate", refuse)
    with pytest.raises(InvalidInput):
        client.generate(prompt="x")
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "InvalidInput"
    assert not span.status.is_ok
    assert "prompt was refused" in str(span.status.description)
    assert "secret" not in str(span.status.description)


def test_within_a_servers_request_its_context_is_sent_and_there_is_no_other_span(
    exporter: InMemorySpanExporter, client: Client
) -> None:
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "one=1"}

    def stream() -> Iterator[GenerateEvent]:
        with telemetry.start_request("chat tiny", headers):
            yield from client.stream(prompt="x")

    assert len(list(stream())) == 3
    assert client._stub.metadata == [headers]
    assert exporter.get_finished_spans() == ()
    client.generate(prompt="x")
    assert client._stub.metadata[1] != headers, "the request is over"
