"""Outcome drafting over real gRPC: what is sent ahead, when it stops, and what a commit does to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draft_service import scheduler
from draft_service.drafters.model import ROWS_PER_STEP
from paceline.protocol.draft import Commit, DraftBudget, DraftedProposal, Verifying
from paceline.protocol.proposal import ROOT, Outcome, Proposal
from paceline.protocol.session import Failure
from tests.services.expected import own_tokens
from tests.services.harness import Events, RecordingEngine, draft_open, eventually, linked_draft

PREFIX = (1, 2, 3, 4, 5)
OWN = own_tokens(PREFIX, 10)
BASE = len(PREFIX) - 1
K3 = DraftBudget(max_tokens=3, fan_out=3)
NONE = DraftBudget()


def commit_of(outcome: Outcome, tokens: list[int], budget: DraftBudget = K3, length: int = len(PREFIX)) -> Commit:
    return Commit(1, outcome, tuple(tokens), length, budget)


def leaves(offer: Proposal, nodes: int = 3, base: int = BASE, budget: DraftBudget = K3) -> Verifying:
    """A round leaves with the first nodes of a proposal."""
    return Verifying(1, base, offer.proposal_id, nodes, budget=budget)


@pytest.fixture
async def offer(draft: Events) -> Proposal:
    """The first proposal of session 1."""
    return await draft.proposal(draft_open(1, PREFIX, K3))


Ahead = dict[Outcome, Proposal]


async def prepared(draft: Events, ready: Callable[[Ahead], bool]) -> Ahead:
    """Collect what is sent ahead for session 1 until there is enough of it."""
    ahead: Ahead = {}
    while not ready(ahead):
        event = await draft.of(DraftedProposal, 1)
        assert event.outcome is not None
        before = ahead.get(event.outcome)
        assert before is None or before.proposal_id == event.proposal.proposal_id
        assert before is None or event.proposal.token_ids[: len(before)] == before.token_ids
        ahead[event.outcome] = event.proposal
    return ahead


async def hit(draft: Events, outcome: Outcome, length: int = 3) -> Proposal:
    """What is sent ahead for an outcome, once it is whole."""
    return (await prepared(draft, lambda ahead: len(ahead.get(outcome, ())) == length))[outcome]


async def settled(draft: Events) -> Ahead:
    """Let the service work until it rests; returns what it has sent ahead for session 1, the only one."""
    working = draft.servicer.scheduler
    await draft.handled()
    await eventually(lambda: not working._speculating and not working.queue_length, "the service rests")
    await draft.handled()
    return {each.outcome: each.proposal for each in draft.take_all(DraftedProposal) if each.outcome is not None}


async def test_a_hit_was_sent_before_the_commit_and_is_what_would_be_drafted(draft: Events, offer: Proposal) -> None:
    assert offer.token_ids == tuple(OWN[:3])
    draft.send(leaves(offer))
    outcome = Outcome(BASE, 2, OWN[3])
    ahead = await hit(draft, outcome)
    assert ahead.token_ids == tuple(OWN[4:7])
    # The next round names it, in part; nothing is sent for it again.
    draft.send(commit_of(outcome, OWN[:4]), leaves(ahead, 2, BASE + 4))
    following = Outcome(BASE + 4, 1, OWN[6])
    later = await prepared(draft, lambda ahead: len(ahead.get(following, ())) == 3)
    assert later[following].token_ids == tuple(OWN[7:10])
    assert len({each.proposal_id for each in later.values()}) == len(later)


async def test_a_miss_is_drafted_just_in_time(draft: Events, offer: Proposal) -> None:
    draft.send(leaves(offer))
    ahead = await settled(draft)
    steps = draft.servicer.status().steps
    missed = next(t for t in range(32) if Outcome(BASE, 0, t) not in ahead and t != offer.token_ids[1])
    tokens = [offer.token_ids[0], missed]
    answer = await draft.answer(commit_of(Outcome(BASE, 0, missed), tokens), DraftedProposal)
    assert answer.outcome == Outcome(BASE, 0, missed)
    assert answer.proposal.token_ids == tuple(own_tokens([*PREFIX, *tokens], 3))
    # The proposal leaves before its last step is counted.
    await eventually(lambda: draft.servicer.status().steps == steps + 3, "three steps, one for each token")


async def test_a_commit_between_two_steps_takes_the_branch_as_it_stands(
    engine: RecordingEngine, draft: Events, offer: Proposal
) -> None:
    """The step under way when the commit arrives is the last one, and its rows serve the proposal."""
    outcome = Outcome(BASE, 2, OWN[3])
    engine.plans.clear()
    await engine.hold(draft, leaves(offer))
    # The first step computes the proposal's last row: nothing was sent for any outcome of it.
    await draft.handled(commit_of(outcome, OWN[:4]))
    engine.go.set()
    answer = None
    while answer is None or answer.outcome != outcome:
        answer = await draft.of(DraftedProposal, 1)
    assert answer.proposal.token_ids == tuple(OWN[4:7])
    # Its root and two tokens were still to be computed, one a step; nothing else was.
    assert [plan.rows for plan in engine.plans[1:]] == [1, 1, 1]


async def test_a_commit_ends_speculation_in_a_step(engine: RecordingEngine, draft: Events, offer: Proposal) -> None:
    engine.plans.clear()
    await engine.hold(draft, leaves(offer))
    await draft.handled(commit_of(Outcome(BASE, ROOT, 30), [30], NONE))
    engine.go.set()
    await eventually(lambda: len(engine.plans) == 1, "the step under way ends")
    assert not await settled(draft)
    assert len(engine.plans) == 1


async def test_mutant_prepared_proposals_that_are_sent_after_a_commit_are_noticed(
    engine: RecordingEngine, draft: Events, offer: Proposal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that sends a stopped speculation's results."""

    def keeps(self: scheduler.DraftScheduler, session: Any) -> None:
        self._drafting.pop(session, None)

    monkeypatch.setattr(scheduler.DraftScheduler, "_stop", keeps)
    with pytest.raises(AssertionError):
        await test_a_commit_ends_speculation_in_a_step(engine, draft, offer)


