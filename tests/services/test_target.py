"""The target service over real gRPC: verdicts, state, batching, fairness."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from paceline.protocol import codec
from paceline.protocol.proposal import ROOT, Acceptance, Proposal, SparseDistribution
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import Round, TargetOpened, Verdict
from paceline.rpc.channel import open_channel
from paceline.runtime.config import PeerSettings
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from tests.services.expected import next_token, own_tokens
from tests.services.harness import (
    RecordingEngine,
    chain,
    eventually,
    first_round,
    linked,
    target_link,
    target_open,
    target_service,
    verdict_of,
)

PREFIX = (1, 2, 3, 4, 5)


async def test_a_round_is_answered_with_the_targets_own_tokens() -> None:
    own = own_tokens(PREFIX, 4)
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX))
        opened = await events.of(TargetOpened, 1)
        verdict = await verdict_of(events, first_round(1, PREFIX, chain(own[:3])))
    assert opened.reused_tokens == 0
    assert verdict.token_ids == tuple(own)
    assert verdict.base_length == len(PREFIX) - 1
    timings = verdict.timings
    assert (timings.rows, timings.sessions) == (4, 1)
    assert timings.service_ms >= timings.queue_ms + timings.forward_ms + timings.sample_ms
    assert timings.forward_ms > 0


async def test_a_round_sent_with_the_open_waits_for_the_prefix() -> None:
    prefix = tuple(i % 32 for i in range(100))
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, prefix))
        verdict = await verdict_of(events, first_round(1, prefix))
        assert await events.of(TargetOpened, 1)
    assert verdict.token_ids == (next_token(prefix),)


async def test_rounds_go_on_behind_partly_accepted_chains() -> None:
    own = own_tokens(PREFIX, 24)
    text = list(PREFIX)
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX))
        node = ROOT
        while len(text) < len(PREFIX) + 20:
            at = len(text) - len(PREFIX)
            drafted = [own[at], own[at + 1], (own[at + 2] + 1) % 32]
            verdict = await verdict_of(events, Round(1, len(text) - 1, node, (text[-1],), chain(drafted)))
            node = 1
            text += [*drafted[:2], verdict.token_ids[2]]
    assert text[len(PREFIX) :] == own[: len(text) - len(PREFIX)]


async def test_the_accepted_path_of_a_tree_is_compacted() -> None:
    own = own_tokens(PREFIX, 6)
    wrong = [(token + 1) % 32 for token in own]
    # Nodes: 0 wrong, 1 right, 2 below 0, 3 wrong below 1, 4 right below 1.
    tree = Proposal(1, (wrong[0], own[0], own[1], wrong[1], own[1]), (1.0,) * 5, (ROOT, ROOT, 0, 1, 1))
    engine = RecordingEngine()
    async with target_service(engine) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX))
        verdict = await verdict_of(events, first_round(1, PREFIX, tree))
        assert [verdict.token_ids[row] for row in (0, 2, 5)] == own[:3]
        assert verdict.token_ids[1] == next_token([*PREFIX, wrong[0]])
        follow = Round(1, len(PREFIX) + 2, 4, (own[2],), chain(own[3:5], 2))
        assert (await verdict_of(events, follow)).token_ids == tuple(own[3:6])
    assert engine.plans[-1].items[0].kept_rows == (6, 9)


async def test_a_repeated_round_gets_the_same_verdict_without_a_step() -> None:
    engine = RecordingEngine()
    async with target_service(engine) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX))
        round_ = first_round(1, PREFIX, chain([7, 8]))
        first = await verdict_of(events, round_)
        steps = len(engine.plans)
        assert await verdict_of(events, round_) == first
        assert len(engine.plans) == steps


async def test_a_repeated_open_is_a_prefix_mismatch_that_the_session_outlives() -> None:
    """No fault of the request's, so nothing that its client could be told: the coordinator opens another session."""
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX))
        events.link.send(target_open(1, PREFIX))
        failure = await events.of(Failure, 1)
        assert (failure.reason, failure.session_closed) == ("PREFIX_MISMATCH", False)
        assert (await verdict_of(events, first_round(1, PREFIX))).token_ids == (next_token(PREFIX),)


