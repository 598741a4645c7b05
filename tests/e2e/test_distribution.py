"""The distribution of the text through the three real services, all acceptance modes, at least three rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from paceline.client import AsyncClient
from paceline.engine.table.engine import TableModel
from paceline.models.table_names import TableSpec
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.sampling.distribution import probabilities, processed_scores
from tests.e2e.cluster import Cluster, full
from tests.e2e.statistics import LEVEL, Tokens, chi_square_p
from tests.sampling import plain

VOCAB = 3
LENGTH = 5
"""With k = 1 a round commits at most two tokens, so five take at least three rounds."""
BEGINNING = 3
PROMPT: Tokens = (0, 2, 1)
SAMPLES = 700
CONCURRENCY = 32
SAMPLING = SamplingParams(temperature=0.9)
TARGET = f"table:vocab={VOCAB},seed=5,contexts=101,sharpness=1.0"
OPPOSITE = TARGET + ",invert=1"
"""q ranked opposite to p: a draft that resembles the target would hide a bias."""
BYTES = "table:vocab=300,seed=9,contexts=101,sharpness=1.0"
"""A draft of another tokenizer that has the target's three letters among its bytes, with ids of its own."""
NO_LETTERS = "table:vocab=257,eos=97"
"""One that lacks the first of them."""


def enumerate_distribution(sampling: SamplingParams, length: int = LENGTH) -> dict[Tokens, float]:
    """Probability of every text of so many tokens under plain, non-speculative sampling."""
    model = TableModel(TableSpec.parse(TARGET))

    def row(text: Tokens) -> Sequence[float]:
        return [*probabilities(processed_scores(model.logits((*PROMPT, *text))[np.newaxis], sampling)[0])]

    return plain.texts(row, length)


def p_value(texts: Sequence[Tokens], sampling: SamplingParams) -> float:
    """Of whole texts or of their beginnings: in these, which fill few cells, fewer samples show what is wrong."""
    beginnings = [text[:BEGINNING] for text in texts]
    return min(
        chi_square_p(texts, enumerate_distribution(sampling)),
        chi_square_p(beginnings, enumerate_distribution(sampling, BEGINNING)),
    )


request = partial(GenerateRequest, token_ids=PROMPT, max_new_tokens=LENGTH)


async def sample(
    client: AsyncClient, request: Callable[..., GenerateRequest], samples: int = SAMPLES, fewest_rounds: int = 3
) -> list[Tokens]:
    """Make the request with each of so many seeds, `CONCURRENCY` at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(seed: int) -> Tokens:
        async with gate:
            generation = await client.generate(request(seed=seed))
        assert generation.stats.rounds >= fewest_rounds
        return generation.token_ids

    return list(await asyncio.gather(*map(one, range(samples))))


async def check_text(services: Cluster, acceptance: Acceptance, drafter: str, samples: int = SAMPLES) -> None:
    """Texts of single drafted tokens have the target's distribution."""
    speculation = SpeculationSettings(drafter=drafter, num_draft_tokens=1)
    drafted = partial(request, sampling=SAMPLING, acceptance=acceptance, speculation=speculation)
    async with services.async_client() as client:
        texts = await sample(client, drafted, samples)
    assert p_value(texts, SAMPLING) > LEVEL


def honest(*drafts: str, **settings: Any) -> Any:
    """A fixture: services of these draft models, none of which is taken to have told another q than it drew from."""

    @pytest.fixture(scope="module")
    def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
        drafters = tuple(f"model:{draft}" for draft in drafts)
        with Cluster(tmp_path_factory.mktemp("distribution"), TARGET, drafters, **settings) as running:
            yield running
            assert "mistake" not in running.processes["coordinator"].log_tail(1_000_000)

    return services


opposite = honest(OPPOSITE)
in_bytes = honest(BYTES, NO_LETTERS, draft_flags={"target_model": TARGET})


