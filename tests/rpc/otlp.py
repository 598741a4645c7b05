"""A receiver of traces, as OTLP over gRPC defines it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc


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

    def named(self, service: str, name: str) -> list[Any]:
        with self._lock:
            return [span for owner, span in self.spans if (owner, span.name) == (service, name)]

    def one(self, service: str, name: str) -> Any:
        (found,) = self.named(service, name)
        return found


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


def attributes_of(span: Any) -> dict[str, Any]:
    """By name; a list's values are strings."""
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = tuple(one.string_value for one in value.values) if kind == "array_value" else value
    return found


def length_ms(span: Any) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
