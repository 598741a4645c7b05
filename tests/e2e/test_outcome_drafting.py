"""Drafting behind verification through real services: hits and misses, the policy, what it holds meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.client import AsyncClient, Generation
from paceline.protocol.generation import GenerateRequest, Provenance, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from tests.e2e.cluster import Cluster
from tests.e2e.repeated import first_that

TIMED = "table:vocab=64,seed=1,step_ms=30"
NEAR = "table:vocab=64,seed=1,noise=0.3,step_ms=1"
QUICK = "table:vocab=64,seed=1,step_ms=10"
USELESS = "table:vocab=64,seed=1,invert=1,step_ms=1"
SLOW = "table:vocab=64,seed=1,noise=0.3,step_ms=150"
LENGTH = 96


def request(speculation: SpeculationSettings, **changes: object) -> GenerateRequest:
    made = GenerateRequest(
        token_ids=(3, 1, 4, 1, 5), seed=7, max_new_tokens=LENGTH, ignore_eos=True, speculation=speculation
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def drafts(generation: Generation) -> bool:
    return generation.stats.num_spec_steps > 0.2 * generation.stats.rounds


def waits(generation: Generation) -> int:
    return sum(record.draft_wait_ms > 75 for record in generation.stats.records)


MODEL = SpeculationSettings(drafter="model", num_draft_tokens=4)
OFF = SpeculationSettings(off=True)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A target that leaves the draft time to work ahead."""
    with Cluster(tmp_path_factory.mktemp("timed"), target_model=TIMED, drafters=(f"model:{NEAR}",)) as running:
        yield running


@pytest.fixture(scope="module")
def waiting(timed: Cluster) -> Iterator[str]:
    """A second coordinator on the same target and draft, that drafts for no outcomes; its address."""
    with timed.coordinator("waiting", {"fan_out": 0}) as address:
        yield address


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_hits_misses_and_no_outlook_write_one_text(timed: Cluster, waiting: str, temperature: float) -> None:
    """Two coordinators share the services; one finds its proposals ready, one waits for each."""
    sampling = SamplingParams(temperature=temperature)
    rng = np.random.default_rng(3)
    async with timed.async_client() as ahead, AsyncClient(waiting) as behind:
        plain = (await ahead.generate(request(OFF, sampling=sampling))).token_ids
        settings = [
            SpeculationSettings(drafter="model", num_draft_tokens=int(k), tree_widths=widths)
            for k in rng.integers(1, 7, size=3)
            for widths in ((), (3, 2, 1))
        ]
        settings.append(SpeculationSettings())
        drafted = [request(each, sampling=sampling) for each in settings]
        hits = await asyncio.gather(*(ahead.generate(each) for each in drafted))
        waits = await asyncio.gather(*(behind.generate(each) for each in drafted))
    assert all(generation.token_ids == plain for generation in (*hits, *waits))
    assert sum(generation.stats.cache_hits for generation in hits) > 0
    assert sum(generation.stats.cache_misses for generation in hits) > 0
    assert all(generation.stats.cache_hits == 0 == generation.stats.cache_misses for generation in waits)


@pytest.mark.parametrize("acceptance", list(Acceptance))
async def test_most_outcomes_of_a_close_draft_are_there_in_time(timed: Cluster, acceptance: Acceptance) -> None:
    """Most where draft and target share noise; elsewhere a draft can't know the target's draws and foresees fewer."""
    async with timed.async_client() as client:
        stats = (await client.generate(request(MODEL, acceptance=acceptance))).stats
    assert stats.cache_hits * (1 if acceptance is Acceptance.COUPLED else 4) > stats.cache_misses
    hits = [record for record in stats.records if record.cache_hit]
    assert sum(record.accepted for record in hits) > 0
    assert all(record.proposed >= 1 for record in hits)


async def test_cancelling_frees_what_was_drafted_ahead(timed: Cluster) -> None:
    async with timed.async_client() as client:
        stream = client.stream(request(MODEL, max_new_tokens=2000))
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 8:
                break
        await stream.aclose()
        timed.wait_idle()
        again = await client.generate(request(MODEL))
    assert len(again.token_ids) == LENGTH


async def test_a_useless_draft_is_left_alone_and_a_good_one_taken_up(tmp_path: Path) -> None:
    """The policy reaches k = 0, and comes back when drafting pays again."""
    auto = SpeculationSettings(drafter="auto")
    cluster = Cluster(tmp_path, target_model=QUICK, drafters=(f"model:{USELESS}",))
    with cluster:
        async with cluster.async_client() as client:
            plain = await client.generate(request(OFF))
            long = request(auto, max_new_tokens=300)
            settled = await first_that(lambda each: not drafts(each), client, long)
            cluster.kill("draft")
            cluster.drafters = (f"model:{NEAR}",)
            cluster.restart("draft")
            cluster.await_links()
            better = await first_that(drafts, client, long)
    assert all(generation.token_ids[:LENGTH] == plain.token_ids for generation in settled + better)


async def test_a_draft_slower_than_the_target_is_not_waited_for(tmp_path: Path) -> None:
    with Cluster(tmp_path, target_model=TIMED, drafters=(f"model:{SLOW}",)) as cluster:
        async with cluster.async_client() as client:
            plain = await client.generate(request(OFF))
            long = request(SpeculationSettings(), max_new_tokens=200)
            tried = await first_that(lambda each: waits(each) < 0.1 * each.stats.rounds, client, long)
    assert all(each.token_ids[:LENGTH] == plain.token_ids for each in tried)


async def test_ngram_matches_need_no_draft_service(tmp_path: Path) -> None:
    loop = tuple(range(8)) * 4
    timed = "table:vocab=64,seed=1,order=1,sharpness=30,step_ms=10"  # what a way costs must not decide
    with Cluster(tmp_path, target_model=timed, drafters=()) as cluster:
        async with cluster.async_client() as client:
            greedy = SamplingParams(temperature=0)
            plain = await client.generate(request(OFF, token_ids=loop, sampling=greedy))
            drafted = await client.generate(request(SpeculationSettings(), token_ids=loop, sampling=greedy))
            (model,) = await client.describe_models()
    assert drafted.token_ids == plain.token_ids
    assert Provenance.ACCEPTED in drafted.provenance
    assert {record.drafter for record in drafted.stats.records} <= {"", "ngram"}
    assert drafted.stats.rounds < 0.5 * plain.stats.rounds
    assert model.drafters == ("auto", "ngram")
