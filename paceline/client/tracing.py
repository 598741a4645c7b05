"""The client's own span of a request, and the trace context that it sends.

A program that has imported opentelemetry gets a span for each request, below the current span, by the tracer and the
propagators of its configuration; without a configuration these do nothing. Within a `RequestTrace` of
`paceline.runtime.telemetry`, as in the gateway, its context is sent on instead.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from paceline.protocol.generation import Finished, GenerateEvent, GenerateRequest, Started, Tokens
from paceline.runtime import genai
from paceline.runtime.telemetry import Headers, error_text, outgoing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

INSTRUMENTATION = "paceline.client"


class CallTrace:
    """The trace metadata of a request; this base class records nothing."""

    def __init__(self, metadata: Headers = ()) -> None:
        self.metadata = metadata

    def note(self, event: GenerateEvent) -> None:
        """Note an event of the stream."""

    def end(self, error: BaseException | None = None) -> None:
        """End the span; does nothing if it has ended."""

    def __enter__(self) -> CallTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        # A reader that closes the stream needs no more of it: that is no error.
        self.end(None if isinstance(error, GeneratorExit) else error)


def start_call(request: GenerateRequest) -> CallTrace:
    """Begin the span of a request, if the calling program traces."""
    headers = outgoing()
    if headers or "opentelemetry.trace" not in sys.modules:
        return CallTrace(headers)
    return _SpannedCall(request)


class _SpannedCall(CallTrace):
    """One span over all streams of a request, with resumed ones."""

    def __init__(self, request: GenerateRequest) -> None:
        from opentelemetry import propagate, trace

        self._began = time.perf_counter()
        self._span: Span = trace.get_tracer(INSTRUMENTATION).start_span(
            genai.span_name(genai.operation_of(request), request.model),
            kind=trace.SpanKind.CLIENT,
            attributes=genai.request_attributes(request, request.model),
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        super().__init__(tuple((name.lower(), value) for name, value in carrier.items()))
        self._model = request.model
        self._prompt_tokens = 0
        self._first_chunk_s: float | None = None

    def note(self, event: GenerateEvent) -> None:
        if isinstance(event, Started):
            self._model, self._prompt_tokens = event.model, len(event.prompt_token_ids)
        elif isinstance(event, Tokens):
            if self._first_chunk_s is None:
                self._first_chunk_s = time.perf_counter() - self._began
        elif isinstance(event, Finished):
            attributes = dict(genai.response_attributes(event, self._model, self._prompt_tokens))
            attributes[genai.TIME_TO_FIRST_CHUNK] = self._first_chunk_s or 0.0
            self._span.set_attributes(attributes)

    def end(self, error: BaseException | None = None) -> None:
        if not self._span.is_recording():
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, error_text(error)))
        self._span.end()