async def test_fan_out_zero_prepares_nothing(draft: Events, offer: Proposal) -> None:
    await eventually(lambda: draft.servicer.status().steps == 3, "the proposal's steps are counted")
    draft.send(leaves(offer, budget=DraftBudget(max_tokens=3)))
    assert not await settled(draft)
    assert draft.servicer.status().steps == 3


@pytest.mark.parametrize("inline", [(7, 9), ()], ids=["made elsewhere", "target-only"])
async def test_rounds_that_the_draft_did_not_propose(inline: tuple[int, ...], draft: Events) -> None:
    """An n-gram proposal, or none at all, is what the outcomes hang from."""
    await draft.proposal(draft_open(1, PREFIX, DraftBudget(max_tokens=3)))
    proposal = Proposal(1, inline, (1.0,) * len(inline)) if inline else None
    draft.send(Verifying(1, BASE, proposal=proposal, budget=K3))
    ahead = await settled(draft)
    assert {outcome.node for outcome in ahead} == set(range(ROOT, len(inline)))
    for outcome, each in ahead.items():
        text = [*PREFIX, *inline[: outcome.node + 1], outcome.next_token]
        assert outcome.next_token not in inline[outcome.node + 1 : outcome.node + 2]
        assert list(each.token_ids) == own_tokens(text, len(each))
    outcome = Outcome(BASE, len(inline) - 1, own_tokens([*PREFIX, *inline], 1)[0])
    draft.send(commit_of(outcome, [*inline, outcome.next_token], NONE))
    draft.send(leaves(ahead[outcome], 1, BASE + len(inline) + 1))
    assert await prepared(draft, lambda ahead: len(ahead) > 3)


async def test_a_round_before_the_first_proposal_ends_its_drafting() -> None:
    long = tuple(i % 32 for i in range(60))
    async with linked_draft(RecordingEngine(), prefill_chunk=4) as draft:
        draft.send(draft_open(1, long, DraftBudget(max_tokens=8)))
        draft.send(Verifying(1, 59, budget=DraftBudget(max_tokens=2, fan_out=2)))
        ahead = await settled(draft)
    assert len(ahead) == 2
    for outcome, proposal in ahead.items():
        assert list(proposal.token_ids) == own_tokens([*long, outcome.next_token], len(proposal))


