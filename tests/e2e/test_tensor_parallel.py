"""A target of two ranks, real processes and a real process group: the text of one rank, and what a dead rank does."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from paceline.client import Generation
from paceline.engine.interface import Engine, StepItem, StepPlan
from paceline.engine.parallel.group import INLINE_INTS
from paceline.local.service_process import (
    Flags,
    ServiceProcess,
    inherited_environment,
    is_serving,
    write_config,
)
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import ROOT, Acceptance, Proposal, SparseDistribution
from paceline.protocol.sampling import SamplingParams
from paceline.protocol.target import Round
from paceline.runtime.config import TargetConfig
from paceline.runtime.process import FAILURE
from target_service.verifier import verify
from tests.e2e.cluster import Cluster, cluster_fixture, eventually, free_port, full, ranks_of
from tests.e2e.streams import stream
from tests.engine import tiny
from tests.models.saving import save_with_tokenizer
from tests.services.harness import first_round, linked, target_link, target_open, verdict_of

TABLE = "table:vocab=300,seed=1,eos=299,step_ms=5"
NEAR = "table:vocab=300,seed=1,eos=299,noise=0.2"
LENGTH = 60
NOTICED_S = 1.0
"""A dead rank is noticed within this time on one machine."""
ENDED_S = 5.0
"""The 3 s that a rank has, and the start of a process's end on a busy machine."""
GONE_S = 10.0
"""By then the whole service is gone."""
RANKED: Flags = {"tensor_parallel_size": 2}
WARM = SamplingParams(temperature=0.9)
request = partial(
    GenerateRequest,
    token_ids=(10, 200, 30),
    seed=23,
    max_new_tokens=LENGTH,
    ignore_eos=True,
    sampling=WARM,
    speculation=SpeculationSettings(num_draft_tokens=3),
)
one = cluster_fixture(TABLE, NEAR)
two = cluster_fixture(TABLE, NEAR, target_flags=RANKED)


def both(one: Cluster, two: Cluster, request: GenerateRequest) -> list[Generation]:
    generations = []
    for cluster in (one, two):
        with cluster.client() as client:
            generations.append(client.generate(request))
    return generations


def service_pid(cluster: Cluster) -> int:
    return cluster.processes["target"].pid


def address_of(cluster: Cluster) -> str:
    return f"127.0.0.1:{cluster.ports['target']}"


def assert_gone(cluster: Cluster, ranks: list[psutil.Process], code: int) -> None:
    assert cluster.processes["target"].wait(GONE_S) == code
    eventually(lambda: not any(rank.is_running() for rank in ranks), "no rank is left", 2)


def test_two_ranks_write_the_text_of_one_and_report_its_prompt(one: Cluster, two: Cluster) -> None:
    narrow = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, logprobs=3)
    for sampling in (SamplingParams(temperature=0), narrow):
        plain, ranked = both(one, two, request(sampling=sampling))
        assert plain.token_ids == ranked.token_ids
        assert len(plain.token_ids) == LENGTH
    prompt = tuple(range(3, 203))
    plain, ranked = both(one, two, GenerateRequest(token_ids=prompt, prompt_logprobs=5, max_new_tokens=1, seed=1))
    assert plain.prompt_logprobs == ranked.prompt_logprobs
    assert [row.token_ids[0] for row in ranked.prompt_logprobs] == [*prompt[1:]]


@pytest.mark.parametrize(
    ("acceptance", "sampling"),
    [(Acceptance.REJECTION, WARM), (Acceptance.BLOCK, SamplingParams(temperature=0.9, top_p=0.7))],
)
async def test_two_ranks_answer_a_round_as_one_does(
    one: Cluster, two: Cluster, acceptance: Acceptance, sampling: SamplingParams
) -> None:
    support = SparseDistribution(tuple(range(20, 220)), (1 / 200,) * 200)
    proposal = Proposal(1, (140, 30, 199), (1 / 200,) * 3, supports=(support,) * 3)
    assert len(support.token_ids) * len(proposal) * 2 > INLINE_INTS, "more than one broadcast holds"
    verdicts = []
    for cluster in (one, two):
        async with linked(target_link(address_of(cluster))) as events:
            events.link.send(target_open(1, (3, 4), sampling=sampling, acceptance=acceptance))
            verdicts.append(await verdict_of(events, first_round(1, (3, 4), proposal)))
    assert verdicts[0].token_ids == verdicts[1].token_ids
    assert verdicts[1].target_probabilities == pytest.approx(verdicts[0].target_probabilities, rel=1e-9)
    assert verdicts[1].residual_masses == pytest.approx(verdicts[0].residual_masses, rel=1e-9)