@pytest.mark.parametrize(
    ("acceptance", "drafter"),
    [
        # `test_coupled_identity` has it that a coupled text is target-only's, and `test_race` whose draws those are.
        full(Acceptance.COUPLED, "model"),
        # `test_sampling` has the rule with processors, and the next test with a draft of another vocabulary.
        full(Acceptance.REJECTION, "model"),
        # Of one token both rules are one; the policy's choices are tried with this one, `test_sampling` tries chains.
        full(Acceptance.BLOCK, "model"),
        # `tests/mutants` has the rule with a copy.
        full(Acceptance.REJECTION, "ngram"),
        full(Acceptance.BLOCK, "ngram"),
    ],
)
async def test_text_has_the_targets_distribution(opposite: Cluster, acceptance: Acceptance, drafter: str) -> None:
    await check_text(opposite, acceptance, drafter)


@pytest.mark.parametrize(
    ("acceptance", "drafter"),
    [
        (Acceptance.REJECTION, "model"),
        full(Acceptance.REJECTION, f"model:{NO_LETTERS}"),
        full(Acceptance.BLOCK, "model"),
        full(Acceptance.COUPLED, "model"),
    ],
)
async def test_text_drafted_in_another_vocabulary_has_the_distribution(
    in_bytes: Cluster, acceptance: Acceptance, drafter: str
) -> None:
    await check_text(in_bytes, acceptance, drafter, samples=400)


def test_coupled_text_drafted_in_another_vocabulary_is_target_onlys(in_bytes: Cluster) -> None:
    off, four = SpeculationSettings(off=True), SpeculationSettings(drafter="model", num_draft_tokens=4)
    request_of = partial(
        GenerateRequest, prompt="abcabba", sampling=SamplingParams(temperature=1.0), max_new_tokens=48
    )
    accepted = 0
    with in_bytes.client() as client:
        for seed in range(4):
            plain, drafted = [client.generate(request_of(seed=seed, speculation=each)) for each in (off, four)]
            assert drafted.token_ids == plain.token_ids
            accepted += drafted.stats.num_accepted_draft_tokens
    assert accepted > 10, "its rows are read in the target's ids"


@pytest.mark.full
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
async def test_longer_chains_and_filters_have_the_distribution(
    opposite: Cluster, acceptance: Acceptance, k: int
) -> None:
    sampling = SamplingParams(temperature=1.3, top_k=2)
    speculation = SpeculationSettings(drafter="model", num_draft_tokens=k)
    asked = partial(request, sampling=sampling, acceptance=acceptance, speculation=speculation)
    async with opposite.async_client() as client:
        assert p_value(await sample(client, asked, 500, fewest_rounds=2), sampling) > LEVEL


@pytest.mark.parametrize("acceptance", [full(Acceptance.REJECTION), Acceptance.BLOCK])
async def test_the_policys_choices_leave_the_distribution_alone(opposite: Cluster, acceptance: Acceptance) -> None:
    """Drafter, length, waiting and cutting are all the policy's; hits and misses both happen."""
    async with opposite.async_client() as client:
        texts = await sample(client, partial(request, sampling=SAMPLING, acceptance=acceptance), fewest_rounds=1)
    assert p_value(texts, SAMPLING) > LEVEL


def test_the_statistic_sees_a_wrong_distribution() -> None:
    """The mutation of the test itself: texts of the draft's distribution are told from the target's."""
    distribution = enumerate_distribution(SAMPLING)
    texts = sorted(distribution)
    rng = np.random.default_rng(0)
    masses = np.array([distribution[text] for text in texts])
    wrong = 0.95 * masses + 0.05 * masses[::-1]
    drawn = [texts[i] for i in rng.choice(len(texts), size=20_000, p=wrong / wrong.sum())]
    right = [texts[i] for i in rng.choice(len(texts), size=20_000, p=masses / masses.sum())]
    assert chi_square_p(drawn, distribution) < LEVEL
    assert chi_square_p(right, distribution) > LEVEL