@pytest.mark.parametrize(
    ("command", "reason", "field"),
    [
        (Verifying(1, BASE, 1, 4, budget=K3), "INVALID_INPUT", "node_count = 4: must be at most 3"),
        (Verifying(1, BASE, 99, 1, budget=K3), "INVALID_INPUT", "proposal_id = 99"),
        (Verifying(1, BASE + 1, 1, 3, budget=K3), "PREFIX_MISMATCH", "base_length: expected 4, got 5"),
        (Verifying(1, BASE, proposal=Proposal(1, (40,), (1.0,)), budget=K3), "INVALID_INPUT", "token_ids = 40"),
        (commit_of(Outcome(BASE, 3, 7), [7]), "PREFIX_MISMATCH", "outcome.node: expected in [-1, 2], got 3"),
        (commit_of(Outcome(BASE, 0, 7), [7], length=9), "PREFIX_MISMATCH", "committed_length: expected 5, got 9"),
        (commit_of(Outcome(BASE, 0, 7), [8]), "PREFIX_MISMATCH", "outcome.next_token: expected 8, got 7"),
        (commit_of(Outcome(9, ROOT, 7), [7]), "PREFIX_MISMATCH", "outcome.base_length: expected 4, got 9"),
    ],
)
async def test_malformed_commands_disturb_nobody(
    command: Any, reason: str, field: str, draft: Events, offer: Proposal
) -> None:
    if isinstance(command, Commit):
        draft.send(leaves(offer))
    await draft.expect_failure(command, reason, field, closed=False)
    draft.send(leaves(offer))
    assert (await hit(draft, Outcome(BASE, 2, OWN[3]))).token_ids == tuple(OWN[4:7])


async def test_stale_and_repeated_commands(engine: RecordingEngine, draft: Events, offer: Proposal) -> None:
    draft.send(leaves(offer))
    ahead = await settled(draft)
    steps = len(engine.plans)
    draft.send(leaves(offer))
    assert not await settled(draft)
    assert len(engine.plans) == steps
    outcome = Outcome(BASE, 2, OWN[3])
    commit = commit_of(outcome, OWN[:4], NONE)
    draft.send(commit)
    await draft.expect_failure(commit, "PREFIX_MISMATCH", "committed_length: expected 9, got 5", closed=False)
    # A proposal for an outcome that did not come can't be what is verified.
    other = ahead[next(each for each in ahead if each != outcome)]
    failure = await draft.answer(leaves(other, 1, BASE + 4), Failure)
    assert f"got {other.proposal_id}" in failure.message
    draft.send(leaves(ahead[outcome], 3, BASE + 4))
    assert await prepared(draft, lambda ahead: len(ahead) > 3)


async def test_a_step_that_fails_while_speculating_fails_its_session_alone(
    engine: RecordingEngine, draft: Events, offer: Proposal
) -> None:
    await draft.open(draft_open(2, PREFIX[:3], NONE))
    engine.poison = offer.token_ids[2]
    await draft.expect_failure(leaves(offer), "INTERNAL", closed=True)
    engine.poison = None
    proposal = await draft.proposal(Commit(2, Outcome(2, ROOT, 4), (4,), 3, DraftBudget(max_tokens=2)))
    assert proposal.token_ids == tuple(own_tokens((*PREFIX[:3], 4), 2))


async def test_sessions_share_steps_and_drafts_come_first(engine: RecordingEngine, draft: Events) -> None:
    draft.send(*(draft_open(i, (i, i + 1, i + 2), K3) for i in range(1, 9)))
    offers = {i: (await draft.of(DraftedProposal, i)).proposal for i in range(1, 9)}
    engine.plans.clear()
    await engine.hold(draft, *(Verifying(i, 2, offer.proposal_id, 3, budget=K3) for i, offer in offers.items()))
    # A ninth session waits for its proposal meanwhile.
    await draft.handled(draft_open(9, PREFIX, K3))
    before = len(engine.plans)
    frames = draft.servicer.status().frames_sent
    engine.go.set()
    assert (await draft.of(DraftedProposal, 9)).proposal.token_ids == tuple(OWN[:3])
    assert sum(plan.items[0].session == 9 for plan in engine.plans[before:]) == 3
    await settled(draft)
    assert max(len(plan.items) for plan in engine.plans) >= 8
    assert max(plan.rows for plan in engine.plans) <= ROWS_PER_STEP + len(PREFIX)
    assert draft.servicer.status().frames_sent - frames <= 2 * len(engine.plans)
