"""Rounds inside spans of reasoning are told apart, through real services, by the tokens that mark the spans."""

from __future__ import annotations

import pytest

from paceline.client import Generation
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.records import GenerationStats
from tests.e2e.cluster import Cluster, cluster_fixture, eventually, free_port
from tests.metrics.scrape import Exposition

OPENING, CLOSING = 0, 1
TARGET = "table:vocab=16,seed=1,sharpness=1,think=1"
NEAR = "table:vocab=16,seed=1,sharpness=1,think=1,noise=0.3"
MODEL = SpeculationSettings(drafter="model", num_draft_tokens=3)
PORT = free_port()
thinking = cluster_fixture(TARGET, NEAR, coordinator_flags={"server.metrics_port": PORT})


def generated(cluster: Cluster, prompt: tuple[int, ...], tokens: int = 120) -> Generation:
    with cluster.client() as client:
        return client.generate(token_ids=prompt, seed=4, max_new_tokens=tokens, speculation=MODEL)


def inside(prompt: tuple[int, ...], generation: Generation) -> list[bool]:
    """Whether a span is open in front of each generated token: by the last marker before it."""
    text = (*prompt, *generation.token_ids)
    starts = range(len(prompt), len(text))
    return [next((token == OPENING for token in reversed(text[:at]) if token <= CLOSING), False) for at in starts]


def reasoning(name: str, **labels: str) -> float:
    return Exposition.at(PORT).value(f"paceline_reasoning_{name}", **labels)


def counted() -> list[float]:
    return [reasoning("round_duration_seconds_count"), reasoning("tokens_total", kind="accepted")]


@pytest.mark.parametrize("prompt", [(5, 6, 7), (5, OPENING, 7)], ids=["outside", "opened by the prompt"])
def test_rounds_belong_to_where_they_begin(thinking: Cluster, prompt: tuple[int, ...]) -> None:
    rounds, accepted = counted()
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
    grown = [rounds + len(mine), accepted + stats.reasoning.num_accepted_draft_tokens]
    eventually(lambda: counted() == grown, f"metrics have {grown} of reasoning")


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
