"""OpenTelemetry traces: one trace per request, across the three services.

    generate                      coordinator
    └─ round                      coordinator, one for each round
       ├─ draft, verify, accept   coordinator: the parts of the round's time
       ├─ draft                   draft service   └─ queue, forward, sample
       └─ verify                  target service  └─ queue, forward, sample

Off unless the standard `OTEL_*` variables name an exporter
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or
`OTEL_TRACES_EXPORTER=otlp`). While off, opentelemetry is not imported and a
client's trace context is passed on unchanged. Child spans are built from round
records and step timings after the round, so tracing adds only the round's own
span to it. Attributes use the vocabulary of the protocol.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from paceline.protocol.errors import InvalidInput, PacelineError, Unsupported
from paceline.protocol.records import RoundRecord, StepTimings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, SpanKind, Tracer

NS_PER_MS = 1_000_000
INSTRUMENTATION = "paceline"
ROUND_FACTS = ("base_length", "proposed", "accepted", "cache_hit", "cache_miss", "drafter", "self_started", "wire_ms")
"""Fields of a round's record that its span has, each as `paceline.` and its name."""

Attributes = Mapping[str, str | bool | int | float]


class RoundTrace:
    """The span of one round; this base class records nothing."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent
        """W3C trace context to send with the round and with the commit; empty: none."""

    def finish(self, record: RoundRecord, start_ns: int) -> None:
        """End the span with what the record says; `start_ns` is the round's start on the wall clock."""

    def end(self, error: BaseException | None = None) -> None:
        """End the span of a round that has no record; does nothing if it has ended."""


class GenerationTrace:
    """The span of one generation, a context manager; this base class records nothing."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent
        """W3C trace context of the generation itself; empty: none."""

    def start_round(self) -> RoundTrace:
        """Begin the span of the next round; the previous one may be finished later."""
        return RoundTrace(self.traceparent)

    def end(self, error: BaseException | None = None) -> None:
        """End the span; does nothing if it has ended."""

    def __enter__(self) -> GenerationTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.end(error)


def configure(service_name: str) -> bool:
    """Switch tracing on if the `OTEL_*` variables ask for it; returns whether it is on.

    Args:
        service_name: `service.name` of the spans, unless `OTEL_SERVICE_NAME` is set.

    Raises:
        Unsupported: tracing is asked for and the extra `otel` isn't installed.
        InvalidInput: an exporter or protocol that is not supported.
    """
    global _tracing
    if not _wanted(os.environ):
        return False
    shutdown()
    try:
        _tracing = _Tracing(service_name)
    except ImportError as error:
        raise Unsupported("traces need opentelemetry: pip install 'paceline[otel]'") from error
    return True


def start_generation(traceparent: str = "") -> GenerationTrace:
    """Begin the span of a generation, a child of the client's span if it sent one."""
    if _tracing is None:
        return GenerationTrace(traceparent)
    return _LiveGeneration(_tracing, traceparent)


def record_step(traceparent: str, name: str, timings: StepTimings) -> None:
    """Record a service's part of a round ("verify" or "draft") that has just ended.

    The span has the children queue, forward and sample, one after the other.
    Without a parent nothing is recorded.
    """
    if _tracing is not None and traceparent:
        _tracing.record_step(traceparent, name, timings)


