"""A draft service that draws from another q than it reports: the text stays the target's, and the draft is named."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from coordinator.sessions.redrawing import MAX_MISTAKES
from draft_service.drafters.draws import Distribution, NextToken, PreDrawnDraws
from paceline.engine.table.engine import TableEngine
from paceline.models.table_names import TableSpec
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.sampling.distribution import support_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from tests.e2e.cluster import Cluster
from tests.e2e.statistics import LEVEL, chi_square_p
from tests.e2e.test_distribution import LENGTH, OPPOSITE, PROMPT, SAMPLES, TARGET, enumerate_distribution, sample
from tests.e2e.test_wrong_draft import linked
from tests.services.harness import draft_service

SHARPER = 3.0
SAMPLING = SamplingParams(temperature=0.9)


def sharper(
    self: PreDrawnDraws, distribution: Distribution, width: int, position: int, round_key: int
) -> Sequence[NextToken]:
    """`PreDrawnDraws.proposed` at another temperature than what is reported."""
    assert distribution.support is not None
    scores = SHARPER * support_scores(distribution.support, self.vocab_size)
    token = race(scores, self.noise, Stream.DRAFT, position, round_key)
    return (NextToken(token, distribution.support.probability(token)),)


@asynccontextmanager
async def behind(draft_model: str, folder: Path) -> AsyncIterator[Cluster]:
    """A target and a coordinator, with a draft service in this process."""
    async with draft_service(TableEngine(TableSpec.parse(draft_model))) as (_, address):
        with Cluster(folder, TARGET, drafters=(), coordinator_flags={"draft.address": address}) as cluster:
            await linked(cluster)
            yield cluster


@pytest.mark.parametrize("acceptance", [pytest.param(Acceptance.REJECTION, marks=pytest.mark.full), Acceptance.BLOCK])
async def test_the_text_has_the_targets_distribution_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acceptance: Acceptance
) -> None:
    monkeypatch.setattr(PreDrawnDraws, "proposed", sharper)
    requests = [
        GenerateRequest(
            token_ids=PROMPT,
            sampling=SAMPLING,
            seed=seed,
            max_new_tokens=LENGTH,
            acceptance=acceptance,
            speculation=SpeculationSettings(drafter="model", num_draft_tokens=1),
        )
        for seed in range(SAMPLES)
    ]
    async with behind(OPPOSITE, tmp_path) as cluster:
        async with cluster.async_client() as client:
            texts = await sample(client, requests)
        log = cluster.processes["coordinator"].log_tail(1_000_000)
    assert chi_square_p(texts, enumerate_distribution(SAMPLING)) > LEVEL
    mistakes = [line for line in log.splitlines() if "draft failed" in line]
    assert SAMPLES / 10 < len(mistakes) <= MAX_MISTAKES * SAMPLES
    for line in mistakes:
        assert "drafter=model round=" in line
        assert "mistake " in line


LONG = "table:vocab=64,seed=1"


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
@pytest.mark.parametrize("honest", [True, False])
async def test_a_request_does_without_it_after_a_few_mistakes_and_the_next_one_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acceptance: Acceptance, honest: bool
) -> None:
    if not honest:
        monkeypatch.setattr(PreDrawnDraws, "proposed", sharper)
    async with draft_service(TableEngine(TableSpec.parse(f"{LONG},noise=0.3"))) as (_, address):
        timed = f"{LONG},step_ms=10"  # long enough for the pause behind the first mistake
        with Cluster(tmp_path, timed, drafters=(), coordinator_flags={"draft.address": address}) as cluster:
            await linked(cluster)
            async with cluster.async_client() as client:
                for seed in range(2):
                    generation = await client.generate(
                        GenerateRequest(
                            token_ids=PROMPT,
                            seed=seed,
                            max_new_tokens=160,
                            ignore_eos=True,
                            acceptance=acceptance,
                            speculation=SpeculationSettings(drafter="model", num_draft_tokens=3),
                        )
                    )
                    assert len(generation.token_ids) == 160
                    proposing = [record for record in generation.stats.records if record.proposed]
                    assert (len(proposing) > 20) == honest
            log = cluster.processes["coordinator"].log_tail(1000)
    assert log.count("mistake 1 of") == log.count(f"mistake {MAX_MISTAKES} of") == (0 if honest else 2)


def test_the_wrong_draw_is_another_one() -> None:
    """What the tests above rely on."""
    rng = np.random.default_rng(0)
    made = PreDrawnDraws(SAMPLING, NoiseKey(1), 64)
    rows = made.read(rng.standard_normal((50, 64)).astype(np.float32), range(50), 8)
    different = sum(made.proposed(row, 1, 5, 4) != sharper(made, row, 1, 5, 4) for row in rows)
    assert 10 < different < 50
