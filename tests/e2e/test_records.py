"""Round records add up, their spans form one trace, and those of reasoning are told apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Tracer

from paceline.client import Generation
from paceline.local.service_process import Flags
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.records import GenerationStats
from tests.e2e.cluster import Cluster, cluster_fixture, eventually, free_port
from tests.metrics.scrape import Exposition
from tests.rpc.otlp import Receiver, attributes_of, length_ms, otlp_receiver

TIMED = "table:vocab=64,seed=1,step_ms=12"
NEAR = "table:vocab=64,seed=1,noise=0.2,step_ms=2"
TOLERANCE = 0.05


def assert_parts_add_up(stats: GenerationStats) -> None:
    """Of a self-started round they exceed it by how late the verdict before it was: on a busy machine, at will."""
    sent = [record for record in stats.records if not record.self_started]
    whole = sum(record.round_ms for record in sent)
    parts = sum(
        record.draft_wait_ms + record.wire_ms + record.target.service_ms + record.accept_ms for record in sent
    )
    assert sent
    assert parts == pytest.approx(whole, rel=TOLERANCE)
    for record in stats.records:
        target = record.target
        inner = target.queue_ms + target.forward_ms + target.sample_ms
        assert inner <= target.service_ms * (1 + TOLERANCE)
    service = sum(record.target.service_ms for record in stats.records)
    inside = sum(r.target.queue_ms + r.target.forward_ms + r.target.sample_ms for r in stats.records)
    assert inside == pytest.approx(service, rel=TOLERANCE)


def check_timed(stats: GenerationStats) -> None:
    """The records of a text of the timed models, each of whose rounds was sent and waited for its draft."""
    assert_parts_add_up(stats)
    assert len(stats.records) == stats.rounds
    assert all(record.target.forward_ms >= 12 for record in stats.records)
    assert all(record.draft_wait_ms >= 2 for record in stats.records if record.proposed)
    assert sum(record.accepted for record in stats.records) == stats.num_accepted_draft_tokens
    assert stats.num_spec_steps == sum(stats.acceptance_histogram)
    assert stats.reasoning is stats.answer is None, "the model has no marks of reasoning"


@contextmanager
def calling_program(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> Iterator[Tracer]:
    """This process as one that has configured opentelemetry for itself."""
    provider = TracerProvider(resource=Resource.create({"service.name": "caller"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield provider.get_tracer("program")
    provider.shutdown()


def traced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Generation, Receiver]:
    """One request of a traced program. Every round is sent, so each has one part of the target."""
    flags: Flags = {"fan_out": 0, "lease": 0, "max_prefetched": 0}
    with otlp_receiver() as (receiver, endpoint):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        cluster = Cluster(folder, TIMED, (f"model:{NEAR}",), coordinator_flags=flags, environment=environment)
        request = GenerateRequest(
            token_ids=(1, 2, 3),
            seed=4,
            max_new_tokens=24,
            speculation=SpeculationSettings(drafter="model", num_draft_tokens=3),
        )
        with cluster, calling_program(monkeypatch, endpoint) as tracer, cluster.client() as client:
            with tracer.start_as_current_span("work"):
                generation = client.generate(request)
            eventually(lambda: receiver.named("paceline-coordinator", f"text_completion {TIMED}") != [], "its root")
            eventually(
                lambda: len(receiver.named("paceline-target", "verify")) == generation.stats.rounds, "every round"
            )
            eventually(lambda: receiver.named("paceline-draft", "draft") != [], "the draft's part")
    return generation, receiver


def test_one_trace_goes_through_all_processes_and_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generation, receiver = traced(tmp_path, monkeypatch)
    check_timed(generation.stats)
    spans = [span for _, span in receiver.spans]
    assert len({span.trace_id for span in spans}) == 1, "one trace"
    operation, served = "text_completion", f"text_completion {TIMED}"
    above = ("caller/work", f"caller/{operation}", f"paceline-coordinator/{served}", "paceline-coordinator/round")
    assert {*above} <= {path[-1] for path in receiver.tree()}
    assert (*above, "paceline-target/verify", "paceline-target/forward") in receiver.tree()
    assert (*above, "paceline-draft/draft", "paceline-draft/forward") in receiver.tree()
    assert [span.name for span in spans if not span.parent_span_id] == ["work"]
    rounds = receiver.named("paceline-coordinator", "round")
    assert len(rounds) == generation.stats.rounds
    # The machine may stop a process between two parts of a round; it does not in most rounds.
    for ratios in zip(*(parts_over_whole(receiver, round_) for round_ in rounds), strict=True):
        assert median(ratios) == pytest.approx(1, rel=TOLERANCE), ratios
    for kind, span in ((3, receiver.one("caller", operation)), (2, receiver.one("paceline-coordinator", served))):
        check_genai(span, generation)
        assert span.kind == kind


def parts_over_whole(receiver: Receiver, round_: Any) -> tuple[float, float]:
    """What the coordinator measured of a round is what the target measured of it by its own clock, and the way."""
    below = [(owner, span) for owner, span in receiver.spans if span.parent_span_id == round_.span_id]
    parts = {(owner, span.name): span for owner, span in below}
    verify, served = parts["paceline-coordinator", "verify"], parts["paceline-target", "verify"]
    ours = sum(
        length_ms(span) for name, span in parts.items() if name[0] == "paceline-coordinator" and span is not verify
    )
    theirs = length_ms(served) + attributes_of(verify)["paceline.wire_ms"]
    inside = sum(length_ms(span) for _, span in receiver.spans if span.parent_span_id == served.span_id)
    return (ours + theirs) / length_ms(round_), inside / length_ms(served)


def check_genai(span: Any, generation: Generation) -> None:
    attributes = attributes_of(span)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.seed": 4,
        "gen_ai.response.model": TIMED,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 24,
        "paceline.rounds": generation.stats.rounds,
    }
    assert expected.items() <= attributes.items()
    assert 0.012 <= attributes["gen_ai.response.time_to_first_chunk"] < length_ms(span) / 1e3


def test_a_text_is_whole_and_leaves_nothing_where_its_record_cannot_be_written(tmp_path: Path) -> None:
    """As on a full disk."""
    folder = tmp_path / "removed"
    folder.mkdir()
    flags: dict[str, object] = {"record_to": str(folder)}
    with (
        Cluster(tmp_path / "logs", drafters=(), coordinator_flags=flags) as cluster,
        cluster.client(timeout_s=20, resume_wait_s=0) as client,
    ):
        folder.rmdir()
        generation = client.generate(GenerateRequest(token_ids=(1, 2, 3), seed=4, max_new_tokens=8))
        assert len(generation.token_ids) == 8
        cluster.wait_idle()
        assert "the record of a request was not written" in cluster.processes["coordinator"].log_file.read_text()


OPENING, CLOSING = 0, 1
THINKING = "table:vocab=16,seed=1,sharpness=1,think=1"
THINKING_NEAR = "table:vocab=16,seed=1,sharpness=1,think=1,noise=0.3"
MODEL = SpeculationSettings(drafter="model", num_draft_tokens=3)
PORT = free_port()
thinking = cluster_fixture(THINKING, THINKING_NEAR, coordinator_flags={"server.metrics_port": PORT})


def generated(cluster: Cluster, prompt: tuple[int, ...], tokens: int = 120) -> Generation:
    with cluster.client() as client:
        return client.generate(token_ids=prompt, seed=4, max_new_tokens=tokens, speculation=MODEL)


def inside(prompt: tuple[int, ...], generation: Generation) -> list[bool]:
    """Whether a span is open in front of each generated token: by the last marker before it."""
    text = (*prompt, *generation.token_ids)
    starts = range(len(prompt), len(text))
    return [next((token == OPENING for token in reversed(text[:at]) if token <= CLOSING), False) for at in starts]


def reasoning_counts() -> list[float]:
    exposition, name = Exposition.at(PORT), "paceline_reasoning"
    accepted = exposition.value(f"{name}_tokens_total", kind="accepted")
    return [exposition.value(f"{name}_round_duration_seconds_count"), accepted]


def test_rounds_belong_to_where_they_begin(thinking: Cluster) -> None:
    rounds = accepted = 0
    for prompt in ((5, 6, 7), (5, OPENING, 7)):
        generation = generated(thinking, prompt)
        stats = generation.stats
        where = inside(prompt, generation)
        assert {True, False} == set(where), "the text has both"
        assert where[0] == (OPENING in prompt)
        for record in stats.records:
            assert record.reasoning == where[record.base_length + 1 - len(prompt)]
        assert stats.reasoning is not None
        mine = [record for record in stats.records if record.reasoning]
        assert stats.reasoning.rounds == len(mine)
        assert stats.reasoning.num_accepted_draft_tokens == sum(record.accepted for record in mine)
        assert stats.reasoning.num_draft_tokens == sum(record.proposed for record in mine)
        check_sums(stats)
        rounds, accepted = rounds + len(mine), accepted + stats.reasoning.num_accepted_draft_tokens
    eventually(lambda: reasoning_counts() == [rounds, accepted], f"{rounds} rounds of reasoning are counted")


def check_sums(stats: GenerationStats) -> None:
    """The parts make up the whole; its rate lies between theirs."""
    assert stats.reasoning is not None
    assert stats.answer is not None
    for name in ("rounds", "committed", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        parts = getattr(stats.reasoning, name) + getattr(stats.answer, name)
        assert parts == getattr(stats, name) > 0, name
    slow, fast = sorted((stats.reasoning.tokens_per_second, stats.answer.tokens_per_second))
    assert 0 < slow <= stats.tokens_per_second <= fast


def test_a_prompt_s_closed_span_opens_nothing(thinking: Cluster) -> None:
    generation = generated(thinking, (5, OPENING, CLOSING, 7), tokens=1)
    assert not generation.stats.records[0].reasoning
    assert generation.stats.reasoning is generation.stats.answer is None
