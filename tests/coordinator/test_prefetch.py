"""What is left with the target for a round's outcomes, when, and what a round that it started means to a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from coordinator.drafting.drafting import Drafting
from coordinator.drafting.outcomes import OutcomeProposals, PrefetchCandidate
from coordinator.drafting.prefetch import MAX_PREFETCHED_NODES, Prefetching
from coordinator.sessions.target import TargetSession
from coordinator.sessions.verified_round import VerifiedRound
from paceline.protocol.errors import ProtocolMismatch
from paceline.protocol.proposal import ROOT, Outcome, Proposal
from paceline.protocol.session import Close
from paceline.protocol.target import Prefetch, Round, SelfStarted, TargetOpen, Verdict
from tests.coordinator.requests import RecordingLink, TargetRequest, turns

BASE = 2
ROUND = Round(1, BASE, ROOT, (3,))
SOON_MS = 50.0


def outcome(token: int) -> Outcome:
    return Outcome(BASE, ROOT, token)


def proposal(*tokens: int) -> Proposal:
    return Proposal(1, tokens, (1.0,) * len(tokens))


class Prepared:
    """Stands for a request's drafting: what it has for the round in flight."""

    def __init__(self) -> None:
        self.most = 16
        self.drafts_ahead = True
        self.copies = False
        self.verdict_due_ms = SOON_MS
        self.self_started = False
        self.there: dict[Outcome, PrefetchCandidate] = {}
        self.came: Any = None
        self.round_ = ROUND

    def proposals(self, round_: Round) -> OutcomeProposals | None:
        """What it has for a round, if there may be anything."""
        self.round_ = round_
        return cast(OutcomeProposals, self) if self.most else None

    def on_prepared(self, call: Any) -> None:
        self.came = call

    def due_ms(self, since_verdict_ms: float) -> float:
        return self.verdict_due_ms - (since_verdict_ms if self.self_started else 0.0)

    def candidates(self, *, growing: bool) -> list[PrefetchCandidate]:
        return [each for each in self.there.values() if growing or not each.grows]

    def has(self, token: int, *tokens: int, grows: bool = False) -> None:
        """A proposal has come, or has grown."""
        self.there[outcome(token)] = PrefetchCandidate(outcome(token), proposal(*tokens), grows)
        self.came()


class Recording:
    """Stands for a session on the target."""

    max_prefetched = 64
    verdict_at = 0.0

    def __init__(self) -> None:
        self.sent = asyncio.Queue[Mapping[Outcome, Proposal]]()
        self.after_prefetch: Callable[[], None] = lambda: None

    def prefetch(self, round_: Round, proposals: Mapping[Outcome, Proposal]) -> None:
        self.sent.put_nowait(proposals)
        self.after_prefetch()

    async def next(self) -> dict[int, tuple[int, ...]]:
        """What is sent next: tokens by the outcome's token."""
        sent = await asyncio.wait_for(self.sent.get(), 5)
        return {key.next_token: value.token_ids for key, value in sent.items()}


def watching(most: int = 16, due_ms: float = SOON_MS) -> tuple[Prepared, Recording, Prefetching]:
    drafting, target = Prepared(), Recording()
    drafting.most, drafting.verdict_due_ms = most, due_ms
    return drafting, target, Prefetching(cast(TargetSession, target), cast(Drafting, drafting))


async def test_what_is_whole_leaves_before_what_still_grows() -> None:
    drafting, target, watch = watching()
    watch.watch(drafting.proposals(ROUND))
    drafting.has(7, 1, 2)
    drafting.has(8, 1, grows=True)
    early, last = watch._timers
    assert last.when() - early.when() > 0.09 * SOON_MS / 1e3
    target.after_prefetch = lambda: drafting.has(8, 1, 4, grows=True)
    assert await target.next() == {7: (1, 2)}
    assert await target.next() == {8: (1, 4)}


async def test_what_comes_late_is_prefetched_at_once_and_what_has_grown_again() -> None:
    drafting, target, watch = watching(due_ms=1.0)
    drafting.has(7, 1, grows=True)
    watch.watch(drafting.proposals(ROUND))
    assert await target.next() == {7: (1,)}
    drafting.has(7, 1, 2, grows=True)
    drafting.has(8, 5, grows=True)
    assert await target.next() == {7: (1, 2), 8: (5,)}


