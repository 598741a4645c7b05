"""Drafting behind verification through real services: hits and misses, the policy, what it holds meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from paceline.client import AsyncClient, Generation
from paceline.protocol.generation import GenerateRequest, Provenance, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from tests.e2e.cluster import Cluster, cluster_fixture, full
from tests.e2e.streams import first_that

TIMED = "table:vocab=64,seed=1,step_ms=30"
"""A target that leaves the draft time to work ahead."""
NEAR = "table:vocab=64,seed=1,noise=0.3,step_ms=1"
QUICK = "table:vocab=64,seed=1,step_ms=10"
USELESS = "table:vocab=64,seed=1,invert=1,step_ms=1"
LENGTH = 32
MODEL = SpeculationSettings(drafter="model", num_draft_tokens=4)
OFF = SpeculationSettings(off=True)
AUTO = SpeculationSettings(drafter="auto")
request = partial(GenerateRequest, token_ids=(3, 1, 4, 1, 5), seed=7, max_new_tokens=LENGTH, ignore_eos=True)
timed = cluster_fixture(TIMED, NEAR)


def drafts(generation: Generation) -> bool:
    return generation.stats.num_spec_steps > 0.2 * generation.stats.rounds


def self_started(generation: Generation) -> int:
    """Rounds that the target started with a proposal."""
    return sum(record.self_started and record.proposed > 0 for record in generation.stats.records)


@pytest.fixture(scope="module")
def waiting(timed: Cluster) -> Iterator[str]:
    """A second coordinator on the same target and draft, that drafts for no outcomes; its address."""
    with timed.coordinator("waiting", {"fan_out": 0}) as address:
        yield address


@pytest.mark.parametrize("temperature", [full(0.0), 1.0])
async def test_hits_misses_and_no_outlook_write_one_text(timed: Cluster, waiting: str, temperature: float) -> None:
    """Two coordinators share the services; one finds its proposals ready, one waits for each."""
    sampling = SamplingParams(temperature=temperature)
    rng = np.random.default_rng(3)
    async with timed.async_client() as ahead, AsyncClient(waiting) as behind:
        plain = (await ahead.generate(request(sampling=sampling, speculation=OFF))).token_ids
        settings = [
            SpeculationSettings(drafter="model", num_draft_tokens=int(k), tree_widths=widths)
            for k in rng.integers(1, 7, size=3)
            for widths in ((), (3, 2, 1))
        ]
        settings.append(SpeculationSettings())
        drafted = [request(sampling=sampling, speculation=each) for each in settings]
        hits = await asyncio.gather(*map(ahead.generate, drafted))
        waits = await asyncio.gather(*map(behind.generate, drafted))
    assert all(generation.token_ids == plain for generation in (*hits, *waits))
    assert sum(generation.stats.cache_hits for generation in hits) > 0
    assert sum(generation.stats.cache_misses for generation in hits) > 0
    assert all(generation.stats.cache_hits == 0 == generation.stats.cache_misses for generation in waits)


@pytest.mark.parametrize("acceptance", [Acceptance.COUPLED, Acceptance.BLOCK, full(Acceptance.REJECTION)])
async def test_most_outcomes_of_a_close_draft_are_there_in_time(timed: Cluster, acceptance: Acceptance) -> None:
    """Most where draft and target share noise; elsewhere a draft can't know the target's draws and foresees fewer."""
    async with timed.async_client() as client:
        stats = (await client.generate(request(max_new_tokens=96, acceptance=acceptance, speculation=MODEL))).stats
    assert stats.cache_hits * (1 if acceptance is Acceptance.COUPLED else 4) > stats.cache_misses
    hits = [record for record in stats.records if record.cache_hit]
    assert sum(record.accepted for record in hits) > 0
    assert all(record.proposed >= 1 for record in hits)


@pytest.mark.full
async def test_a_useless_draft_is_left_alone_and_a_good_one_taken_up(tmp_path: Path) -> None:
    """The policy reaches k = 0, and comes back when drafting pays again."""
    long = request(max_new_tokens=200, speculation=AUTO)
    with Cluster(tmp_path, QUICK, (f"model:{USELESS}",)) as cluster:
        async with cluster.async_client() as client:
            plain = await client.generate(request(speculation=OFF))
            settled = await first_that(lambda each: not drafts(each), client, long)
            cluster.drafters = (f"model:{NEAR}",)
            cluster.restart("draft")
            cluster.await_links()
            better = await first_that(drafts, client, long)
    assert all(generation.token_ids[:LENGTH] == plain.token_ids for generation in settled + better)


@pytest.mark.full
async def test_ngram_matches_need_no_draft_service_and_go_on_without_the_coordinator(tmp_path: Path) -> None:
    """A match is followed on for the outcome that all of it is accepted."""
    quick = "table:vocab=64,seed=1,order=1,sharpness=30,step_ms=10"  # what a way costs must not decide
    loop = partial(request, token_ids=tuple(range(8)) * 4, sampling=SamplingParams(temperature=0), max_new_tokens=96)
    speculations = (OFF, SpeculationSettings(), SpeculationSettings(drafter="ngram", num_draft_tokens=6))
    with Cluster(tmp_path, quick, drafters=()) as cluster:
        async with cluster.async_client() as client:
            plain, auto, fixed = [await client.generate(loop(speculation=each)) for each in speculations]
            (model,) = await client.describe_models()
    assert auto.token_ids == fixed.token_ids == plain.token_ids
    assert Provenance.ACCEPTED in auto.provenance
    assert {record.drafter for record in auto.stats.records} <= {"", "ngram"}
    assert auto.stats.rounds < 0.5 * plain.stats.rounds
    assert self_started(auto) > 0
    assert self_started(fixed) >= fixed.stats.rounds // 3
    assert model.drafters == ("auto", "ngram")
