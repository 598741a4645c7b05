"""Runs on the target through real services: the text of rounds that are sent one by one, whatever ends a run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.client import Generation
from paceline.protocol.generation import FinishReason, GenerateRequest, Provenance, SpeculationSettings, Tokens
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from tests.chaos.proxy import Proxy
from tests.e2e.cluster import Cluster

VOCAB = 64
END = 63
TARGET = f"table:vocab={VOCAB},seed=1,eos={END}"
TIMED = f"{TARGET},step_ms=4"
NEAR = f"{TARGET},noise=0.3"
OFF = SpeculationSettings(off=True)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, repetition_penalty=1.3),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, logprobs=2),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.8),
    "min tokens": SamplingParams(min_tokens=10, logit_bias=((END, 3.0),)),
    "grammar": SamplingParams(grammar=Grammar(GrammarKind.REGEX, "([a-f][g-k]+)+")),
}


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Leases rounds, as by default."""
    with Cluster(tmp_path_factory.mktemp("ahead"), target_model=TARGET, drafters=(f"model:{NEAR}",)) as running:
        yield running


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Sends every round."""
    flags: dict[str, object] = {"lease": 0}
    with Cluster(
        tmp_path_factory.mktemp("sent"), target_model=TARGET, drafters=(), coordinator_flags=flags
    ) as running:
        yield running


def request(length: int = 60, **changes: object) -> GenerateRequest:
    made = GenerateRequest(token_ids=(10, 20, 30), seed=23, max_new_tokens=length, speculation=OFF)
    return replace(made, **changes)  # type: ignore[arg-type]


def which_self_started(generation: Generation) -> list[bool]:
    """For each round, whether the target started it by itself."""
    return [record.self_started for record in generation.stats.records]


@pytest.mark.parametrize("acceptance", list(Acceptance))
async def test_the_text_is_that_of_rounds_that_are_sent(
    ahead: Cluster, sent: Cluster, acceptance: Acceptance
) -> None:
    requests = [
        request(acceptance=acceptance, sampling=sampling, seed=seed, sample_index=seed % 2)
        for sampling in SAMPLINGS.values()
        for seed in range(4)
    ]
    async with ahead.async_client() as running, sent.async_client() as sending:
        ran = await asyncio.gather(*(running.generate(each) for each in requests))
        plain = await asyncio.gather(*(sending.generate(each) for each in requests))
    for one, other in zip(ran, plain, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert one.logprobs == other.logprobs
        assert set(one.provenance) == {Provenance.TARGET}
        assert not any(which_self_started(other))
        assert which_self_started(one) == [False] + [True] * (len(one.token_ids) - 1)
    assert {FinishReason.STOP, FinishReason.LENGTH} <= {one.finish_reason for one in ran}, "runs end in both ways"
    ahead.wait_idle()


async def test_a_stop_string_inside_a_run_ends_the_text_and_the_run(ahead: Cluster, sent: Cluster) -> None:
    async with ahead.async_client() as running, sent.async_client() as sending:
        whole = await sending.generate(request(ignore_eos=True))
        for start in range(5, 40, 7):
            stop = (whole.text[start : start + 2],)
            one = await running.generate(request(ignore_eos=True, stop=stop))
            other = await sending.generate(request(ignore_eos=True, stop=stop))
            assert one.text == other.text == whole.text[: whole.text.index(stop[0])]
            assert one.token_ids == other.token_ids
            assert one.finish_reason is FinishReason.STOP
    ahead.wait_idle()


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 33])
async def test_a_text_ends_at_its_length_wherever_that_falls_in_a_run(ahead: Cluster, length: int) -> None:
    async with ahead.async_client() as client:
        one = await client.generate(request(length, ignore_eos=True))
    assert len(one.token_ids) == length
    assert one.finish_reason is FinishReason.LENGTH
    assert which_self_started(one) == [False] + [True] * (length - 1)
    ahead.wait_idle()


async def test_records_of_a_run_are_the_times_between_verdicts(tmp_path_factory: pytest.TempPathFactory) -> None:
    timed = f"{TARGET},step_ms=12"
    with (
        Cluster(tmp_path_factory.mktemp("records"), target_model=timed, drafters=()) as cluster,
        cluster.client() as client,
    ):
        generation = client.generate(request(40, ignore_eos=True))
    records = generation.stats.records[1:]
    assert len(records) == 39
    assert all(record.self_started for record in records)
    assert min(record.wire_ms for record in records) >= 0
    assert all(record.target.forward_ms >= 12 and record.draft_wait_ms == 0 for record in records)
    assert sum(record.round_ms for record in records) == pytest.approx(
        sum(record.target.service_ms for record in records), rel=0.05
    )


async def test_requests_that_draft_and_requests_that_are_leased_write_the_same_text(ahead: Cluster) -> None:
    """Side by side: `auto` goes in and out of runs."""
    speculations = (OFF, SpeculationSettings(), SpeculationSettings(drafter="ngram"), SpeculationSettings())
    requests = [request(150, ignore_eos=True, speculation=each) for each in speculations]
    async with ahead.async_client() as client:
        gathered = await asyncio.gather(*(client.generate(each) for each in requests))
    assert len({each.token_ids for each in gathered}) == 1


async def test_a_cancel_inside_a_run_frees_the_session(ahead: Cluster) -> None:
    async with ahead.async_client() as client:
        stream = client.stream(request(2000, ignore_eos=True))
        async for event in stream:
            if isinstance(event, Tokens):
                break
        await stream.aclose()
        ahead.wait_idle()
        assert len((await client.generate(request(8, ignore_eos=True))).token_ids) == 8


@pytest.mark.parametrize("acceptance", list(Acceptance))
async def test_a_target_that_dies_inside_a_run_comes_back_to_the_same_text(
    tmp_path_factory: pytest.TempPathFactory, acceptance: Acceptance
) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("killed"), target_model=TIMED, drafters=())
    wanted = request(120, acceptance=acceptance, ignore_eos=True, sampling=SAMPLINGS["penalties"])
    with Proxy(("127.0.0.1", cluster.ports["target"])) as proxy:
        cluster.target_proxy = proxy.address
        with cluster:
            with cluster.client() as client:
                whole = client.generate(wanted)
            ids: list[int] = []
            struck: list[int] = []
            async with cluster.async_client() as client:
                async for event in client.stream(wanted):
                    if not isinstance(event, Tokens):
                        continue
                    ids += event.token_ids
                    if len(ids) >= 30 and not struck:
                        struck.append(len(ids))
                        await asyncio.to_thread(proxy.cut)
                    elif len(ids) >= 70 and len(struck) == 1:
                        struck.append(len(ids))
                        await asyncio.to_thread(cluster.kill, "target")
                        await asyncio.to_thread(cluster.restart, "target")
            assert len(struck) == 2
            assert tuple(ids) == whole.token_ids
            cluster.await_links()
            cluster.wait_idle()