async def test_a_round_that_the_target_started_long_before_its_turn_came_is_due_so_much_sooner() -> None:
    drafting, target, watch = watching(due_ms=60_000.0)
    drafting.self_started = True
    target.verdict_at = time.perf_counter() - 60.0
    drafting.has(7, 1, grows=True)
    watch.watch(drafting.proposals(ROUND))
    assert await target.next() == {7: (1,)}
    drafting.has(8, 1)
    assert await target.next() == {8: (1,)}, "nobody knows for how long it waits for its step"


async def test_what_follows_a_match_is_prefetched_with_its_round() -> None:
    drafting, target, watch = watching()
    drafting.drafts_ahead, drafting.copies = False, True
    drafting.has(7, 1, 2)
    watch.watch(drafting.proposals(ROUND))
    assert await target.next() == {7: (1, 2)}
    drafting.has(8, 1)
    await asyncio.sleep(0)
    assert target.sent.empty(), "nothing else is waited for"


async def test_nothing_is_prefetched_for_a_round_that_is_answered() -> None:
    drafting, target, watch = watching(due_ms=0.0)
    watch.watch(drafting.proposals(ROUND))
    drafting.has(7, 1)
    watch.end()
    drafting.has(8, 1)
    watch.watch(drafting.proposals(Round(1, BASE + 1, ROOT, (7,))))
    assert await target.next() == {7: (1,), 8: (1,)}, "by the next round's timer"


