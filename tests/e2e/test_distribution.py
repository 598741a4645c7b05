"""The distribution of the text through the three real services, all acceptance modes, at least three rounds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from paceline.client import AsyncClient
from paceline.engine.table.engine import TableModel
from paceline.models.table_names import TableSpec
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.sampling.distribution import probabilities, processed_scores
from tests.e2e.cluster import Cluster
from tests.e2e.statistics import LEVEL, Tokens, chi_square_p

VOCAB = 3
LENGTH = 5
"""With k = 1 a round commits at most two tokens, so five take at least three rounds."""
PROMPT: Tokens = (0, 2, 1)
SAMPLES = 1000
CONCURRENCY = 32
TARGET = f"table:vocab={VOCAB},seed=5,contexts=101,sharpness=1.0"
OPPOSITE = TARGET + ",invert=1"
"""q ranked opposite to p: a draft that resembles the target would hide a bias."""


def enumerate_distribution(sampling: SamplingParams) -> dict[Tokens, float]:
    """Probability of every text of `LENGTH` tokens under plain, non-speculative sampling."""
    model = TableModel(TableSpec.parse(TARGET))
    distribution: dict[Tokens, float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[Tokens, float] = {}
        for text, mass in distribution.items():
            scores = processed_scores(model.logits((*PROMPT, *text))[np.newaxis], sampling)[0]
            row = probabilities(scores)
            for token in range(VOCAB):
                longer[(*text, token)] = mass * float(row[token])
        distribution = longer
    return distribution


async def sample(client: AsyncClient, requests: list[GenerateRequest], fewest_rounds: int = 3) -> list[Tokens]:
    """Run many requests, `CONCURRENCY` at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(request: GenerateRequest) -> Tokens:
        async with gate:
            generation = await client.generate(request)
        assert generation.stats.rounds >= fewest_rounds
        return generation.token_ids

    return list(await asyncio.gather(*(one(request) for request in requests)))


@pytest.fixture(scope="module")
def opposite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("distribution"), target_model=TARGET, drafters=(f"model:{OPPOSITE}",)
    ) as running:
        yield running
        assert "mistake" not in running.processes["coordinator"].log_tail(1_000_000), "of an honest draft"


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("acceptance", list(Acceptance))
async def test_text_has_the_targets_distribution(opposite: Cluster, acceptance: Acceptance, drafter: str) -> None:
    sampling = SamplingParams(temperature=0.9)
    requests = [
        GenerateRequest(
            token_ids=PROMPT,
            sampling=sampling,
            seed=seed,
            max_new_tokens=LENGTH,
            acceptance=acceptance,
            speculation=SpeculationSettings(drafter=drafter, num_draft_tokens=1),
        )
        for seed in range(SAMPLES)
    ]
    async with opposite.async_client() as client:
        texts = await sample(client, requests)
    assert chi_square_p(texts, enumerate_distribution(sampling)) > LEVEL


@pytest.mark.full
async def test_longer_chains_and_filters_have_the_distribution(opposite: Cluster) -> None:
    sampling = SamplingParams(temperature=1.3, top_k=2)
    for acceptance, k in itertools.product((Acceptance.REJECTION, Acceptance.BLOCK), (2, 3)):
        requests = [
            GenerateRequest(
                token_ids=PROMPT,
                sampling=sampling,
                seed=seed,
                max_new_tokens=LENGTH,
                acceptance=acceptance,
                speculation=SpeculationSettings(drafter="model", num_draft_tokens=k),
            )
            for seed in range(500)
        ]
        async with opposite.async_client() as client:
            gathered = await asyncio.gather(*(client.generate(request) for request in requests))
        assert chi_square_p([each.token_ids for each in gathered], enumerate_distribution(sampling)) > LEVEL


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
async def test_the_policys_choices_leave_the_distribution_alone(opposite: Cluster, acceptance: Acceptance) -> None:
    """Drafter, length, waiting and cutting are all the policy's; hits and misses both happen."""
    sampling = SamplingParams(temperature=0.9)
    requests = [
        GenerateRequest(token_ids=PROMPT, sampling=sampling, seed=seed, max_new_tokens=LENGTH, acceptance=acceptance)
        for seed in range(SAMPLES)
    ]
    async with opposite.async_client() as client:
        texts = await sample(client, requests, fewest_rounds=1)
    assert chi_square_p(texts, enumerate_distribution(sampling)) > LEVEL


def test_the_statistic_sees_a_wrong_distribution() -> None:
    """The mutation of the test itself: texts of the draft's distribution are told from the target's."""
    distribution = enumerate_distribution(SamplingParams(temperature=0.9))
    texts = sorted(distribution)
    rng = np.random.default_rng(0)
    masses = np.array([distribution[text] for text in texts])
    wrong = 0.95 * masses + 0.05 * masses[::-1]
    drawn = [texts[i] for i in rng.choice(len(texts), size=20 * SAMPLES, p=wrong / wrong.sum())]
    right = [texts[i] for i in rng.choice(len(texts), size=20 * SAMPLES, p=masses / masses.sum())]
    assert chi_square_p(drawn, distribution) < LEVEL
    assert chi_square_p(right, distribution) > LEVEL
