"""Coupled text is a function of prompt, seed, sampling and target, and of nothing else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from paceline.protocol.generation import GenerateRequest, Provenance, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from tests.e2e.cluster import Cluster

TARGET_ONLY = SpeculationSettings(off=True)
PROMPTS = ((1, 2, 3), (7,), tuple(range(40)), (5, 6, 5, 6, 5, 6, 5, 6))
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.5, min_p=0.05),
)


def random_speculation(rng: np.random.Generator) -> SpeculationSettings:
    drafter = str(rng.choice(["model", "ngram"]))
    k = int(rng.integers(0, 9))
    widths = tuple(int(w) for w in rng.integers(1, 4, size=3)) if rng.random() < 0.5 else ()
    return SpeculationSettings(drafter=drafter, num_draft_tokens=k, tree_widths=widths)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature:g}")
async def test_any_speculation_writes_the_target_only_text(cluster: Cluster, sampling: SamplingParams) -> None:
    rng = np.random.default_rng(11)
    async with cluster.async_client() as client:
        for prompt in PROMPTS:
            request = GenerateRequest(token_ids=prompt, sampling=sampling, seed=17, max_new_tokens=48)
            plain = await client.generate(_with(request, TARGET_ONLY))
            assert set(plain.provenance) == {Provenance.TARGET}
            settings = [random_speculation(rng) for _ in range(8)]
            drafted = await asyncio.gather(*(client.generate(_with(request, each)) for each in settings))
            for each, generation in zip(settings, drafted, strict=True):
                assert generation.token_ids == plain.token_ids, each
                assert generation.text == plain.text
                assert generation.finish_reason == plain.finish_reason
            assert any(Provenance.ACCEPTED in generation.provenance for generation in drafted)


async def test_greedy_rejection_and_block_equal_greedy(cluster: Cluster) -> None:
    async with cluster.async_client() as client:
        base = GenerateRequest(token_ids=(3, 1, 4), sampling=SamplingParams(temperature=0), seed=1, max_new_tokens=40)
        plain = await client.generate(_with(base, TARGET_ONLY))
        for acceptance in (Acceptance.REJECTION, Acceptance.BLOCK):
            for drafter in ("model", "ngram"):
                request = GenerateRequest(
                    token_ids=(3, 1, 4),
                    sampling=SamplingParams(temperature=0),
                    seed=1,
                    max_new_tokens=40,
                    acceptance=acceptance,
                    speculation=SpeculationSettings(drafter=drafter, num_draft_tokens=4),
                )
                assert (await client.generate(request)).token_ids == plain.token_ids


async def test_a_perfect_draft_is_accepted_whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Cluster(
        tmp_path_factory.mktemp("perfect"),
        drafters=(f"model:{cluster.target_model}",),
        coordinator_flags={"fan_out": 0},  # a round that waits for its proposal gets it whole
    ) as perfect:
        async with perfect.async_client() as client:
            for acceptance in Acceptance:
                request = GenerateRequest(
                    token_ids=(9, 9, 1),
                    seed=5,
                    max_new_tokens=50,
                    acceptance=acceptance,
                    speculation=SpeculationSettings(num_draft_tokens=4),
                )
                generation = await client.generate(request)
                assert generation.stats.rounds == 10
                assert generation.stats.mean_acceptance_length == 5
                assert generation.stats.acceptance_histogram[4] == 10
                assert generation.provenance.count(Provenance.BONUS) == 10


async def test_trees_accept_more_than_chains_at_the_same_depth(cluster: Cluster) -> None:
    async with cluster.async_client() as client:
        accepted = {}
        for widths in ((), (4, 2, 1)):
            request = GenerateRequest(
                token_ids=(8, 2),
                seed=3,
                max_new_tokens=200,
                speculation=SpeculationSettings(drafter="model", num_draft_tokens=3, tree_widths=widths),
            )
            accepted[widths] = (await client.generate(request)).stats.mean_acceptance_length
    assert accepted[(4, 2, 1)] > accepted[()]


def _with(request: GenerateRequest, speculation: SpeculationSettings) -> GenerateRequest:
    return GenerateRequest(
        token_ids=request.token_ids,
        sampling=request.sampling,
        seed=request.seed,
        max_new_tokens=request.max_new_tokens,
        speculation=speculation,
    )
