"""OpenTelemetry traces: one trace per request, across client, gateway and the three services.

    chat MODEL                       the caller's process, where it has configured opentelemetry itself
    └─ chat MODEL                    gateway
       └─ text_completion MODEL      coordinator
          └─ round                   coordinator, one for each round
             ├─ draft, verify, accept   coordinator: the parts of the round's time
             ├─ draft                   draft service   └─ queue, forward, sample
             └─ verify                  target service  └─ queue, forward, sample

Off unless the standard `OTEL_*` variables name an exporter
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or
`OTEL_TRACES_EXPORTER=otlp`). While off, opentelemetry is not imported and a
client's trace context is passed on unchanged. On a round's critical path tracing
draws a span's id and leaves one object in a queue; spans are made of it in the
exporter's thread. Attributes use the vocabulary of the protocol, and
`paceline.runtime.genai` what the conventions for generative AI call it.

A trace that is not sampled may still be exported in part, because it is slow.
Until that is known, its latest `MOST_HELD` rounds are kept.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING

from paceline.protocol.errors import PacelineError, Unsupported
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.protocol.trace_context import TraceContext
from paceline.runtime import clock
from paceline.runtime.config import TraceSettings
from paceline.runtime.otel_environment import TRACES, sampler_from
from paceline.runtime.spans import (
    Attributes,
    AttributeValue,
    FinishedSpan,
    RoundSpans,
    SpanKind,
    StepSpans,
    below,
    new_id,
)

if TYPE_CHECKING:
    from paceline.runtime.span_export import SpanQueue

logger = logging.getLogger(__name__)

MOST_HELD = 1024
"""Most rounds that are kept of a request that may turn out to be slow; half a kilobyte each."""
NS_PER_S = 1e9

Headers = tuple[tuple[str, str], ...]
_outgoing: ContextVar[Headers] = ContextVar("outgoing", default=())


def outgoing() -> Headers:
    """The trace headers for calls that are made within a `RequestTrace`; empty outside of any."""
    return _outgoing.get()


class RoundTrace:
    """The span of one round; this base class records nothing."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent
        """W3C trace context to send with the round and with the commit; empty: none."""

    def finish(self, record: RoundRecord, end_s: float) -> None:
        """End the span with the record's facts; the round ended at `end_s` of `clock.now`."""

    def end(self, error: BaseException | None = None) -> None:
        """End the span of a round that has no record; does nothing if it has ended."""


