"""Outcome drafting over real gRPC: what is sent ahead, when it stops, and what a commit does to it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from draft_service import scheduler
from draft_service.drafters.model import ROWS_PER_STEP
from draft_service.servicer import DraftServicer
from paceline.protocol.draft import Commit, DraftBudget, DraftedProposal, DraftOpened, Verifying
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.session import Close, Failure
from tests.services.expected import own_tokens
from tests.services.harness import (
    Events,
    RecordingEngine,
    draft_link,
    draft_open,
    draft_service,
    eventually,
    linked,
)

PREFIX = (1, 2, 3, 4, 5)
BASE = len(PREFIX) - 1
K3 = DraftBudget(max_tokens=3, fan_out=3)
NONE = DraftBudget()


def commit_of(outcome: Outcome, tokens: list[int], budget: DraftBudget = K3, length: int = len(PREFIX)) -> Commit:
    return Commit(1, outcome, tuple(tokens), length, budget)


@asynccontextmanager
async def drafted(
    budget: DraftBudget = K3, **changes: Any
) -> AsyncIterator[tuple[RecordingEngine, DraftServicer, Events, Proposal]]:
    """A service, and session 1 with its first proposal."""
    engine = RecordingEngine()
    async with draft_service(engine) as (servicer, address), linked(draft_link(address)) as events:
        events.link.send(draft_open(1, PREFIX, budget, **changes))
        proposal = (await events.of(DraftedProposal, 1)).proposal
        yield engine, servicer, events, proposal


async def prepared(events: Events, ready: Callable[[dict[Outcome, Proposal]], bool]) -> dict[Outcome, Proposal]:
    """Collect what is sent ahead for session 1 until there is enough of it."""
    found: dict[Outcome, Proposal] = {}
    while not ready(found):
        event = await events.of(DraftedProposal, 1)
        assert event.outcome is not None
        before = found.get(event.outcome)
        assert before is None or before.proposal_id == event.proposal.proposal_id
        assert before is None or event.proposal.token_ids[: len(before)] == before.token_ids
        found[event.outcome] = event.proposal
    return found


def whole(outcome: Outcome, length: int = 3) -> Callable[[dict[Outcome, Proposal]], bool]:
    return lambda found: outcome in found and len(found[outcome]) == length


PINGS = itertools.count(1000)


async def arrived(events: Events) -> None:
    """All that was sent has been handled, and its answers are here: commands are handled in order."""
    ping = next(PINGS)
    events.link.send(draft_open(ping, PREFIX, NONE, drafter="oracle"))
    await events.of(Failure, ping)


async def settled(events: Events, servicer: DraftServicer) -> dict[Outcome, Proposal]:
    """Let the service work until it rests; returns what it has sent ahead for session 1."""
    await arrived(events)
    working = servicer.scheduler
    await eventually(lambda: not working._speculating and not working.queue_length, "the service rests")
    await arrived(events)
    found: dict[Outcome, Proposal] = {}
    for event in [*events._events]:
        if isinstance(event, DraftedProposal) and event.session_id == 1 and event.outcome is not None:
            found[event.outcome] = event.proposal
            events._events.remove(event)
    return found


async def test_a_hit_was_sent_before_the_commit_and_is_what_would_be_drafted() -> None:
    own = own_tokens(PREFIX, 8)
    async with drafted() as (_, _, events, proposal):
        assert proposal.token_ids == tuple(own[:3])
        events.link.send(Verifying(1, BASE, proposal.proposal_id, 3, budget=K3))
        outcome = Outcome(BASE, 2, own[3])
        ahead = (await prepared(events, whole(outcome)))[outcome]
        assert ahead.token_ids == tuple(own[4:7])
        events.link.send(commit_of(outcome, own[:4]))
        # The next round names it, in part; nothing is sent for it again.
        second = Verifying(1, BASE + 4, ahead.proposal_id, 2, budget=K3)
        events.link.send(second)
        followed = Outcome(BASE + 4, 1, own[6])
        found = await prepared(events, whole(followed))
        assert found[followed].token_ids == tuple(own_tokens([*PREFIX, *own[:7]], 3))
        assert len({each.proposal_id for each in found.values()}) == len(found)


async def test_the_target_itself_is_hit_at_every_round() -> None:
    """A draft that is the target: its own guess at the bonus is the bonus, so every round is a hit."""
    text = [*PREFIX]
    async with drafted() as (_, _, events, proposal):
        for _ in range(5):
            base = len(text) - 1
            events.link.send(Verifying(1, base, proposal.proposal_id, len(proposal), budget=K3))
            own = own_tokens(text, 4)
            assert list(proposal.token_ids) == own[:3]
            outcome = Outcome(base, 2, own[3])
            proposal = (await prepared(events, whole(outcome)))[outcome]
            events.link.send(commit_of(outcome, own, NONE, len(text)))
            text += own


async def test_a_miss_is_drafted_just_in_time() -> None:
    async with drafted() as (_, servicer, events, proposal):
        events.link.send(Verifying(1, BASE, proposal.proposal_id, 3, budget=K3))
        everything = await settled(events, servicer)
        steps = servicer.status().steps
        missed = next(t for t in range(32) if Outcome(BASE, 0, t) not in everything and t != proposal.token_ids[1])
        tokens = [proposal.token_ids[0], missed]
        events.link.send(commit_of(Outcome(BASE, 0, missed), tokens))
        answer = await events.of(DraftedProposal, 1)
        assert answer.outcome == Outcome(BASE, 0, missed)
        assert answer.proposal.token_ids == tuple(own_tokens([*PREFIX, *tokens], 3))
        # The proposal leaves before its last step is counted.
        await eventually(lambda: servicer.status().steps == steps + 3, "three steps, one for each token")


async def test_a_commit_between_two_steps_takes_the_branch_as_it_stands() -> None:
    """The step under way when the commit arrives is the last one, and its rows serve the proposal."""
    own = own_tokens(PREFIX, 8)
    outcome = Outcome(BASE, 2, own[3])
    async with drafted() as (engine, _, events, proposal):
        engine.go.clear()
        engine.entered.clear()
        engine.plans.clear()
        events.link.send(Verifying(1, BASE, proposal.proposal_id, 3, budget=K3))
        await asyncio.to_thread(engine.entered.wait, 10)
        # The first step computes the proposal's last row: nothing was sent for any outcome of it.
        events.link.send(commit_of(outcome, own[:4]))
        await arrived(events)
        engine.go.set()
        answer = None
        while answer is None or answer.outcome != outcome:
            answer = await events.of(DraftedProposal, 1)
        assert answer.proposal.token_ids == tuple(own[4:7])
        # Its root and two tokens were still to be computed, one a step; nothing else was.
        assert [plan.rows for plan in engine.plans[1:]] == [1, 1, 1]


async def test_a_commit_ends_speculation_within_a_step() -> None:
    async with drafted() as (engine, servicer, events, proposal):
        engine.go.clear()
        engine.entered.clear()
        engine.plans.clear()
        events.link.send(Verifying(1, BASE, proposal.proposal_id, 3, budget=K3))
        await asyncio.to_thread(engine.entered.wait, 10)
        events.link.send(commit_of(Outcome(BASE, ROOT, 30), [30], NONE))
        await arrived(events)
        engine.go.set()
        await eventually(lambda: len(engine.plans) == 1, "the step under way ends")
        assert not await settled(events, servicer)
        assert len(engine.plans) == 1


async def test_fan_out_zero_prepares_nothing() -> None:
    async with drafted() as (_, servicer, events, proposal):
        await eventually(lambda: servicer.status().steps == 3, "the proposal's steps are counted")
        events.link.send(Verifying(1, BASE, proposal.proposal_id, 3, budget=DraftBudget(max_tokens=3)))
        assert not await settled(events, servicer)
        assert servicer.status().steps == 3


@pytest.mark.parametrize("inline", [(7, 9), ()], ids=["made elsewhere", "target-only"])
async def test_rounds_that_the_draft_did_not_propose(inline: tuple[int, ...]) -> None:
    """An n-gram proposal, or none at all, is what the outcomes hang from."""
    proposal = Proposal(1, inline, (1.0,) * len(inline)) if inline else None
    async with drafted(DraftBudget(max_tokens=3)) as (_, servicer, events, _):
        events.link.send(Verifying(1, BASE, proposal=proposal, budget=K3))
        found = await settled(events, servicer)
        assert {outcome.node for outcome in found} == set(range(ROOT, len(inline)))
        for outcome, ahead in found.items():
            text = [*PREFIX, *inline[: outcome.node + 1], outcome.next_token]
            assert outcome.next_token not in inline[outcome.node + 1 : outcome.node + 2]
            assert list(ahead.token_ids) == own_tokens(text, len(ahead))
        outcome = Outcome(BASE, len(inline) - 1, own_tokens([*PREFIX, *inline], 1)[0])
        events.link.send(commit_of(outcome, [*inline, outcome.next_token], NONE))
        events.link.send(Verifying(1, BASE + len(inline) + 1, found[outcome].proposal_id, 1, budget=K3))
        assert await prepared(events, lambda found: len(found) > 3)


async def test_a_round_before_the_first_proposal_ends_its_drafting() -> None:
    engine = RecordingEngine()
    async with draft_service(engine, prefill_chunk=4) as (servicer, address), linked(draft_link(address)) as events:
        long = tuple(i % 32 for i in range(60))
        events.link.send(draft_open(1, long, DraftBudget(max_tokens=8)))
        events.link.send(Verifying(1, 59, budget=DraftBudget(max_tokens=2, fan_out=2)))
        found = await settled(events, servicer)
        assert len(found) == 2
        for outcome, ahead in found.items():
            assert list(ahead.token_ids) == own_tokens([*long, outcome.next_token], len(ahead))


async def test_static_and_dynamic_trees_are_prepared() -> None:
    for budget, nodes in (
        (DraftBudget(max_tokens=2, tree_widths=(3, 2), fan_out=2), 9),
        (DraftBudget(max_tokens=3, max_nodes=8, fan_out=2), 8),
    ):
        async with drafted(budget) as (_, servicer, events, tree):
            assert len(tree) == nodes
            events.link.send(Verifying(1, BASE, tree.proposal_id, nodes, budget=budget))
            found = await settled(events, servicer)
            biggest = max(found.values(), key=len)
            assert len(biggest) == nodes
            # The chain of a hit is the target's own text, by the best children.
            own = own_tokens(PREFIX, 5)
            leaf = ROOT
            for token in own[: budget.max_tokens]:
                leaf = next(i for i in range(len(tree)) if tree.parents[i] == leaf and tree.token_ids[i] == token)
            hit = found[Outcome(BASE, leaf, own[budget.max_tokens])]
            assert hit.token_ids[0] == own[budget.max_tokens + 1]


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
async def test_pre_drawn_rules_get_the_draws_of_the_round_to_come(acceptance: Acceptance) -> None:
    async with drafted(acceptance=acceptance) as (_, servicer, events, proposal):
        events.link.send(Verifying(1, BASE, proposal.proposal_id, 3, budget=K3))
        found = await settled(events, servicer)
        assert {outcome.node for outcome in found} == {-1, 0, 1, 2}
        for session, (outcome, ahead) in enumerate(found.items(), start=10):
            text = (*PREFIX, *proposal.token_ids[: outcome.node + 1], outcome.next_token)
            events.link.send(draft_open(session, text, K3, acceptance=acceptance))
            fresh = (await events.of(DraftedProposal, session)).proposal
            assert (ahead.token_ids, ahead.supports) == (
                fresh.token_ids[: len(ahead)],
                fresh.supports[: len(ahead)],
            )
            assert ahead.is_chain


@pytest.mark.parametrize(
    ("command", "reason", "field"),
    [
        (Verifying(1, BASE, 1, 4, budget=K3), "INVALID_INPUT", "node_count = 4: must be at most 3"),
        (Verifying(1, BASE, 99, 1, budget=K3), "INVALID_INPUT", "proposal_id = 99"),
        (Verifying(1, BASE + 1, 1, 3, budget=K3), "PREFIX_MISMATCH", "base_length: expected 4, got 5"),
        (Verifying(1, BASE, proposal=Proposal(1, (40,), (1.0,)), budget=K3), "INVALID_INPUT", "token_ids = 40"),
        (commit_of(Outcome(BASE, 3, 7), [7]), "PREFIX_MISMATCH", "outcome.node: expected in [-1, 2], got 3"),
        (commit_of(Outcome(BASE, 0, 7), [7], length=9), "PREFIX_MISMATCH", "committed_length: expected 5, got 9"),
    ],
)
async def test_malformed_commands_disturb_nobody(command: Any, reason: str, field: str) -> None:
    own = own_tokens(PREFIX, 8)
    async with drafted() as (_, _, events, proposal):
        if isinstance(command, Commit):
            events.link.send(Verifying(1, BASE, proposal.proposal_id, 3, budget=K3))
        events.link.send(command)
        failure = await failed(events)
        assert (failure.reason, failure.session_closed) == (reason, False)
        assert field in failure.message
        events.link.send(Verifying(1, BASE, proposal.proposal_id, 3, budget=K3))
        outcome = Outcome(BASE, 2, own[3])
        assert (await prepared(events, whole(outcome)))[outcome].token_ids == tuple(own[4:7])


async def failed(events: Events) -> Failure:
    await eventually(lambda: any(isinstance(event, Failure) for event in events._events), "a failure")
    failure = next(event for event in events._events if isinstance(event, Failure))
    events._events.remove(failure)
    return failure


async def test_stale_and_repeated_commands() -> None:
    own = own_tokens(PREFIX, 8)
    async with drafted() as (engine, servicer, events, proposal):
        first = Verifying(1, BASE, proposal.proposal_id, 3, budget=K3)
        events.link.send(first)
        found = await settled(events, servicer)
        steps = len(engine.plans)
        events.link.send(first)
        assert not await settled(events, servicer)
        assert len(engine.plans) == steps
        outcome = Outcome(BASE, 2, own[3])
        events.link.send(commit_of(outcome, own[:4], NONE))
        events.link.send(commit_of(outcome, own[:4], NONE))
        assert "committed_length: expected 9, got 5" in (await failed(events)).message
        # A proposal for an outcome that did not come can't be what is verified.
        other = next(each for each in found if each != outcome)
        events.link.send(Verifying(1, BASE + 4, found[other].proposal_id, 1, budget=K3))
        assert f"got {found[other].proposal_id}" in (await failed(events)).message
        events.link.send(Verifying(1, BASE + 4, found[outcome].proposal_id, 3, budget=K3))
        assert await prepared(events, lambda found: len(found) > 3)


async def test_closing_frees_branches() -> None:
    async with drafted() as (engine, servicer, events, proposal):
        engine.go.clear()
        engine.entered.clear()
        events.link.send(Verifying(1, BASE, proposal.proposal_id, 3, budget=K3))
        await asyncio.to_thread(engine.entered.wait, 10)
        events.link.send(Close(1))
        await arrived(events)
        engine.go.set()
        await settled(events, servicer)
        await eventually(lambda: engine.kv_rows == 0, "all rows are free")
        assert servicer.status().sessions == 0
        assert not servicer.scheduler._speculating


async def test_a_step_that_fails_while_speculating_fails_its_session_alone() -> None:
    async with drafted() as (engine, _, events, proposal):
        events.link.send(draft_open(2, PREFIX[:3], NONE))
        await events.of(DraftOpened, 2)
        engine.poison = proposal.token_ids[2]
        events.link.send(Verifying(1, BASE, proposal.proposal_id, 3, budget=K3))
        failure = await failed(events)
        assert (failure.session_id, failure.reason, failure.session_closed) == (1, "INTERNAL", True)
        engine.poison = None
        events.link.send(Commit(2, Outcome(2, ROOT, 4), (4,), 3, DraftBudget(max_tokens=2)))
        assert (await events.of(DraftedProposal, 2)).proposal.token_ids == tuple(own_tokens((*PREFIX[:3], 4), 2))


async def test_sessions_share_steps_and_drafts_come_first() -> None:
    engine = RecordingEngine()
    async with draft_service(engine) as (servicer, address), linked(draft_link(address)) as events:
        for i in range(1, 9):
            events.link.send(draft_open(i, (i, i + 1, i + 2), K3))
        offers = {i: (await events.of(DraftedProposal, i)).proposal for i in range(1, 9)}
        engine.go.clear()
        engine.entered.clear()
        engine.plans.clear()
        for i, offer in offers.items():
            events.link.send(Verifying(i, 2, offer.proposal_id, 3, budget=K3))
        await asyncio.to_thread(engine.entered.wait, 10)
        # A ninth session waits for its proposal meanwhile.
        events.link.send(draft_open(9, PREFIX, K3))
        await arrived(events)
        before = len(engine.plans)
        frames = servicer.status().frames_sent
        engine.go.set()
        assert (await events.of(DraftedProposal, 9)).proposal.token_ids == tuple(own_tokens(PREFIX, 3))
        with_draft = [plan for plan in engine.plans[before:] if plan.items[0].session == 9]
        assert len(with_draft) == 3
        await settled(events, servicer)
    assert max(len(plan.items) for plan in engine.plans) >= 8
    assert max(plan.rows for plan in engine.plans) <= ROWS_PER_STEP + len(PREFIX)
    assert servicer.status().frames_sent - frames <= 2 * len(engine.plans)


async def test_prepared_proposals_after_a_commit_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation of the test above: a scheduler that sends a stopped speculation's results is noticed."""

    def keeps(self: scheduler.DraftScheduler, session: Any) -> None:
        self._drafting.pop(session, None)

    monkeypatch.setattr(scheduler.DraftScheduler, "_stop", keeps)
    with pytest.raises(AssertionError):
        await test_a_commit_ends_speculation_within_a_step()