async def test_a_round_repeated_in_flight_is_answered_once() -> None:
    engine = RecordingEngine()
    async with target_service(engine) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX))
        await events.of(TargetOpened, 1)
        engine.go.clear()
        engine.entered.clear()
        round_ = first_round(1, PREFIX)
        events.link.send(round_)
        await asyncio.to_thread(engine.entered.wait, 10)
        events.link.send(round_)
        events.link.send(Round(1, 9, ROOT, (3,)))
        failure = await events.of(Failure, 1)
        engine.go.set()
        verdict = await events.of(Verdict, 1)
        follow = Round(1, len(PREFIX), ROOT, verdict.token_ids)
        assert (await verdict_of(events, follow)).base_length == len(PREFIX)
    assert (failure.reason, failure.session_closed) == ("PREFIX_MISMATCH", False)


@pytest.mark.parametrize(
    ("round_", "field", "expected", "got"),
    [
        (Round(1, 4, ROOT, (5,), chain([9])), "proposal", "None", "Proposal"),
        (Round(1, 9, ROOT, (3,)), "base_length", "5", "9"),
        (Round(1, 2, ROOT, (3,)), "base_length", "5", "2"),
        (Round(1, 5, 3, (3,)), "accepted_node", "in [-1, -1]", "3"),
        (Round(1, 5, ROOT, (-1,)), "first committed token", "", "0"),
    ],
)
async def test_what_does_not_continue_the_session_is_a_prefix_mismatch(
    round_: Round, field: str, expected: str, got: str
) -> None:
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX))
        verdict = await verdict_of(events, first_round(1, PREFIX))
        right = Round(1, 5, ROOT, verdict.token_ids)
        wrong_token = (verdict.token_ids[0] + 1) % 32
        if round_.committed == (-1,):
            round_ = Round(1, 5, ROOT, (wrong_token,))
            expected, got = str(verdict.token_ids[0]), str(wrong_token)
        events.link.send(round_)
        failure = await events.of(Failure, 1)
        assert failure.reason == "PREFIX_MISMATCH"
        assert field in failure.message
        assert expected in failure.metadata["expected"]
        assert got in failure.metadata["got"]
        assert (await verdict_of(events, right)).token_ids == (next_token([*PREFIX, *verdict.token_ids]),)


async def test_a_node_off_the_coupled_path_is_refused() -> None:
    own = own_tokens(PREFIX, 2)
    tree = Proposal(1, ((own[0] + 1) % 32, own[0]), (1.0, 1.0), (ROOT, ROOT))
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX))
        verdict = await verdict_of(events, first_round(1, PREFIX, tree))
        events.link.send(Round(1, len(PREFIX) + 1, 0, (verdict.token_ids[1],)))
        failure = await events.of(Failure, 1)
    assert failure.reason == "PREFIX_MISMATCH"
    assert "accepted_node" in failure.message


async def test_many_sessions_share_one_step() -> None:
    engine = RecordingEngine()
    prefixes = {i: (i, i + 1, i + 2) for i in range(1, 25)}
    async with target_service(engine) as (_, address), linked(target_link(address)) as events:
        for i, prefix in prefixes.items():
            events.link.send(target_open(i, prefix, noise=NoiseKey(i)))
        for i in prefixes:
            await events.of(TargetOpened, i)
        steps = len(engine.plans)
        for i, prefix in prefixes.items():
            events.link.send(first_round(i, prefix), urgent=True)
        verdicts = {i: await events.of(Verdict, i) for i in prefixes}
    assert len(engine.plans) == steps + 1
    for i, prefix in prefixes.items():
        assert verdicts[i].token_ids == (next_token(prefix, NoiseKey(i)),)
        assert verdicts[i].timings.sessions == len(prefixes)