class RequestTrace:
    """The span of one request, a context manager; this base class records nothing.

    Calls of `paceline.client` that are made within it carry its context on.
    """

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = context
        """The context of the request itself, or else of its cause; None: neither has one."""
        self.traceparent = context.traceparent if context else ""
        """The context as a W3C header; empty: there is none."""
        self._before: Headers = ()

    @property
    def headers(self) -> Headers:
        """The headers to send with the calls that the request causes elsewhere."""
        return self.context.headers if self.context else ()

    def start_round(self) -> RoundTrace:
        """Begin the span of the next round; the previous one may be finished later."""
        return RoundTrace(self.traceparent)

    def describe(self, attributes: Attributes) -> None:
        """Add to the span's attributes."""

    def end(self, error: BaseException | None = None) -> None:
        """End the span; does nothing if it has ended."""

    def __enter__(self) -> RequestTrace:
        self._before = _outgoing.get()
        _outgoing.set(self.headers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        # No token: a generator that streams a response may be closed in another context than it was begun in.
        _outgoing.set(self._before)
        self.end(error)


def configure(service_name: str, settings: TraceSettings | None = None) -> bool:
    """Switch tracing on if the `OTEL_*` variables ask for it; returns whether it is on.

    Args:
        service_name: `service.name` of the spans, unless `OTEL_SERVICE_NAME` is set.
        settings: which slow requests and rounds are traced though they are not sampled.

    Raises:
        Unsupported: tracing is asked for and the extra `otel` isn't installed.
        InvalidInput: an exporter, protocol or sampler that is not supported.
    """
    global _tracing
    settings = settings or TraceSettings()
    if not TRACES.is_exported(os.environ):
        if settings.slow:
            logger.warning("no traces: traces.slow_* is set, and no OTEL_* variable says where they go")
        return False
    shutdown()
    try:
        _tracing = _Tracing(service_name, settings)
    except ImportError as error:
        raise Unsupported("traces need opentelemetry: pip install 'paceline[otel]'") from error
    return True


def start_request(name: str, headers: Mapping[str, str], attributes: Attributes | None = None) -> RequestTrace:
    """Begin the server's span of a request.

    Args:
        name: the span's name.
        headers: the request's, by names in lower case; `traceparent` and `tracestate` are read.
        attributes: the span's first attributes.
    """
    cause = TraceContext.of(headers.get("traceparent", ""), headers.get("tracestate", ""))
    if _tracing is None:
        return RequestTrace(cause)
    trace_id = cause.trace_id if cause else new_id(16)
    is_sampled = _tracing.sampler.samples(trace_id, cause.is_sampled if cause else None)
    context = TraceContext(trace_id, new_id(8), is_sampled, cause.state if cause else "")
    if not (is_sampled or _tracing.settings.slow):
        return RequestTrace(context)
    return _LiveRequest(_tracing, name, context, cause.span_id if cause else "", attributes or {})


def record_step(traceparent: str, name: str, timings: StepTimings) -> None:
    """Record a service's part of a round ("verify" or "draft") that has just ended.

    The span has the children queue, forward and sample, one after the other.
    Without a parent nothing is recorded.
    """
    parent = TraceContext.of(traceparent) if _tracing is not None and traceparent else None
    if _tracing is None or parent is None:
        return
    slowest = _tracing.settings.slow_round_ms
    slow = slowest is not None and timings.service_ms > slowest
    if slow or _tracing.sampler.samples(parent.trace_id, parent.is_sampled):
        _tracing.queue.put(StepSpans(parent, name, timings, time.time_ns()))


def shutdown() -> None:
    """Export what is pending and switch tracing off. Blocks until the exporter has finished."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.queue.close()


def error_text(error: BaseException | None) -> str:
    """An error as a span has it, without any text of a request; empty: there is no error."""
    if error is None:
        return ""
    detail = f": {error.for_log}" if isinstance(error, PacelineError) else ""
    return f"{type(error).__name__}{detail}"


class _Tracing:
    """The sampler and the queue of the exporter; the SDK is imported on construction."""

    def __init__(self, service_name: str, settings: TraceSettings) -> None:
        self.sampler = sampler_from(os.environ)
        TRACES.check_protocol(os.environ)
        from paceline.runtime.span_export import SpanQueue

        self.settings = settings
        self.queue: SpanQueue = SpanQueue(service_name, os.environ)


class _LiveRequest(RequestTrace):
    """A request that is sampled, or that is traced where it is slow."""

    def __init__(
        self, tracing: _Tracing, name: str, context: TraceContext, parent_id: str, attributes: Attributes
    ) -> None:
        super().__init__(context)
        self.tracing = tracing
        self.own = context
        self.is_exported = context.is_sampled
        """Whether anything of the request is exported, so that its own span must be."""
        self._name = name
        self._parent_id = parent_id
        self._attributes: dict[str, AttributeValue] = dict(attributes)
        self._clock_began_ns = time.time_ns() - round(clock.now() * NS_PER_S)
        self._start_ns = time.time_ns()
        self._rounds: deque[_LiveRound] = deque(maxlen=2)
        self._rounds_on_hold: deque[RoundSpans] = deque(maxlen=MOST_HELD)
        self._ended = False

    def start_round(self) -> RoundTrace:
        self._rounds.append(_LiveRound(self, below(self.own)))
        return self._rounds[-1]

    def describe(self, attributes: Attributes) -> None:
        self._attributes |= attributes

    def round_done(self, context: TraceContext, record: RoundRecord, end_s: float) -> None:
        """Export a decided round, or hold it until it is known whether the request is slow."""
        done = RoundSpans(context, self.own.span_id, record, self._clock_began_ns + round(end_s * NS_PER_S))
        settings = self.tracing.settings
        if self.own.is_sampled:
            self.tracing.queue.put(done)
        elif settings.slow_round_ms is not None and record.round_ms > settings.slow_round_ms:
            self.is_exported = True
            self.tracing.queue.put(done)
        elif settings.slow_request_ms is not None:
            self._rounds_on_hold.append(done)

    def end(self, error: BaseException | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        end_ns = time.time_ns()
        slowest = self.tracing.settings.slow_request_ms
        if not self.own.is_sampled and slowest is not None and end_ns - self._start_ns > slowest * 1e6:
            self.is_exported = True
            for spans in self._rounds_on_hold:
                self.tracing.queue.put(spans)
        for round_ in self._rounds:
            round_.end(error)
        if self.is_exported:
            self.tracing.queue.put(self._span(end_ns, error))

    def _span(self, end_ns: int, error: BaseException | None) -> FinishedSpan:
        slow: Attributes = {} if self.own.is_sampled else {"paceline.slow": True}
        failure: Attributes = {} if error is None else {"error.type": type(error).__name__}
        return FinishedSpan(
            self.own,
            self._parent_id,
            self._name,
            self._start_ns,
            end_ns,
            SpanKind.SERVER,
            {**self._attributes, **slow, **failure},
            error_text(error),
        )


class _LiveRound(RoundTrace):
    def __init__(self, request: _LiveRequest, context: TraceContext) -> None:
        super().__init__(context.traceparent)
        self._request = request
        self._context = context
        self._start_ns = time.time_ns()
        self._ended = False

    def finish(self, record: RoundRecord, end_s: float) -> None:
        self._ended = True
        self._request.round_done(self._context, record, end_s)

    def end(self, error: BaseException | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if self._request.is_exported:
            parent = self._request.own.span_id
            span = FinishedSpan(
                self._context, parent, "round", self._start_ns, time.time_ns(), error=error_text(error)
            )
            self._request.tracing.queue.put(span)


_tracing: _Tracing | None = None
