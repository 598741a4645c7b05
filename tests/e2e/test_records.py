"""Round records add up, and their spans form one trace."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.records import GenerationStats
from tests.e2e.cluster import Cluster, eventually

TIMED = "table:vocab=64,seed=1,step_ms=12"
NEAR = "table:vocab=64,seed=1,noise=0.2,step_ms=2"
TOLERANCE = 0.05


def assert_parts_add_up(stats: GenerationStats) -> None:
    whole = sum(record.round_ms for record in stats.records)
    parts = sum(
        record.draft_wait_ms + record.wire_ms + record.target.service_ms + record.accept_ms
        for record in stats.records
    )
    assert parts == pytest.approx(whole, rel=TOLERANCE)
    for record in stats.records:
        target = record.target
        inner = target.queue_ms + target.forward_ms + target.sample_ms
        assert inner <= target.service_ms * (1 + TOLERANCE)
    service = sum(record.target.service_ms for record in stats.records)
    inside = sum(r.target.queue_ms + r.target.forward_ms + r.target.sample_ms for r in stats.records)
    assert inside == pytest.approx(service, rel=TOLERANCE)


def test_parts_add_up_on_timed_models(tmp_path: Path) -> None:
    with (
        Cluster(
            tmp_path, target_model=TIMED, drafters=(f"model:{NEAR}",), coordinator_flags={"fan_out": 0}
        ) as cluster,
        cluster.client() as client,
    ):
        speculation = SpeculationSettings(num_draft_tokens=3)
        generation = client.generate(
            GenerateRequest(token_ids=(1, 2, 3), seed=4, max_new_tokens=60, speculation=speculation)
        )
    stats = generation.stats
    assert_parts_add_up(stats)
    assert len(stats.records) == stats.rounds
    assert all(record.target.forward_ms >= 12 for record in stats.records)
    assert all(record.draft_wait_ms >= 2 for record in stats.records if record.proposed)
    assert sum(record.accepted for record in stats.records) == stats.num_accepted_draft_tokens
    assert stats.num_spec_steps == sum(stats.acceptance_histogram)


class Receiver(otlp_grpc.TraceServiceServicer):
    """Keeps the spans that exporters send."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def Export(self, request: otlp.ExportTraceServiceRequest, context: object) -> otlp.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            for scope in resource.scope_spans:
                self.spans += [(names[0], span) for span in scope.spans]
        return otlp.ExportTraceServiceResponse()


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, str]]:
    servicer = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


def test_one_trace_has_the_three_services(tmp_path: Path, receiver: tuple[Receiver, str]) -> None:
    servicer, endpoint = receiver
    environment = {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with Cluster(tmp_path, environment=environment) as cluster:
        with cluster.client() as client:
            generation = client.generate(
                GenerateRequest(
                    token_ids=(1, 2, 3),
                    seed=4,
                    max_new_tokens=12,
                    speculation=SpeculationSettings(drafter="model", num_draft_tokens=3),
                )
            )
        eventually(lambda: len({name for name, _ in servicer.spans}) == 3, "spans of three services arrive")
        eventually(lambda: any(s.name == "generate" for _, s in servicer.spans), "the root span arrives")
        eventually(
            lambda: sum(s.name == "round" for _, s in servicer.spans) == generation.stats.rounds, "every round"
        )
    spans = [span for _, span in servicer.spans]
    assert len({span.trace_id for span in spans}) == 1, "one trace"
    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.name == "generate"]
    assert root.parent_span_id == b""
    for span in spans:
        top = span
        while top.parent_span_id:
            top = by_id[top.parent_span_id]
        assert top is root, f"{span.name} hangs from another root"
    assert {"generate", "round", "draft", "verify", "accept"} <= {span.name for span in spans}