async def test_a_long_prompt_delays_running_rounds_by_one_chunk_at_most() -> None:
    engine = RecordingEngine()
    long = tuple(i % 32 for i in range(200))
    async with target_service(engine, prefill_chunk=8) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX))
        await events.of(TargetOpened, 1)
        engine.plans.clear()
        events.link.send(target_open(2, long))
        text = list(PREFIX)
        while len(engine.plans) < 20:
            verdict = await verdict_of(events, Round(1, len(text) - 1, ROOT, (text[-1],)))
            text += verdict.token_ids
        await events.of(TargetOpened, 2)
    assert text[len(PREFIX) :] == own_tokens(PREFIX, len(text) - len(PREFIX))
    rows = [[len(item.token_ids) for item in plan.items] for plan in engine.plans]
    assert all(sum(each) <= 8 + 1 for each in rows)
    # Every round waited for one chunk and then shared a step with the next: no chunk ran twice in between.
    assert any(len(each) == 2 for each in rows)
    assert sum(sum(each) for each in rows) >= len(long) - 1


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
async def test_verdicts_of_pre_drawn_rules_have_their_parts(acceptance: Acceptance) -> None:
    from paceline.protocol.proposal import SparseDistribution

    support = SparseDistribution((3, 7), (0.5, 0.5))
    proposal = Proposal(1, (3, 7), (0.5, 0.5), supports=(support, support))
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX, acceptance=acceptance))
        verdict = await verdict_of(events, first_round(1, PREFIX, proposal))
        again = await verdict_of(events, first_round(1, PREFIX, proposal))
    assert again == verdict
    assert len(verdict.token_ids) == 3
    assert len(verdict.target_probabilities) == 2
    assert len(verdict.residual_masses) == (2 if acceptance is Acceptance.BLOCK else 0)


async def test_logprobs_start_with_what_may_be_emitted() -> None:
    from paceline.sampling.distribution import row_logprobs
    from tests.services.harness import LAW

    sampling = SamplingParams(temperature=0.5, top_k=3, logprobs=2)
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX, sampling=sampling))
        verdict = await verdict_of(events, first_round(1, PREFIX, chain([9])))
    assert len(verdict.logprobs) == 2
    drawn = verdict.token_ids[0]
    assert verdict.logprobs[0].token_ids[: 1 if drawn == 9 else 2] == tuple(dict.fromkeys((9, drawn)))
    wanted = row_logprobs(LAW.logits(PREFIX), (9, drawn), 2)
    assert verdict.logprobs[0].token_ids == wanted.token_ids
    assert verdict.logprobs[0].logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


async def test_status_tells_sessions_rows_and_steps() -> None:
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX))
        await events.of(TargetOpened, 1)
        channel = open_channel(PeerSettings(address=address))
        stub = pb_grpc.TargetServiceStub(channel)
        reply = await stub.GetTargetStatus(pb.GetTargetStatusRequest(), timeout=5)
        await channel.close()
        status = codec.decode_service_status(reply.status)
        assert (status.sessions, status.steps, status.queue_length) == (1, 1, 0)
        assert status.kv_rows > 0
        assert status.resident_bytes > 1 << 20
        assert status.frames_sent >= 1


async def test_closing_frees_the_kv() -> None:
    engine = RecordingEngine()
    async with target_service(engine) as (servicer, address), linked(target_link(address)) as events:
        for i in (1, 2):
            events.link.send(target_open(i, PREFIX))
            await events.of(TargetOpened, i)
        full = engine.kv_rows
        events.link.send(Close(1))
        await eventually(lambda: engine.kv_rows == full // 2, "half of the rows are free")
        events.link.send(Close(1))
        events.link.send(Close(2))
        await eventually(lambda: engine.kv_rows == 0, "all rows are free")
        assert servicer.status().sessions == 0


async def test_under_rejection_a_repeated_round_must_have_the_same_draft_probabilities() -> None:
    support = SparseDistribution((4, 9), (0.5, 0.5))
    proposal = Proposal(1, (9,), (0.5,), supports=(support,))
    async with target_service(RecordingEngine()) as (_, address), linked(target_link(address)) as events:
        events.link.send(target_open(1, PREFIX, acceptance=Acceptance.REJECTION))
        verdict = await verdict_of(events, first_round(1, PREFIX, proposal))
        assert await verdict_of(events, first_round(1, PREFIX, replace(proposal, proposal_id=2))) == verdict
        events.link.send(first_round(1, PREFIX, replace(proposal, draft_probabilities=(0.5000002384185791,))))
        assert (await events.of(Failure, 1)).reason == "PREFIX_MISMATCH"