def shutdown() -> None:
    """Export what is pending and switch tracing off. Blocks until the exporter has finished."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.provider.shutdown()


class _Tracing:
    """The SDK, imported on construction."""

    def __init__(self, service_name: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: service_name}
        self.provider: TracerProvider = TracerProvider(resource=Resource.create(named))
        self.provider.add_span_processor(BatchSpanProcessor(_otlp_exporter()))
        self.tracer: Tracer = self.provider.get_tracer(INSTRUMENTATION)

    def record_step(self, traceparent: str, name: str, timings: StepTimings) -> None:
        from opentelemetry.trace import SpanKind

        end_ns = time.time_ns()
        start_ns = end_ns - _ns(timings.service_ms)
        attributes: Attributes = {"paceline.rows": timings.rows, "paceline.sessions": timings.sessions}
        step = self.start(name, _context_of(traceparent), start_ns, attributes, SpanKind.SERVER)
        parts = (("queue", timings.queue_ms), ("forward", timings.forward_ms), ("sample", timings.sample_ms))
        self.children(step, start_ns, parts)
        step.end(end_ns)

    def start(
        self,
        name: str,
        parent: Context | None,
        start_ns: int | None = None,
        attributes: Attributes | None = None,
        kind: SpanKind | None = None,
    ) -> Span:
        """Start a span; the caller ends it."""
        from opentelemetry.trace import SpanKind

        return self.tracer.start_span(
            name, parent, kind or SpanKind.INTERNAL, attributes=attributes, start_time=start_ns
        )

    def children(self, parent: Span, start_ns: int, parts: tuple[tuple[str, float], ...]) -> None:
        """Record spans of the given lengths (name, milliseconds), one after the other."""
        context = _inside(parent)
        for name, length_ms in parts:
            end_ns = start_ns + _ns(length_ms)
            self.start(name, context, start_ns).end(end_ns)
            start_ns = end_ns


class _LiveGeneration(GenerationTrace):
    def __init__(self, tracing: _Tracing, traceparent: str) -> None:
        from opentelemetry.trace import SpanKind

        self._tracing = tracing
        parent = _context_of(traceparent) if traceparent else _root()
        self._span = tracing.start("generate", parent, kind=SpanKind.SERVER)
        self._context = _inside(self._span)
        self._rounds: deque[_LiveRound] = deque(maxlen=2)
        super().__init__(_traceparent_of(self._span))

    def start_round(self) -> RoundTrace:
        self._rounds.append(_LiveRound(self._tracing, self._tracing.start("round", self._context)))
        return self._rounds[-1]

    def end(self, error: BaseException | None = None) -> None:
        for round_ in self._rounds:
            round_.end(error)
        _end(self._span, error)


class _LiveRound(RoundTrace):
    def __init__(self, tracing: _Tracing, span: Span) -> None:
        super().__init__(_traceparent_of(span))
        self._tracing = tracing
        self._span = span

    def finish(self, record: RoundRecord, start_ns: int) -> None:
        self._span.set_attributes({f"paceline.{name}": getattr(record, name) for name in ROUND_FACTS})
        verify_ms = record.wire_ms + record.target.service_ms
        parts = (("draft", record.draft_wait_ms), ("verify", verify_ms), ("accept", record.accept_ms))
        self._tracing.children(self._span, start_ns, parts)
        self._span.end(start_ns + _ns(record.round_ms))

    def end(self, error: BaseException | None = None) -> None:
        _end(self._span, error)


_tracing: _Tracing | None = None


def _wanted(environment: Mapping[str, str]) -> bool:
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    if exporter not in ("", "otlp"):
        raise InvalidInput.of("OTEL_TRACES_EXPORTER", exporter, "otlp or none")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return exporter == "otlp" or any(environment.get(name) for name in endpoints)


def _otlp_exporter() -> SpanExporter:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(name, "grpc")
        if protocol != "grpc":
            raise InvalidInput.of(name, protocol, "grpc")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _root() -> Context:
    """No parent, whatever span is current in the caller's thread."""
    from opentelemetry.context import Context

    return Context()


def _context_of(traceparent: str) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, _root())


def _inside(span: Span) -> Context:
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span, _root())


def _traceparent_of(span: Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _end(span: Span, error: BaseException | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    if not span.is_recording():
        return
    if error is not None:
        said = f": {error.for_log}" if isinstance(error, PacelineError) else ""
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}{said}"))
    span.end()


def _ns(milliseconds: float) -> int:
    return max(0, round(milliseconds * NS_PER_MS))
