"""A draft service that draws from another q than it reports: the text stays the target's, and the draft is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from draft_service.drafters.draws import Distribution, NextToken, PreDrawnDraws
from paceline.client import AsyncClient, Client
from paceline.drafting.redrawing import MAX_MISTAKES
from paceline.engine.table.engine import TableEngine
from paceline.models.table_names import TableSpec
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.sampling.distribution import support_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from tests.e2e.cluster import Cluster, cluster_fixture, eventually, full
from tests.e2e.statistics import LEVEL
from tests.e2e.test_distribution import OPPOSITE, SAMPLING, TARGET, p_value, request, sample
from tests.services.harness import draft_service

SAMPLES = 300
"""So many tell the text of a coordinator that takes the draft at its word."""
SHARPER = 30.0


def sharper(
    self: PreDrawnDraws, distribution: Distribution, width: int, position: int, round_key: int
) -> Sequence[NextToken]:
    """`PreDrawnDraws.proposed` at another temperature than what is reported."""
    assert distribution.support is not None
    scores = SHARPER * support_scores(distribution.support, self.vocab_size)
    token = race(scores, self.noise, Stream.DRAFT, position, round_key)
    return (NextToken(token, distribution.support.probability(token)),)


opposite = cluster_fixture(TARGET)


async def linked(address: str) -> None:
    """Wait until a coordinator has its link to a draft in this process."""

    def ready() -> bool:
        with Client(address) as client:
            return client.describe_models()[0].draft_ready

    await asyncio.to_thread(eventually, ready, "the coordinator has its link to the draft")


@asynccontextmanager
async def behind(services: Cluster, draft_model: str) -> AsyncIterator[tuple[AsyncClient, Callable[[], str]]]:
    """A client of a coordinator whose draft service is in this process, and that coordinator's log."""
    async with draft_service(TableEngine(TableSpec.parse(draft_model))) as (_, draft):
        with services.coordinator("misled", {"draft.address": draft}) as coordinator:
            await linked(coordinator)
            log = services.processes["misled"].log_file
            before = log.stat().st_size
            async with AsyncClient(coordinator) as client:
                yield client, lambda: log.read_bytes()[before:].decode()


@pytest.mark.parametrize("acceptance", [full(Acceptance.REJECTION), Acceptance.BLOCK])
async def test_the_text_has_the_targets_distribution_all_the_same(
    opposite: Cluster, monkeypatch: pytest.MonkeyPatch, acceptance: Acceptance
) -> None:
    monkeypatch.setattr(PreDrawnDraws, "proposed", sharper)
    speculation = SpeculationSettings(drafter="model", num_draft_tokens=1)
    drafted = partial(request, sampling=SAMPLING, acceptance=acceptance, speculation=speculation)
    async with behind(opposite, OPPOSITE) as (client, log):
        texts = await sample(client, drafted, SAMPLES)
        mistakes = [line for line in log().splitlines() if "draft failed" in line]
    assert p_value(texts, SAMPLING) > LEVEL
    assert SAMPLES / 10 < len(mistakes) <= MAX_MISTAKES * SAMPLES
    for line in mistakes:
        assert "drafter=model round=" in line
        assert "mistake " in line
