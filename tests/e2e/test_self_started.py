"""Drafting behind verification, and rounds that the target starts by itself: their text is that of sent ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from paceline.client import AsyncClient, Generation
from paceline.protocol.generation import FinishReason, GenerateRequest, Provenance, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from tests.chaos.proxy import Proxy
from tests.e2e.cluster import Cluster, full
from tests.e2e.streams import first_that, output_of, stream

END = 63
TARGET = f"table:vocab=64,seed=1,eos={END}"
STEP_MS = 30
"""Leaves the draft time to work ahead."""
TIMED = f"{TARGET},step_ms={STEP_MS}"
NEAR = f"{TARGET},noise=0.3,step_ms=1"
OFF = SpeculationSettings(off=True)
MODEL = SpeculationSettings(drafter="model", num_draft_tokens=4)
TREE = SpeculationSettings(drafter="model", tree_widths=(3, 2, 1))
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, repetition_penalty=1.3),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, logprobs=2),
    "penalties": SamplingParams(
        repetition_penalty=1.4,
        presence_penalty=0.6,
        frequency_penalty=0.8,
        min_tokens=10,
        logit_bias=((END, 3.0),),
        logprobs=1,
    ),
    "grammar": SamplingParams(grammar=Grammar(GrammarKind.REGEX, "([a-f][g-k]+)+")),
}
text = partial(GenerateRequest, token_ids=(10, 20, 30), seed=23, max_new_tokens=60)
endless = partial(text, ignore_eos=True)
likely = partial(endless, token_ids=(3, 1, 4, 1, 5), seed=7)


class Way(NamedTuple):
    """Services whose target starts rounds by itself, and a coordinator that sends each."""

    services: Cluster
    sender: str


runs = pytest.mark.parametrize("way", [TARGET], indirect=True, ids=["runs"])
prefetches = pytest.mark.parametrize("way", [TIMED], indirect=True, ids=["prefetched"])


@pytest.fixture(scope="module")
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    with (
        Cluster(tmp_path_factory.mktemp("way"), request.param, (f"model:{NEAR}",)) as services,
        services.coordinator("sender", {"lease": 0, "max_prefetched": 0}) as sender,
    ):
        yield Way(services, sender)


def self_started(generation: Generation) -> list[bool]:
    """For each round, whether the target started it by itself."""
    return [record.self_started for record in generation.stats.records]


def prefetched(generation: Generation) -> int:
    """Rounds that the target started with a proposal."""
    return sum(record.self_started and record.proposed > 0 for record in generation.stats.records)


async def both(way: Way, requests: Sequence[GenerateRequest]) -> list[Generation]:
    """What the target starts by itself, compared with what is sent."""
    async with way.services.async_client() as one, AsyncClient(way.sender) as other:
        own = [await one.generate(each) for each in requests]  # among many at once nothing would be prefetched
        sent = await asyncio.gather(*map(other.generate, requests))
    for ours, theirs in zip(own, sent, strict=True):
        assert output_of(ours) == output_of(theirs)
        assert not any(self_started(theirs))
    way.services.wait_idle()
    return own


@runs
@pytest.mark.parametrize("acceptance", [Acceptance.COUPLED, Acceptance.BLOCK, full(Acceptance.REJECTION)])
async def test_runs_write_the_text_of_rounds_that_are_sent(way: Way, acceptance: Acceptance) -> None:
    requests = [
        text(acceptance=acceptance, sampling=sampling, seed=seed, sample_index=seed % 2, speculation=OFF)
        for sampling in SAMPLINGS.values()
        for seed in range(2)
    ]
    generations = await both(way, requests)
    for one in generations:
        assert set(one.provenance) == {Provenance.TARGET}
        assert self_started(one) == [False] + [True] * (len(one.token_ids) - 1)
    assert {FinishReason.STOP, FinishReason.LENGTH} == {one.finish_reason for one in generations}, "both ends"


@prefetches
@pytest.mark.parametrize("name", [full("greedy"), full("sampled"), full("penalties"), "grammar"])
async def test_prefetched_proposals_write_the_text_of_rounds_that_are_sent(way: Way, name: str) -> None:
    speculations = (MODEL, TREE, SpeculationSettings(), replace(MODEL, num_draft_tokens=1))
    requests = [
        text(speculation=speculation, sampling=SAMPLINGS[name], seed=seed, sample_index=seed % 2, max_new_tokens=40)
        for seed, speculation in enumerate(speculations)
    ]
    generations = await both(way, requests)
    if name != "grammar":
        async with way.services.async_client() as client:
            tried = await first_that(lambda each: prefetched(each) > 0.2 * each.stats.rounds, client, requests[-1])
        assert all(output_of(each) == output_of(generations[-1]) for each in tried)


@runs
async def test_a_stop_string_ends_the_text_and_what_was_started(way: Way) -> None:
    async with AsyncClient(way.sender) as client:
        whole = await client.generate(endless(speculation=OFF))
    stops = [whole.text[start : start + 2] for start in range(5, 40, 7)]
    stopped = await both(way, [endless(stop=(stop,), speculation=OFF) for stop in stops])
    assert [one.text for one in stopped] == [whole.text[: whole.text.index(stop)] for stop in stops]
    assert {one.finish_reason for one in stopped} == {FinishReason.STOP}


@runs
async def test_requests_that_draft_and_requests_that_are_leased_write_the_same_text(way: Way) -> None:
    """Side by side: `auto` goes in and out of runs."""
    speculations = (OFF, SpeculationSettings(), SpeculationSettings(drafter="ngram"), SpeculationSettings())
    requests = [endless(max_new_tokens=150, speculation=each) for each in speculations]
    async with way.services.async_client() as client:
        gathered = await asyncio.gather(*map(client.generate, requests))
    assert len({each.token_ids for each in gathered}) == 1


@prefetches
async def test_records_of_a_run_are_the_times_between_verdicts(way: Way) -> None:
    async with way.services.async_client() as client:
        records = (await client.generate(endless(max_new_tokens=24, speculation=OFF))).stats.records[1:]
    assert [record.self_started for record in records] == [True] * 23
    assert min(record.wire_ms for record in records) >= 0
    assert all(record.target.forward_ms >= STEP_MS and record.draft_wait_ms == 0 for record in records)
    assert sum(record.round_ms for record in records) == pytest.approx(
        sum(record.target.service_ms for record in records), rel=0.05
    )


@prefetches
async def test_most_hits_of_a_close_draft_are_started_by_the_target(way: Way) -> None:
    async with way.services.async_client() as client:
        *_, one = await first_that(
            lambda each: prefetched(each) > 0.5 * each.stats.cache_hits > 0,
            client,
            endless(max_new_tokens=100, speculation=replace(MODEL, num_draft_tokens=2)),
        )
    records = [record for record in one.stats.records if record.self_started]
    assert all(record.cache_hit and record.draft_wait_ms == 0 for record in records)
    assert sum(record.accepted for record in records) > 0


@prefetches
@pytest.mark.parametrize("temperature", [full(0.0), 1.0])
async def test_hits_misses_and_no_outlook_write_one_text(way: Way, temperature: float) -> None:
    """Two coordinators share the services; one finds its proposals ready, one waits for each."""
    request = partial(likely, max_new_tokens=32, sampling=SamplingParams(temperature=temperature))
    rng = np.random.default_rng(3)
    ks, shapes = rng.integers(1, 7, size=3), ((), (3, 2, 1))
    settings = [replace(MODEL, num_draft_tokens=int(k), tree_widths=widths) for k in ks for widths in shapes]
    drafted = [request(speculation=each) for each in (*settings, SpeculationSettings())]
    with way.services.coordinator("waiting", {"fan_out": 0}) as waiting:
        async with way.services.async_client() as ahead, AsyncClient(waiting) as behind:
            plain = (await ahead.generate(request(speculation=OFF))).token_ids
            hits = await asyncio.gather(*map(ahead.generate, drafted))
            waits = await asyncio.gather(*map(behind.generate, drafted))
    assert all(generation.token_ids == plain for generation in (*hits, *waits))
    assert sum(generation.stats.cache_hits for generation in hits) > 0
    assert sum(generation.stats.cache_misses for generation in hits) > 0
    assert all(generation.stats.cache_hits == 0 == generation.stats.cache_misses for generation in waits)


@prefetches
@pytest.mark.parametrize("acceptance", [Acceptance.COUPLED, Acceptance.BLOCK, full(Acceptance.REJECTION)])
async def test_most_outcomes_of_a_close_draft_are_there_in_time(way: Way, acceptance: Acceptance) -> None:
    """Most where draft and target share noise; elsewhere a draft can't know the target's draws and foresees fewer."""
    async with way.services.async_client() as client:
        stats = (await client.generate(likely(max_new_tokens=96, acceptance=acceptance, speculation=MODEL))).stats
    assert stats.cache_hits * (1 if acceptance is Acceptance.COUPLED else 4) > stats.cache_misses
    hits = [record for record in stats.records if record.cache_hit]
    assert sum(record.accepted for record in hits) > 0
    assert all(record.proposed >= 1 for record in hits)


def drafts(generation: Generation) -> bool:
    return generation.stats.num_spec_steps > 0.2 * generation.stats.rounds


@pytest.mark.full
async def test_a_useless_draft_is_left_alone_and_a_good_one_taken_up(tmp_path: Path) -> None:
    """The policy reaches k = 0, and comes back when drafting pays again."""
    long = likely(max_new_tokens=200, speculation=SpeculationSettings(drafter="auto"))
    with Cluster(tmp_path, f"{TARGET},step_ms=10", (f"model:{TARGET},invert=1,step_ms=1",)) as cluster:
        async with cluster.async_client() as client:
            plain = await client.generate(likely(speculation=OFF))
            settled = await first_that(lambda each: not drafts(each), client, long)
            cluster.drafters = (f"model:{NEAR}",)
            cluster.restart("draft")
            cluster.await_links()
            better = await first_that(drafts, client, long)
    assert all(one.token_ids[: len(plain.token_ids)] == plain.token_ids for one in settled + better)


async def test_services_that_die_meanwhile_come_back_to_the_same_text(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, TIMED, (f"model:{NEAR}",))
    request = endless(max_new_tokens=80, sampling=SAMPLINGS["penalties"], speculation=MODEL)
    with Proxy(("127.0.0.1", cluster.ports["target"])) as proxy:
        cluster.target_proxy = proxy.address
        blows = ((15, proxy.cut), (35, partial(cluster.restart, "target")), (55, partial(cluster.restart, "draft")))
        with cluster:
            async with cluster.async_client() as client:
                whole = await client.generate(request)
                assert prefetched(whole)
                assert (await stream(client, request, *blows)).token_ids == whole.token_ids
            cluster.await_links()
            cluster.wait_idle()
