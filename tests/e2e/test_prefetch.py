"""Rounds that the target starts with prefetched proposals, through real services: their text is that of sent ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.client import AsyncClient, Generation
from paceline.local.service_process import ServiceName
from paceline.protocol.generation import FinishReason, GenerateRequest, SpeculationSettings, Tokens
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from tests.chaos.proxy import Proxy
from tests.e2e.cluster import Cluster
from tests.e2e.repeated import first_that
from tests.e2e.test_lease import SAMPLINGS, TARGET

TIMED = f"{TARGET},step_ms=25"
NEAR = f"{TARGET},noise=0.3,step_ms=1"
LOOP = tuple(range(8)) * 4
LENGTH = 60
OFF = SpeculationSettings(off=True)
MODEL = SpeculationSettings(drafter="model", num_draft_tokens=4)
TREE = SpeculationSettings(drafter="model", tree_widths=(3, 2, 1))


@pytest.fixture(scope="module")
def prefetching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Leaves proposals with the target, as by default."""
    with Cluster(tmp_path_factory.mktemp("prefetching"), target_model=TIMED, drafters=(f"model:{NEAR}",)) as running:
        yield running


@pytest.fixture(scope="module")
def sending(prefetching: Cluster) -> Iterator[str]:
    """A second coordinator on the same services, that sends every round; its address."""
    with prefetching.coordinator("sending", {"max_prefetched": 0}) as address:
        yield address


def request(speculation: SpeculationSettings = MODEL, length: int = LENGTH, **changes: object) -> GenerateRequest:
    made = GenerateRequest(token_ids=(10, 20, 30), seed=23, max_new_tokens=length, speculation=speculation)
    return replace(made, **changes)  # type: ignore[arg-type]


def self_started(generation: Generation) -> int:
    """Rounds that the target started with a proposal."""
    return sum(record.self_started and record.proposed > 0 for record in generation.stats.records)


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_the_text_is_that_of_rounds_that_are_sent(prefetching: Cluster, sending: str, name: str) -> None:
    requests = [
        request(speculation, sampling=SAMPLINGS[name], seed=seed, sample_index=seed % 2)
        for speculation in (MODEL, TREE, SpeculationSettings(), replace(MODEL, num_draft_tokens=1))
        for seed in range(3)
    ]
    async with prefetching.async_client() as one, AsyncClient(sending) as other:
        left = [await one.generate(each) for each in requests]  # among many at once nothing would be prefetched
        sent = await asyncio.gather(*(other.generate(each) for each in requests))
    for ours, theirs in zip(left, sent, strict=True):
        assert (ours.token_ids, ours.text, ours.finish_reason) == (
            theirs.token_ids,
            theirs.text,
            theirs.finish_reason,
        )
        assert ours.logprobs == theirs.logprobs
        assert self_started(theirs) == 0
    if name != "grammar":
        assert sum(map(self_started, left)) > 0.2 * sum(each.stats.rounds for each in left)
    prefetching.wait_idle()


async def test_most_hits_of_a_close_draft_are_started_by_the_target(prefetching: Cluster) -> None:
    async with prefetching.async_client() as client:
        *_, one = await first_that(
            lambda each: self_started(each) > 0.5 * each.stats.cache_hits > 0,
            client,
            request(ignore_eos=True, length=150),
        )
    records = [record for record in one.stats.records if record.self_started]
    assert all(record.cache_hit and record.draft_wait_ms == 0 for record in records)
    assert sum(record.accepted for record in records) > 0


async def test_a_copy_goes_on_without_the_coordinator(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An n-gram match is followed on for the outcome that all of it is accepted; no draft service is there."""
    repeats = "table:vocab=64,seed=1,order=1,sharpness=30,step_ms=10"
    copied = request(token_ids=LOOP, ignore_eos=True, sampling=SamplingParams(temperature=0))
    speculations = (OFF, SpeculationSettings(), SpeculationSettings(drafter="ngram", num_draft_tokens=6))
    with Cluster(tmp_path_factory.mktemp("copy"), target_model=repeats, drafters=()) as cluster:
        async with cluster.async_client() as client:
            plain, auto, fixed = [
                await client.generate(replace(copied, speculation=speculation)) for speculation in speculations
            ]
    assert auto.token_ids == fixed.token_ids == plain.token_ids
    assert self_started(auto) > 0
    assert self_started(fixed) >= fixed.stats.rounds // 3


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
async def test_nothing_is_prefetched_where_more_than_tokens_would_be_needed(
    prefetching: Cluster, acceptance: Acceptance
) -> None:
    async with prefetching.async_client() as client:
        one = await client.generate(request(acceptance=acceptance, ignore_eos=True))
    assert self_started(one) == 0
    assert one.stats.cache_hits > 0


@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 7, 11])
async def test_a_text_ends_at_its_length_wherever_that_falls(prefetching: Cluster, length: int) -> None:
    async with prefetching.async_client() as client:
        one = await client.generate(request(length=length, ignore_eos=True))
        whole = await client.generate(request(length=20, ignore_eos=True))
    assert one.token_ids == whole.token_ids[:length]
    assert one.finish_reason is FinishReason.LENGTH
    prefetching.wait_idle()


async def test_a_stop_string_ends_the_text_and_what_was_started(prefetching: Cluster, sending: str) -> None:
    async with prefetching.async_client() as one, AsyncClient(sending) as other:
        whole = await other.generate(request(ignore_eos=True))
        for start in range(5, 40, 7):
            stop = (whole.text[start : start + 2],)
            ours = await one.generate(request(ignore_eos=True, stop=stop))
            assert ours.text == whole.text[: whole.text.index(stop[0])]
            assert ours.finish_reason is FinishReason.STOP
    prefetching.wait_idle()


async def test_a_cancel_inside_a_self_started_round_frees_the_session(prefetching: Cluster) -> None:
    async with prefetching.async_client() as client:
        stream = client.stream(request(length=2000, ignore_eos=True))
        seen = 0
        async for event in stream:
            seen += isinstance(event, Tokens)
            if seen == 8:
                break
        await stream.aclose()
        prefetching.wait_idle()
        assert len((await client.generate(request(length=8, ignore_eos=True))).token_ids) == 8


async def test_services_that_die_meanwhile_come_back_to_the_same_text(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("killed"), target_model=TIMED, drafters=(f"model:{NEAR}",))
    wanted = request(length=160, ignore_eos=True, sampling=SAMPLINGS["penalties"])
    with Proxy(("127.0.0.1", cluster.ports["target"])) as proxy:
        cluster.target_proxy = proxy.address
        with cluster:
            with cluster.client() as client:
                whole = client.generate(wanted)
            assert self_started(whole) > 0
            blows = [(30, lambda: proxy.cut()), (70, lambda: _restart(cluster, "target"))]
            blows.append((110, lambda: _restart(cluster, "draft")))
            ids: list[int] = []
            async with cluster.async_client() as client:
                async for event in client.stream(wanted):
                    if isinstance(event, Tokens):
                        ids += event.token_ids
                    if blows and len(ids) >= blows[0][0]:
                        await asyncio.to_thread(blows.pop(0)[1])
            assert not blows
            assert tuple(ids) == whole.token_ids
            cluster.await_links()
            cluster.wait_idle()


def _restart(cluster: Cluster, name: ServiceName) -> None:
    cluster.kill(name)
    cluster.restart(name)