async def test_a_rank_killed_under_a_text_ends_the_service_and_the_text_goes_on(one: Cluster, two: Cluster) -> None:
    def strike() -> None:
        address = address_of(two)
        (rank,) = ranks_of(service_pid(two))
        assert is_serving(address)
        rank.kill()
        eventually(lambda: not is_serving(address, timeout_s=0.1), "health says so", NOTICED_S)
        assert_gone(two, [rank], 1)
        two.restart("target")

    async with one.async_client() as undisturbed, two.async_client() as client:
        plain = await undisturbed.generate(request())
        resumed = await stream(client, request(), (LENGTH // 3, strike))
    assert resumed.token_ids == plain.token_ids
    assert "rank 1 ended with signal SIGKILL" in two.processes["target"].log_tail(60)
    two.wait_idle()


async def test_an_idle_service_whose_rank_dies_ends_too_and_no_rank_outlives_rank_0(two: Cluster) -> None:
    ranks = ranks_of(service_pid(two))
    ranks[0].send_signal(signal.SIGTERM)
    assert is_serving(address_of(two)), "ranks leave when rank 0 does, not on a signal"
    ranks[0].kill()
    assert_gone(two, ranks, 1)
    two.restart("target")
    ranks = ranks_of(service_pid(two))
    os.kill(service_pid(two), signal.SIGKILL)
    assert_gone(two, ranks, -signal.SIGKILL)


@pytest.mark.parametrize("lost", [full(0), 1])
def test_ranks_that_torchrun_has_started_end_together(tmp_path: Path, lost: int) -> None:
    """Each is in a step that lasts, as a sum on a GPU does that waits for a rank: nothing but the loss ends it."""
    flags: Flags = {"model": f"{TABLE},step_ms=60000", "tensor_parallel_size": 3, "server.port": 0}
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(3):
        environment = {**inherited_environment(), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(ServiceProcess("target", tmp_path, environment=environment, label=f"rank-{rank}"))
        write_config(TargetConfig, ranks[rank].config_file, flags)
        ranks[rank].start()
    try:
        followers = ranks[1:]
        eventually(lambda: all("following: rank" in each.log_tail() for each in followers), "all are loaded", 60)
        time.sleep(NOTICED_S)  # rank 0 has begun to measure steps
        os.kill(ranks[lost].pid, signal.SIGKILL)
        for rank, process in enumerate(ranks):
            code = process.wait(ENDED_S)
            assert code == (-signal.SIGKILL if rank == lost else FAILURE), process.log_tail()
    finally:
        for process in ranks:
            process.kill()


async def test_two_ranks_of_a_decoder_write_what_one_process_does(tmp_path: Path) -> None:
    """Real processes around real layers: sums over gloo, draws from shares, sessions of ragged lengths."""
    model = tiny.random_model(tiny.llama(num_key_value_heads=4))
    save_with_tokenizer(model, tmp_path / "model")
    engine, _ = tiny.engine_and_plain(tiny.llama(num_key_value_heads=4))
    service = ServiceProcess("target", tmp_path)
    flags: Flags = {"model": str(tmp_path / "model"), "engine.threads": 2, "server.port": 0}
    write_config(TargetConfig, service.config_file, flags | RANKED)
    service.start()
    try:
        eventually(lambda: service.address is not None or service.exit_code is not None, "it serves", 120)
        assert service.exit_code is None, service.log_tail()
        assert service.address is not None
        async with linked(target_link(service.address)) as events:
            for session, prefix in ((1, (5, 6, 7)), (2, (9,) * 40)):
                events.link.send(target_open(session, prefix))
                tokens = list(prefix)
                for _ in range(12):
                    round_ = Round(session, len(tokens) - 1, ROOT, (tokens[-1],))
                    verdict = await verdict_of(events, round_)
                    assert verdict.token_ids == plain_token(engine, tokens, session)
                    tokens += verdict.token_ids
        ranks = ranks_of(service.pid)
        os.killpg(service.pid, signal.SIGTERM)
        assert service.wait(GONE_S) == 0, service.log_tail()
        eventually(lambda: not any(rank.is_running() for rank in ranks), "no rank is left", 2)
    finally:
        service.kill()


def plain_token(engine: Engine, tokens: list[int], session: int) -> tuple[int, ...]:
    """The next token by one engine that computes the whole text."""
    engine.open(session, len(tokens))
    (logits,) = engine.step(StepPlan((StepItem(session, 0, tuple(tokens), logit_rows=(len(tokens) - 1,)),)))
    engine.close(session)
    return verify(
        logits, target_open(session, tokens).spec, Round(session, len(tokens) - 1, ROOT, (tokens[-1],))
    ).token_ids


@pytest.mark.full
@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_the_real_model_at_three_ranks_writes_the_text_of_one(tmp_path: Path) -> None:
    """9 heads and 3 KV heads: a degree that isn't a power of two."""
    prompt = partial(
        GenerateRequest,
        prompt="The lighthouse keeper climbed",
        seed=5,
        max_new_tokens=48,
        speculation=SpeculationSettings(drafter="ngram"),
    )
    samplings = [
        SamplingParams(temperature=0.8 * warm, top_p=top_p) for warm, top_p in ((0, 1.0), (1, 1.0), (1, 0.9))
    ]
    texts = []
    for degree in (1, 3):
        flags: Flags = {"tensor_parallel_size": degree, "engine.threads": degree}
        services = Cluster(tmp_path / f"{degree}", "smollm2-135m", drafters=(), target_flags=flags)
        with services, services.client() as client:
            texts.append([client.generate(prompt(sampling=sampling)).token_ids for sampling in samplings])
    assert texts[0] == texts[1]