async def test_the_likeliest_are_prefetched_as_far_as_the_bytes_go() -> None:
    drafting, target, watch = watching(due_ms=0.0)
    for token in range(20):
        drafting.has(token, *range(8))
    watch.watch(drafting.proposals(ROUND))
    assert list(await target.next()) == list(range(MAX_PREFETCHED_NODES // 8))
    drafting, target, watch = watching(most=3, due_ms=0.0)
    for token in range(20):
        drafting.has(token, 1)
    watch.watch(drafting.proposals(ROUND))
    assert list(await target.next()) == [0, 1, 2]
    drafting, target, watch = watching(most=0, due_ms=0.0)
    drafting.has(7, 1)
    watch.watch(drafting.proposals(ROUND))
    drafting.has(8, 1)
    await turns()
    assert target.sent.empty()


async def test_what_still_grows_leaves_room_for_what_it_grows_by() -> None:
    drafting, target, watch = watching(due_ms=0.0)
    for token in range(20):
        drafting.has(token, 1, 2, 3, grows=True)
    watch.watch(drafting.proposals(ROUND))
    first = [*await target.next()]
    assert first == list(range(MAX_PREFETCHED_NODES // 2 // 3))
    for token in range(20):
        drafting.has(token, 1, 2, 3, 4, grows=True)
    again = await target.next()
    assert again.keys() <= set(first)
    assert len(again) >= 6


async def verified(
    request: TargetRequest, prefetched: Proposal, self_started: SelfStarted, token: int = 7
) -> VerifiedRound:
    """Prefetch a proposal for the first round's outcome; its verdict says what the target started."""
    task = await request.pending()
    request.session.prefetch(ROUND, {outcome(token): prefetched})
    request.link.on_event(Verdict(1, BASE, (token,), self_started=self_started))
    return await task


async def test_a_self_started_round_is_waited_for_and_not_sent() -> None:
    request = TargetRequest()
    first = await verified(request, proposal(4, 5, 6), SelfStarted(BASE + 1, 2))
    assert request.link.take_kinds() == [TargetOpen, Round, Prefetch]
    ahead = request.session.next_after(first.round_, outcome(7), first.verdict)
    assert ahead.self_started == proposal(4, 5)
    assert ahead.leased_rounds == 0
    request.link.on_event(Verdict(1, BASE + 1, (4, 5, 9)))
    second = await (await request.pending(proposal=ahead.self_started))
    assert second.self_started
    assert second.verdict.token_ids == (4, 5, 9)
    assert request.link.take() == []


async def test_a_self_started_round_that_is_lost_is_sent_with_what_it_had() -> None:
    request = TargetRequest()
    first = await verified(request, proposal(4, 5, 6), SelfStarted(BASE + 1, 2))
    self_started = request.session.next_after(first.round_, outcome(7), first.verdict).self_started
    request.link.take()
    await request.lose()
    task = await request.pending(proposal=self_started)
    _, sent = request.link.take()
    assert (sent.base_length, sent.proposal) == (BASE + 1, proposal(4, 5))
    request.link.on_event(Verdict(2, BASE + 1, (4, 5, 9)))
    assert not (await task).self_started


@pytest.mark.parametrize(
    "self_started", [SelfStarted(BASE + 1, 4), SelfStarted(BASE + 2, 2)], ids=["more", "another"]
)
async def test_a_target_that_starts_what_was_not_prefetched_is_refused(self_started: SelfStarted) -> None:
    request = TargetRequest()
    first = await verified(request, proposal(4, 5, 6), self_started)
    with pytest.raises(ProtocolMismatch, match=f"the target started round {self_started.base_length}"):
        request.session.next_after(first.round_, outcome(7), first.verdict)
    with pytest.raises(ProtocolMismatch, match="0 were prefetched"):
        request.session.next_after(first.round_, outcome(8), first.verdict)


BEGUN = proposal(4, 5)
ANOTHER_TREE = Proposal(1, (4, 5, 6), (0.5,) * 3, parents=(ROOT, ROOT, 0))


@pytest.mark.parametrize("other", [proposal(4, 6, 7), ANOTHER_TREE, proposal(4)], ids=["token", "tree", "shorter"])
async def test_what_was_prefetched_grows_and_does_not_change(other: Proposal) -> None:
    """The target may have started what came first: what it then draws behind it was drawn for no other tokens."""
    request = TargetRequest()
    task = await request.pending()
    for each in (BEGUN, other, proposal(4, 5, 6)):
        request.session.prefetch(ROUND, {outcome(7): each, outcome(8): proposal(1)})
    prefetches = [dict(each.proposals) for each in request.link.take_only(Prefetch)]
    assert [each.get(outcome(7)) for each in prefetches] == [BEGUN, None, proposal(4, 5, 6)]
    request.link.on_event(Verdict(1, BASE, (7,), self_started=SelfStarted(BASE + 1, 2)))
    first = await task
    assert request.session.next_after(ROUND, outcome(7), first.verdict).self_started == BEGUN


async def test_nothing_is_sent_for_a_round_that_is_not_in_flight() -> None:
    request = TargetRequest(RecordingLink(max_prefetched=9))
    await verified(request, proposal(4), SelfStarted(BASE + 1, 1))
    request.link.take()
    request.session.prefetch(ROUND, {outcome(7): proposal(4)})
    request.session.prefetch(Round(1, 9, ROOT, (3,)), {Outcome(9, ROOT, 7): proposal(4)})
    assert not request.link.take_only(Prefetch)
    assert request.session.max_prefetched == 9
    request.link.welcome = replace(request.link.welcome, max_prefetched=0)
    assert request.session.max_prefetched == 0, "a target that says nothing of it takes none"


async def test_a_round_for_which_a_prefetch_is_refused_is_sent_again_and_nothing_is_prefetched_for_it() -> None:
    request = TargetRequest()
    task = await request.pending(proposal=proposal(4, 5))
    request.session.prefetch(replace(ROUND, proposal=proposal(4, 5)), {outcome(7): proposal(8)})
    request.link.take()
    await request.refuse()
    *reopening, sent = request.link.take()
    assert [type(command) for command in reopening] == [Close, TargetOpen]
    assert (sent.base_length, sent.proposal) == (BASE, None)
    request.session.prefetch(sent, {outcome(7): proposal(8)})
    assert request.link.take() == []
    request.answer(BASE, session=2)
    assert (await task).verdict.token_ids == (7,)
    following = await request.pending()
    request.session.prefetch(Round(2, BASE + 1, ROOT, (7,)), {Outcome(BASE + 1, ROOT, 9): proposal(8)})
    assert request.link.take_kinds() == [Round, Prefetch]
    following.cancel()
