"""The draft service over real gRPC: what it proposes, when, and what it keeps computed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from paceline.protocol.draft import Commit, DraftBudget, DraftedProposal, DraftOpened, Verifying
from paceline.protocol.proposal import ROOT, Acceptance, Outcome
from paceline.protocol.sampling import SamplingParams
from paceline.protocol.session import Close, Failure
from paceline.sampling.distribution import processed_scores, sparse_support, support_scores
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from tests.services.expected import next_token, own_tokens
from tests.services.harness import (
    LAW,
    NOISE,
    SAMPLING,
    Events,
    RecordingEngine,
    draft_link,
    draft_open,
    draft_service,
    eventually,
    linked,
)

PREFIX = (1, 2, 3, 4, 5)
K4 = DraftBudget(max_tokens=4)


def commit_of(session_id: int, text: list[int], node: int, tokens: list[int], budget: DraftBudget = K4) -> Commit:
    outcome = Outcome(len(text) - 1, node, tokens[-1])
    return Commit(session_id, outcome, tuple(tokens), len(text), budget)


async def test_a_coupled_chain_of_the_targets_own_model_is_the_targets_own_text() -> None:
    own = own_tokens(PREFIX, 30)
    text = list(PREFIX)
    async with draft_service(RecordingEngine()) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, K4))
        opened = await events.of(DraftOpened, 1)
        drafted = await events.of(DraftedProposal, 1)
        assert (opened.drafter, drafted.outcome) == ("model", None)
        while len(text) < len(PREFIX) + 20:
            at = len(text) - len(PREFIX)
            assert drafted.proposal.token_ids == tuple(own[at : at + 4])
            assert all(0 < q <= 1 for q in drafted.proposal.draft_probabilities)
            commit = commit_of(1, text, 3, own[at : at + 5])
            events.link.send(commit)
            text += own[at : at + 5]
            drafted = await events.of(DraftedProposal, 1)
            assert drafted.outcome == commit.outcome
    assert drafted.timings.service_ms >= drafted.timings.queue_ms + drafted.timings.forward_ms


async def test_accepted_rows_are_not_computed_again() -> None:
    engine = RecordingEngine()
    own = own_tokens(PREFIX, 8)
    async with draft_service(engine) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, K4))
        await events.of(DraftedProposal, 1)
        engine.plans.clear()
        # Two of four accepted, then a token of the target's that was not drafted.
        events.link.send(commit_of(1, list(PREFIX), 1, [own[0], own[1], 31]))
        drafted = await events.of(DraftedProposal, 1)
    assert drafted.proposal.token_ids == tuple(own_tokens((*PREFIX, own[0], own[1], 31), 4))
    first = engine.plans[0].items[0]
    assert (first.base_length, first.token_ids) == (len(PREFIX) + 2, (31,))


async def test_all_accepted_refills_the_last_drafted_token() -> None:
    engine = RecordingEngine()
    own = own_tokens(PREFIX, 8)
    async with draft_service(engine) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, K4))
        await events.of(DraftedProposal, 1)
        engine.plans.clear()
        events.link.send(commit_of(1, list(PREFIX), 3, own[:5]))
        await events.of(DraftedProposal, 1)
    first = engine.plans[0].items[0]
    assert (first.base_length, first.token_ids) == (len(PREFIX) + 3, (own[3], own[4]))


async def test_a_tree_holds_the_targets_path_and_is_compacted_after_it() -> None:
    engine = RecordingEngine()
    budget = DraftBudget(max_tokens=3, tree_widths=(3, 2))
    own = own_tokens(PREFIX, 5)
    async with draft_service(engine) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, budget))
        tree = (await events.of(DraftedProposal, 1)).proposal
        assert tree.depths == (1,) * 3 + (2,) * 6 + (3,) * 6
        paths = {tuple(tree.token_ids[i] for i in tree.path(node)) for node in range(len(tree))}
        assert tuple(own[:3]) in paths
        # The path through the second child is what was committed: its rows move.
        leaf = next(n for n in range(len(tree)) if tree.depths[n] == 2 and tree.path(n)[0] == 1)
        path = [tree.token_ids[i] for i in tree.path(leaf)]
        engine.plans.clear()
        events.link.send(commit_of(1, list(PREFIX), leaf, [*path, 30], budget))
        drafted = await events.of(DraftedProposal, 1)
        first = engine.plans[0].items[0]
        assert first.kept_rows == tuple(len(PREFIX) + node for node in tree.path(leaf))
        assert first.token_ids == (30,)
        text = [*PREFIX, *path, 30]
        best = [drafted.proposal.token_ids[0], own_tokens(text, 1)[0]]
        assert best[0] == best[1]


async def test_max_nodes_bounds_a_tree() -> None:
    budget = DraftBudget(max_tokens=6, tree_widths=(4, 4, 4), max_nodes=10)
    async with draft_service(RecordingEngine()) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, budget))
        tree = (await events.of(DraftedProposal, 1)).proposal
    assert len(tree) == 10


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
async def test_pre_drawn_rules_get_the_values_that_were_sampled(acceptance: Acceptance) -> None:
    budget = DraftBudget(max_tokens=4, tree_widths=(3, 3))
    async with draft_service(RecordingEngine()) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, budget, acceptance=acceptance))
        proposal = (await events.of(DraftedProposal, 1)).proposal
    assert proposal.is_chain
    assert len(proposal) == len(proposal.supports) == 4
    history = list(PREFIX)
    for token, q, support in zip(proposal.token_ids, proposal.draft_probabilities, proposal.supports, strict=True):
        scores = processed_scores(LAW.logits(history)[np.newaxis], SAMPLING)[0]
        assert support == sparse_support(scores)
        drawn = race(support_scores(support, 32), NOISE, Stream.DRAFT, len(history), len(PREFIX) - 1)
        assert (token, q) == (drawn, support.probability(drawn))
        history.append(token)


async def test_a_commit_during_drafting_ends_it() -> None:
    engine = RecordingEngine()
    own = own_tokens(PREFIX, 8)
    async with draft_service(engine) as (_, address), linked(draft_link(address)) as events:
        engine.go.clear()
        events.link.send(draft_open(1, PREFIX, DraftBudget(max_tokens=40)))
        await asyncio.to_thread(engine.entered.wait, 10)
        commit = commit_of(1, list(PREFIX), ROOT, [own[0]])
        events.link.send(commit)
        # The status shows that the commit has arrived, not only that it was sent.
        events.link.send(draft_open(2, PREFIX, DraftBudget(), drafter="oracle"))
        await events.of(Failure, 2)
        engine.go.set()
        drafted = await events.of(DraftedProposal, 1)
    assert drafted.outcome == commit.outcome
    assert drafted.proposal.token_ids == tuple(own[1:5])
    assert len(engine.plans) <= 1 + 4


async def test_at_the_deadline_what_is_drafted_is_sent() -> None:
    engine = RecordingEngine()
    long = tuple(i % 32 for i in range(180))
    async with draft_service(engine, prefill_chunk=4) as (_, address), linked(draft_link(address)) as events:
        engine.go.clear()
        events.link.send(draft_open(1, long, DraftBudget(max_tokens=8, deadline_ms=100)))
        await asyncio.to_thread(engine.entered.wait, 10)
        # The step in progress outlasts the deadline by far.
        await asyncio.to_thread(engine.go.wait, 0.15)
        engine.go.set()
        drafted = await events.of(DraftedProposal, 1)
        assert len(drafted.proposal) == 0
        assert len(engine.plans) < len(long) // 4
        events.link.send(commit_of(1, list(long), ROOT, [7]))
        drafted = await events.of(DraftedProposal, 1)
    assert drafted.proposal.token_ids == tuple(own_tokens((*long, 7), 4))


async def test_sessions_draft_together_and_a_long_prefix_delays_nobody_by_more_than_a_chunk() -> None:
    engine = RecordingEngine()
    long = tuple(i % 32 for i in range(200))
    async with draft_service(engine, prefill_chunk=8) as (_, address), linked(draft_link(address)) as events:
        engine.go.clear()
        events.link.send(draft_open(1, PREFIX, K4))
        await asyncio.to_thread(engine.entered.wait, 10)
        for i in range(2, 8):
            events.link.send(draft_open(i, (i, i + 1), K4))
        events.link.send(draft_open(8, long, K4))
        events.link.send(draft_open(9, PREFIX, DraftBudget(), drafter="oracle"))
        await events.of(Failure, 9)
        engine.go.set()
        for i in range(2, 8):
            drafted = await events.of(DraftedProposal, i)
            assert drafted.proposal.token_ids == tuple(own_tokens((i, i + 1), 4))
        assert (await events.of(DraftedProposal, 8)).proposal.token_ids == tuple(own_tokens(long, 4))
    longest = [max(len(item.token_ids) for item in plan.items) for plan in engine.plans]
    assert max(longest) <= 8
    assert max(len(plan.items) for plan in engine.plans) >= 7


async def test_no_proposal_is_made_where_none_is_wanted() -> None:
    engine = RecordingEngine()
    async with draft_service(engine) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, DraftBudget()))
        await events.of(DraftOpened, 1)
        events.link.send(commit_of(1, list(PREFIX), ROOT, [9], K4))
        drafted = await events.of(DraftedProposal, 1)
    assert drafted.proposal.token_ids == tuple(own_tokens((*PREFIX, 9), 4))


async def test_greedy_drafts_the_most_probable_token() -> None:
    greedy = SamplingParams(temperature=0.0)
    async with draft_service(RecordingEngine()) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, DraftBudget(max_tokens=1), sampling=greedy))
        proposal = (await events.of(DraftedProposal, 1)).proposal
    assert proposal.token_ids == (int(LAW.logits(PREFIX).argmax()),) == (next_token(PREFIX, sampling=greedy),)
    # How sure it is, which a point mass would not tell: no rule looks at q under coupled acceptance.
    logits = LAW.logits(PREFIX).astype(np.float64)
    assert proposal.draft_probabilities == pytest.approx((1 / np.exp(logits - logits.max()).sum(),))


async def test_drafting_stops_at_the_context() -> None:
    prefix = tuple(i % 32 for i in range(254))
    async with draft_service(RecordingEngine()) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, prefix, DraftBudget(max_tokens=8)))
        assert len((await events.of(DraftedProposal, 1)).proposal) == 2
        events.link.send(commit_of(1, list(prefix), ROOT, [1, 2, 3, 4], DraftBudget(max_tokens=8)))
        assert len((await events.of(DraftedProposal, 1)).proposal) == 0


@pytest.mark.parametrize(
    ("commit", "field"),
    [
        (Commit(1, Outcome(4, ROOT, 7), (7,), 6), "committed_length: expected 5, got 6"),
        (Commit(1, Outcome(4, ROOT, 7), (8,), 5), "outcome.next_token: expected 8, got 7"),
        (Commit(1, Outcome(9, ROOT, 7), (7,), 5), "outcome.base_length: expected 4, got 9"),
        (Commit(1, Outcome(4, 2, 7), (7,), 5), "outcome.node: expected in [-1, 1], got 2"),
    ],
)
async def test_a_commit_that_does_not_follow_is_a_prefix_mismatch(commit: Commit, field: str) -> None:
    async with draft_service(RecordingEngine()) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, K4))
        proposal = (await events.of(DraftedProposal, 1)).proposal
        events.link.send(Verifying(1, 4, proposal.proposal_id, 2))
        events.link.send(commit)
        failure = await events.of(Failure, 1)
        assert (failure.reason, failure.session_closed) == ("PREFIX_MISMATCH", False)
        assert field in failure.message
        events.link.send(commit_of(1, list(PREFIX), 1, [9, 9, 9]))
        assert (await events.of(DraftedProposal, 1)).proposal.token_ids


@pytest.mark.parametrize(
    ("verifying", "reason", "field"),
    [
        (Verifying(1, 9), "PREFIX_MISMATCH", "base_length: expected 4, got 9"),
        (Verifying(1, 4, 99, 1), "INVALID_INPUT", "proposal_id = 99"),
    ],
)
async def test_verifying_is_checked(verifying: Verifying, reason: str, field: str) -> None:
    async with draft_service(RecordingEngine()) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, K4))
        await events.of(DraftedProposal, 1)
        events.link.send(verifying)
        failure = await events.of(Failure, 1)
    assert failure.reason == reason
    assert field in failure.message


@pytest.mark.parametrize(
    ("prefix", "changes", "text"),
    [
        (PREFIX, {"drafter": "oracle"}, "drafter = 'oracle': must be one of: model"),
        ((1, 40), {}, "token_ids = 40"),
        ((1,) * 257, {}, "prefix length = 257: must be at most 256"),
    ],
)
async def test_an_open_that_cannot_be_served(prefix: tuple[int, ...], changes: dict[str, Any], text: str) -> None:
    async with draft_service(RecordingEngine()) as (_, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, prefix, K4, **changes))
        failure = await events.of(Failure, 1)
        assert (failure.reason, failure.session_closed) == ("INVALID_INPUT", True)
        assert text in failure.message
        await still_drafts(events)


async def test_a_failing_step_fails_its_sessions_and_the_service_goes_on() -> None:
    engine = RecordingEngine()
    async with draft_service(engine) as (servicer, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, K4))
        await events.of(DraftedProposal, 1)
        engine.poison = 31
        events.link.send(draft_open(2, (1, 31), K4))
        failure = await events.of(Failure, 2)
        assert (failure.reason, failure.session_closed) == ("INTERNAL", True)
        engine.poison = None
        events.link.send(commit_of(1, list(PREFIX), ROOT, [7]))
        assert (await events.of(DraftedProposal, 1)).proposal.token_ids
        assert servicer.status().sessions == 1


async def test_closing_and_cut_links_free_everything() -> None:
    engine = RecordingEngine()
    async with draft_service(engine) as (servicer, address), linked(draft_link(address)) as events:
        async with linked(draft_link(address)) as cut:
            for i in range(1, 5):
                cut.link.send(draft_open(i, PREFIX, K4))
                await cut.of(DraftedProposal, i)
        events.link.send(draft_open(1, PREFIX, K4))
        await events.of(DraftedProposal, 1)
        await eventually(lambda: servicer.status().sessions == 1, "the cut link's sessions are gone")
        events.link.send(Close(1))
        await eventually(lambda: engine.kv_rows == 0, "all rows are free")
        assert servicer.status().frames_sent > 0
        await still_drafts(events)


async def test_sessions_beyond_the_limit_are_overloaded() -> None:
    async with (
        draft_service(RecordingEngine(), max_num_seqs=1) as (_, address),
        linked(draft_link(address)) as events,
    ):
        events.link.send(draft_open(1, PREFIX, K4))
        events.link.send(draft_open(2, PREFIX, K4))
        failure = await events.of(Failure, 2)
    assert (failure.reason, failure.session_closed) == ("OVERLOADED", True)
    assert failure.retry_after_ms


async def still_drafts(events: Events) -> None:
    events.link.send(draft_open(77, PREFIX, K4))
    drafted = await events.of(DraftedProposal, 77)
    assert drafted.proposal.token_ids == tuple(own_tokens(PREFIX, 4))
