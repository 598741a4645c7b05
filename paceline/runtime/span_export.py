"""Spans on their way to an OTLP receiver: a bounded queue, and a thread that turns it into messages.

The thread encodes spans itself: the SDK's own spans cost 12 µs to start and end and 22 to encode, under the
interpreter's lock, where these take 5. The SDK's exporter sends them, with everything that the `OTEL_EXPORTER_OTLP_*`
variables say. Imports opentelemetry.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

from paceline.protocol.errors import InvalidInput
from paceline.runtime.otel_environment import resource_of
from paceline.runtime.spans import AttributeValue, FinishedSpan, SpanKind, ToExport

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

INSTRUMENTATION = "paceline"
CHUNK = 8
"""Rounds or steps encoded between two pauses: 5 spans of 5 µs each are .2 ms in which no event loop runs."""
MAX_QUEUE_SIZE = 8192
"""Most rounds and steps that wait, each below a kilobyte: as many as one process can decide in two seconds."""
LAST_SECONDS = 5.0
"""Longest wait for a receiver that does not answer while the process ends."""
_REMOTENESS_IS_KNOWN, _PARENT_IS_REMOTE = 0x100, 0x200
_INTS = 1 << 63
_KIND_OF_VALUE = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}


class SpanQueue:
    """Takes finished spans, rounds and steps, and exports them from a thread of its own.

    Those that find no room are dropped and counted.
    """

    def __init__(self, service_name: str, environment: Mapping[str, str]) -> None:
        self._delay_s = _whole(environment, "OTEL_BSP_SCHEDULE_DELAY", 5_000) / 1e3
        self._most = _whole(environment, "OTEL_BSP_MAX_QUEUE_SIZE", MAX_QUEUE_SIZE)
        self._batch = _whole(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)
        self._resource = _key_values(resource_of(service_name, environment).attributes)
        self._exporter = _EncodedExporter()
        self._waiting: deque[ToExport] = deque()
        self._drop_count = 0
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def put(self, entry: ToExport) -> None:
        """Queue an entry for export; never waits."""
        if len(self._waiting) >= self._most:
            self._drop_count += 1
            return
        self._waiting.append(entry)
        if len(self._waiting) == self._batch:
            self._wake.set()

    def close(self) -> None:
        """Export what waits, and end."""
        self._closing = True
        self._wake.set()
        self._thread.join(LAST_SECONDS)
        self._waiting.clear()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            self._drain()
        self._drain()  # what came between the last look and `close`

    def _drain(self) -> None:
        while self._waiting:
            self._exporter.send(self._next_request())
        if self._drop_count:
            logger.warning("spans dropped: rounds and steps=%d, the receiver is too slow", self._drop_count)
            self._drop_count = 0

    def _next_request(self) -> ExportTraceServiceRequest:
        of_process = ResourceSpans()
        of_process.resource.attributes.extend(self._resource)
        scope = of_process.scope_spans.add()
        scope.scope.name = INSTRUMENTATION
        for _ in range(0, self._batch, CHUNK):
            for entry in self._take(CHUNK):
                scope.spans.extend(_messages(entry))
            time.sleep(0)  # others may have the interpreter's lock
        return ExportTraceServiceRequest(resource_spans=[of_process])

    def _take(self, most: int) -> Iterator[ToExport]:
        with suppress(IndexError):  # nothing is left, or `close` has given up
            for _ in range(most):
                yield self._waiting.popleft()


class _EncodedExporter(OTLPSpanExporter):
    """Sends requests that are encoded already."""

    def send(self, request: ExportTraceServiceRequest) -> None:
        """Send one; failures are logged by the SDK."""
        self.export(cast("Sequence[ReadableSpan]", request))

    def _translate_data(self, data: Any) -> ExportTraceServiceRequest:
        return cast(ExportTraceServiceRequest, data)

    def _count_data(self, data: Any) -> int:
        return sum(len(scope.spans) for each in data.resource_spans for scope in each.scope_spans)


def _messages(entry: ToExport) -> list[Span]:
    """The messages of an entry's spans; none if it can't be encoded, as the thread must go on with the others."""
    try:
        return [encode(span) for span in entry.spans()]
    except Exception:
        logger.exception("spans lost: what has finished can't be encoded: kind=%s", type(entry).__name__)
        return []


def encode(span: FinishedSpan) -> Span:
    """The message that OTLP has for a span."""
    context = span.context
    remote = span.kind is SpanKind.SERVER and span.parent_id != ""
    message = Span(
        trace_id=bytes.fromhex(context.trace_id),
        span_id=bytes.fromhex(context.span_id),
        trace_state=context.state,
        parent_span_id=bytes.fromhex(span.parent_id),
        flags=_REMOTENESS_IS_KNOWN | (_PARENT_IS_REMOTE if remote else 0) | context.is_sampled,
        name=span.name,
        kind=cast(Any, int(span.kind)),
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
    )
    message.attributes.extend(_key_values(span.attributes))
    if span.error:
        message.status.code = Status.STATUS_CODE_ERROR
        message.status.message = span.error
    return message


def _key_values(attributes: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_any_value(value)) for key, value in attributes.items()]


def _any_value(value: AttributeValue) -> AnyValue:
    if isinstance(value, tuple):
        return AnyValue(array_value=ArrayValue(values=[_any_value(each) for each in value]))
    if isinstance(value, int) and not -_INTS <= value < _INTS:
        return AnyValue(string_value=str(value))  # as OpenTelemetry's specification has it
    fields: dict[str, Any] = {_KIND_OF_VALUE[type(value)]: value}
    return AnyValue(**fields)


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise InvalidInput.of(name, text, "a whole number, at least 1")
    return int(text)
