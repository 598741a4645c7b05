"""Predicted outputs through real services: the text is the one without a prediction, and comes in fewer rounds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from tests.e2e.cluster import Cluster, cluster_fixture, full
from tests.e2e.streams import output_of

TARGET = "table:vocab=300,seed=1,contexts=4001,step_ms=2"
LENGTH = 120
OFF = SpeculationSettings(off=True)
GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=1)
request = partial(
    GenerateRequest,
    token_ids=(1, 2, 3),
    sampling=SAMPLED,
    seed=5,
    max_new_tokens=LENGTH,
    ignore_eos=True,
    speculation=OFF,
)
cluster = cluster_fixture(TARGET, f"{TARGET},noise=0.5")
"""Copies nothing of its own accord, so that what is copied is the prediction."""


def edited(text: Sequence[int], seed: int) -> tuple[int, ...]:
    """The text as a file that it is an edit of: with tokens more, tokens less and other tokens in four places."""
    rng = random.Random(seed)
    tokens = [*text]
    for place in (100, 75, 45, 20):
        other = [rng.randrange(256) for _ in range(rng.randrange(5))]
        tokens[place : place + rng.randrange(5)] = other
    return tuple(tokens)


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        ("auto", SAMPLED),
        ("ngram", SAMPLED),
        ("model", GREEDY),
        full("auto", GREEDY),
        full("ngram", GREEDY),
        full("model", SAMPLED),
    ],
)
async def test_the_text_is_that_without_a_prediction_and_takes_fewer_rounds(
    cluster: Cluster, drafter: str, sampling: SamplingParams
) -> None:
    settings = [SpeculationSettings(drafter=drafter, num_draft_tokens=k) for k in (1, 6, 40, None)]
    edits = (0, 0, 1, 1)
    async with cluster.async_client() as client:
        plain = await client.generate(request(sampling=sampling))
        asked = [
            request(sampling=sampling, prediction=edited(plain.token_ids, seed), speculation=each)
            for seed, each in zip(edits, settings, strict=True)
        ]
        predicted = await asyncio.gather(*map(client.generate, asked))
    for one, each in zip(predicted, settings, strict=True):
        assert output_of(one) == output_of(plain)
        if each.num_draft_tokens == 6:
            assert one.stats.prediction_accepted > 0.6 * LENGTH
            assert one.stats.rounds < LENGTH / 2.5
    cluster.wait_idle()


async def test_greedy_text_is_the_same_under_every_rule(cluster: Cluster) -> None:
    async with cluster.async_client() as client:
        plain = await client.generate(request(sampling=GREEDY))
        for acceptance, drafter in ((Acceptance.REJECTION, "model"), (Acceptance.BLOCK, "ngram")):
            settings = SpeculationSettings(drafter=drafter, num_draft_tokens=6)
            wanted = request(sampling=GREEDY, acceptance=acceptance, speculation=settings)
            one = await client.generate(replace(wanted, prediction=edited(plain.token_ids, 1)))
            assert one.token_ids == plain.token_ids
            assert one.stats.prediction_accepted > 0.6 * LENGTH


async def test_a_right_prediction_is_accepted_whole_and_a_wrong_one_changes_nothing(cluster: Cluster) -> None:
    rng = random.Random(3)
    settings = SpeculationSettings(drafter="ngram", num_draft_tokens=9)
    async with cluster.async_client() as client:
        plain = await client.generate(request())
        wanted = request(prediction=plain.token_ids, speculation=settings)
        one = await client.generate(wanted)
        by_text = await client.generate(replace(wanted, prediction=(), prediction_text=plain.text))
        off = await client.generate(replace(wanted, speculation=OFF))
        other = await client.generate(replace(wanted, prediction=tuple(rng.randrange(256) for _ in range(400))))
        second_half = replace(wanted, prediction=edited(plain.token_ids, 2), resume_token_ids=plain.token_ids[:60])
        rest = await client.generate(second_half)
    assert one.token_ids == off.token_ids == other.token_ids == plain.token_ids
    assert one.stats.rounds == LENGTH // 10
    assert (one.stats.prediction_accepted, one.stats.prediction_rejected) == (LENGTH * 9 // 10, 0)
    assert {record.drafter for record in one.stats.records} == {"prediction"}
    assert any(record.self_started for record in one.stats.records), "a copy goes on without a round trip"
    assert by_text.token_ids == plain.token_ids
    assert off.stats.prediction_accepted + off.stats.prediction_rejected == off.stats.num_draft_tokens == 0
    assert other.stats.prediction_rejected > other.stats.prediction_accepted
    assert rest.token_ids == plain.token_ids[60:]
    assert rest.stats.prediction_accepted > 30
