"""Rounds that the target starts with prefetched proposals: the text that sent rounds have, and what goes without."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from paceline.grammars.sessions import Grammars
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol import sampling as t
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import MAX_LEASE, Prefetch, Round, SelfStarted, TargetCommand, Verdict
from paceline.sampling.acceptance import decide
from paceline.v1 import target_service_pb2 as pb
from tests.services.harness import NOISE, Events, chain, eventually, linked_target, target_open, verdict_of
from tests.services.test_lease import END, OWN, PREFIX, SAMPLINGS, PacedEngine, each_with_some, raw, rounds_of, sent
from tests.services.test_target_failures import still_serves

WORDY = t.NoiseKey(21)
"""With it every sampling's text goes on for three rounds at least."""
LAST_RIGHT = {"chain": 1, "tree": 4}
"""The last right node of each shape of proposal."""


def wrong(token: int) -> int:
    return (token + 1) % 32


def proposed(right: Sequence[int], shape: str) -> Proposal:
    """Two right tokens with wrong ones among them."""
    first, second, third = right
    if shape == "chain":
        return chain((first, second, wrong(third)))
    tokens = (wrong(first), first, second, wrong(second), second)
    return Proposal(1, tokens, (1.0,) * 5, (ROOT, ROOT, 0, 1, 1))


def along(text: Sequence[int], shape: str = "chain", session: int = 1) -> list[Round]:
    """Rounds that write a text behind the prefix, three tokens each: two that are proposed and the one after them."""
    rounds = []
    for at in range(0, len(text) - 2, 3):
        so_far = [*PREFIX, *text[:at]]
        node = LAST_RIGHT[shape] if at else ROOT
        rounds.append(Round(session, len(so_far) - 1, node, (so_far[-1],), proposed(text[at : at + 3], shape)))
    return rounds


def prefetch(round_: Round, *behind: Round) -> Prefetch:
    """What lets the target start one of these rounds behind another."""
    base = round_.base_length
    prefetched = [(Outcome(base, each.accepted_node, each.committed[0]), proposal_of(each)) for each in behind]
    return Prefetch(round_.session_id, base, tuple(prefetched))


def proposal_of(round_: Round) -> Proposal:
    assert round_.proposal is not None, "these rounds have one"
    return round_.proposal


def self_started(round_: Round) -> SelfStarted:
    return SelfStarted(round_.base_length, len(proposal_of(round_)))


def written(rounds: Sequence[Round], verdicts: Sequence[Verdict]) -> list[int]:
    decided = [decide(Acceptance.COUPLED, *each, NOISE) for each in zip(rounds, verdicts, strict=True)]
    return [token for decision in decided for token in decision.committed]


@dataclass
class Paced:
    """A target that takes as many steps as the test lets it take, and a link to it."""

    engine: PacedEngine
    events: Events

    async def opened(self, session: int, **facts: Any) -> None:
        if not self.engine.cached_rows:
            self.engine.let(1)  # later sessions share the prefix of the first
        await self.events.open(target_open(session, PREFIX, **facts))

    async def verdict(self, round_: Round, *prefetches: Prefetch) -> Verdict:
        """Send a round with all that is prefetched for it, and let the target take one step."""
        await self.events.handled(round_, *prefetches)
        self.engine.let(1)
        return await self.events.of(Verdict, round_.session_id)

    async def relayed(self, rounds: Sequence[Round]) -> AsyncIterator[Verdict]:
        """The verdicts of rounds: the first is sent, each other prefetched while the one before it is computed."""
        await self.events.handled(rounds[0])
        for round_, behind in zip(rounds, (*rounds[1:], None), strict=True):
            if behind is not None:
                missed = replace(behind, committed=(wrong(behind.committed[0]),), proposal=chain([1] * 9))
                await self.events.handled(prefetch(round_, missed, behind))
            self.engine.let(1)
            verdict = await self.events.of(Verdict, round_.session_id)
            assert verdict.base_length == round_.base_length
            assert verdict.self_started == (self_started(behind) if behind else None)
            yield verdict

    async def begin_prefetched(self) -> None:
        """Bring session 1 to where its second round was started and is in a step that waits."""
        first, second = along(OWN[:6])
        assert (await self.verdict(first, prefetch(first, second))).self_started == self_started(second)
        await self._is_in_a_step()

    async def begin_leased(self) -> None:
        """The same by a lease."""
        await self.verdict(sent(PREFIX, MAX_LEASE))
        await self._is_in_a_step()

    async def _is_in_a_step(self) -> None:
        await eventually(lambda: self.events.servicer.status().queue_length == 0, "its round is in a step")

    async def refuses(self, reason: str, text: str, *commands: TargetCommand) -> None:
        """Session 1 gets a failure for these, and goes on."""
        self.events.send(*commands)
        failure = await self.events.of(Failure, 1)
        assert (failure.reason, failure.session_closed) == (reason, False)
        assert text in failure.message


@asynccontextmanager
async def unopened() -> AsyncIterator[Paced]:
    engine = PacedEngine(steps=0)
    async with linked_target(engine, grammars=Grammars(lambda: TableTokenizer(32, END))) as events:
        yield Paced(engine, events)


@asynccontextmanager
async def paced(**facts: Any) -> AsyncIterator[Paced]:
    """With session 1 opened."""
    async with unopened() as at:
        await at.opened(1, **facts)
        yield at


@pytest.fixture
async def at() -> AsyncIterator[Paced]:
    async with paced() as at:
        yield at


@pytest.mark.parametrize(("name", "shape"), each_with_some([*LAST_RIGHT]))
async def test_self_started_rounds_draw_what_sent_rounds_draw(name: str, shape: str) -> None:
    facts = {"sampling": SAMPLINGS[name], "end_token_ids": (END,), "noise": WORDY}
    async with paced(**facts) as at:
        for session in (2, 3):
            await at.opened(session, **facts)
        own: list[int] = []
        while len(own) < 15 and END not in own:
            own += (await at.verdict(sent([*PREFIX, *own]))).token_ids
        rounds = along(own, shape, session=2)
        relay = [verdict async for verdict in at.relayed(rounds)]
        one_by_one = [await at.verdict(replace(round_, session_id=3)) for round_ in rounds]
    assert len(rounds) >= 3
    assert written(rounds, relay) == own[: 3 * len(rounds)], "the text is the target's own"
    draws = [(verdict.token_ids, verdict.logprobs) for verdict in relay]
    assert draws == [(verdict.token_ids, verdict.logprobs) for verdict in one_by_one]
    computed = [replace(item, session=3) for item in rounds_of(at.engine, 2)]
    assert computed == rounds_of(at.engine, 3)
    assert all(bool(item.kept_rows) == (shape == "tree") for item in computed[1:])


async def test_self_started_rounds_go_on_for_long_and_what_was_answered_is_forgotten(at: Paced) -> None:
    rounds, verdicts = along(OWN), []
    (link,) = at.events.servicer._links
    session = link._sessions[1]
    async for verdict in at.relayed(rounds):
        verdicts.append(verdict)
        assert len(session.run) <= 2
        assert (session.prefetched_rounds, session.next) == ({}, None)
    assert len(verdicts) == 40
    assert written(rounds, verdicts) == OWN


async def test_a_mixed_lease_goes_on_with_what_was_prefetched_and_without(at: Paced) -> None:
    first, second = rounds = along(OWN[:6])
    leased = replace(first, lease=9, drafting=True)
    verdicts = [await at.verdict(leased, prefetch(first, second))]
    at.engine.let(100)
    while verdicts[-1].self_started is not None:
        verdicts.append(await at.events.of(Verdict, 1))
    assert [each.self_started and each.self_started.nodes for each in verdicts] == [3, 0, 0, 0, 0, None]
    text = [*written(rounds, verdicts[:2]), *(each.token_ids[0] for each in verdicts[2:])]
    assert text == OWN[:10]
    assert verdicts[-1].base_length + 1 == leased.first_position + leased.lease, "as far as the lease reaches"
    await still_serves(at.events)
    assert not at.events.has(Verdict)


async def test_what_was_prefetched_before_the_prefix_is_computed_is_started() -> None:
    first, second = rounds = along(OWN[:6])
    async with unopened() as at:
        await at.events.handled(target_open(1, PREFIX), first, prefetch(first, second))
        at.engine.let(100)
        verdicts = [await at.events.of(Verdict, 1) for _ in rounds]
    assert verdicts[0].self_started == self_started(second)
    assert written(rounds, verdicts) == OWN[:6]


async def test_nothing_is_started_for_an_outcome_that_was_not_prefetched(at: Paced) -> None:
    first, second = rounds = along(OWN[:6])
    nodes = [replace(second, accepted_node=node) for node in (ROOT, 0, 2)]
    others = prefetch(first, *nodes, replace(second, committed=(wrong(second.committed[0]),)))
    verdicts = [await at.verdict(first, others)]
    at.engine.let(100)
    await still_serves(at.events)
    assert not at.events.has(Verdict)
    assert len(rounds_of(at.engine, 1)) == 1, "the target waits for the next round"
    verdicts.append(await verdict_of(at.events, second))
    assert verdicts[0].self_started is None
    assert written(rounds, verdicts) == OWN[:6]


@pytest.mark.parametrize("lengths", [(1, 3), (3, 1)])
async def test_a_later_prefetch_takes_the_place_of_an_earlier_one(lengths: Sequence[int], at: Paced) -> None:
    first = sent(PREFIX)
    prefetches = [prefetch(first, Round(1, 5, ROOT, (OWN[0],), chain(OWN[1 : 1 + length]))) for length in lengths]
    assert (await at.verdict(first, *prefetches)).self_started == SelfStarted(5, lengths[-1])
    at.engine.let(1)
    assert (await at.events.of(Verdict, 1)).token_ids == tuple(OWN[1 : 2 + lengths[-1]])


async def test_a_prefetch_for_a_round_that_does_not_wait_is_ignored(at: Paced) -> None:
    first, second, third = along(OWN[:9])
    late, early, last = prefetch(first, second), prefetch(second, third), replace(third, proposal=None)
    await at.events.handled(late)
    verdicts = [await at.verdict(first, early)]
    await at.events.handled(late, early)
    verdicts += [await at.verdict(second, late), await at.verdict(last, late, early)]
    assert [verdict.self_started for verdict in verdicts] == [None] * 3
    assert written([first, second, last], verdicts) == OWN[:7]


def copies(round_: Round) -> list[Round]:
    """The same round as a coordinator may send it: where its proposal comes from is none of the target's business."""
    proposal = proposal_of(round_)
    other = replace(proposal, proposal_id=77, draft_probabilities=(0.5,) * len(proposal), drafter="ngram")
    return [round_, replace(round_, proposal=other)]


def others_than(round_: Round) -> list[Round]:
    proposal = proposal_of(round_)
    flat = replace(proposal, parents=(ROOT,) * len(proposal))
    others = (None, proposal.first(1), chain((*proposal.token_ids, 1)), flat)
    return [replace(round_, proposal=each) for each in others]


async def test_a_self_started_round_that_is_sent_as_well_changes_nothing(at: Paced) -> None:
    """While it is computed it is answered once, and then again without a step, also while the next is computed."""
    second, third = along(OWN[:9])[1:]
    verdicts: list[Verdict] = []
    await at.begin_prefetched()
    await at.events.handled(*copies(second), prefetch(second, third))
    for round_ in (second, third):
        for other in others_than(round_):
            await at.refuses("PREFIX_MISMATCH", "waits for its verdict", other)
        at.engine.let(1)
        verdicts.append(await at.events.of(Verdict, 1))
        await at.events.handled()
        assert not at.events.has(Verdict)
        for copy in copies(round_):
            assert await verdict_of(at.events, copy) == verdicts[-1]
        for other in others_than(round_):
            await at.refuses("PREFIX_MISMATCH", "was answered", other)
    assert [verdict.self_started for verdict in verdicts] == [self_started(third), None]
    assert written([second, third], verdicts) == OWN[3:9]
    assert [item.base_length for item in rounds_of(at.engine, 1)] == [4, 7, 10], "each is computed once"


FORCED = t.SamplingParams(logit_bias=((END, 100.0),))


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"sampling": FORCED, "end_token_ids": (END,)}, False),
        ({"sampling": FORCED, "end_token_ids": (END - 1,)}, True),
        ({"max_length": len(PREFIX) + 1}, False),
        ({"max_length": len(PREFIX) + 2}, True),
    ],
    ids=["end token", "another token", "max_length", "one token before max_length"],
)
async def test_no_round_is_started_behind_the_end_of_the_text(changes: dict[str, Any], begins: bool) -> None:
    behind = [Round(1, 5, ROOT, (token,), chain([1, 2])) for token in (END, OWN[0])]
    async with paced(**changes) as at:
        verdict = await at.verdict(sent(PREFIX), prefetch(sent(PREFIX), *behind))
        at.engine.let(100)
        await still_serves(at.events)
        assert len(rounds_of(at.engine, 1)) == 1 + begins
    assert verdict.self_started == (SelfStarted(5, 2) if begins else None)


async def test_a_prefetched_round_goes_before_the_lease_and_ends_it(at: Paced) -> None:
    leased = [sent([*PREFIX, *OWN[:count]]) for count in range(3)]
    first = replace(leased[0], lease=9)
    prefetched = replace(leased[2], proposal=chain(OWN[2:4]))
    verdicts = [await at.verdict(first)]
    await at.events.handled(prefetch(leased[1], prefetched))
    at.engine.let(2)
    verdicts += [await at.events.of(Verdict, 1) for _ in range(2)]
    await at.events.handled()
    assert not at.events.has(Verdict), "the run is over"
    assert await verdict_of(at.events, replace(leased[1], lease=9)) == verdicts[1], "and stays so"
    behind = Round(1, 9, 1, (verdicts[2].token_ids[-1],))
    verdicts.append(await at.verdict(behind))
    assert [verdict.self_started for verdict in verdicts] == [None, self_started(prefetched), None, None]
    assert written([first, leased[1], prefetched, behind], verdicts) == OWN[:6]


STRAY = replace(sent(PREFIX), proposal=chain([wrong(OWN[0])] * 3))
"""A round that ends at its root."""
GOOD = {"node": ROOT, "next_token": OWN[0], "token_ids": [1, 2]}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"node": 3}, "outcome node = 3: must be in [-1, 2]"),
        ({"next_token": 32}, "committed token_ids = 32: must be in [0, 32)"),
        ({"token_ids": [1, 32]}, "proposal token_ids = 32: must be in [0, 32)"),
        ({"token_ids": []}, "prefetched proposal nodes = 0: must be at least 1"),
        ({"node": 2, "token_ids": [1] * 64}, "KV rows of the session = 73: must be at most 72"),
    ],
)
async def test_a_malformed_prefetch_is_refused_whole_and_harms_nobody(changes: dict[str, Any], text: str) -> None:
    bad = {**GOOD, "next_token": wrong(OWN[0]), **changes}
    after, behind = sent([*PREFIX, OWN[0]]), Round(1, 6, ROOT, (OWN[1],), chain([1, 2]))
    async with paced(max_length=8) as at:
        await at.opened(2)
        await at.events.handled(STRAY)
        raw(at.events, pb.TargetCommand(prefetch={"session_id": 1, "base_length": 4, "proposals": [GOOD, bad]}))
        await at.refuses("INVALID_INPUT", text)
        assert (await at.verdict(STRAY)).self_started is None, "nothing is kept of a prefetch that is refused"
        assert (await at.verdict(after, prefetch(after, behind))).self_started == self_started(behind)
        at.engine.let(100)
        assert (await at.events.of(Verdict, 1)).token_ids[0] == OWN[2]
        assert (await verdict_of(at.events, sent(PREFIX, session=2))).token_ids == (OWN[0],)
        assert at.events.servicer.status().sessions == 2


async def test_all_prefetches_of_a_round_together_have_as_many_outcomes_as_the_welcome_says(at: Paced) -> None:
    missed = [(Outcome(4, node, token), chain([1])) for node in (0, 1) for token in range(32)]
    met = (Outcome(4, ROOT, OWN[0]), chain(OWN[1:3]))
    assert at.events.link.welcome is not None
    assert at.events.link.welcome.max_prefetched == len(missed) == 64
    await at.events.handled(STRAY, Prefetch(1, 4, tuple(missed[:40])))
    too_many = Prefetch(1, 4, (met, *missed[40:]))
    await at.refuses("INVALID_INPUT", "prefetched proposals = 65: must be at most 64", too_many)
    verdict = await at.verdict(STRAY, Prefetch(1, 4, (met, *missed[41:])), Prefetch(1, 4, (met, *missed[:9])))
    assert verdict.self_started == SelfStarted(5, 2), "what is prefetched again counts once"
    at.engine.let(1)
    assert (await at.events.of(Verdict, 1)).token_ids == tuple(OWN[1:4])


async def test_prefetches_and_mixed_leases_are_for_coupled_acceptance() -> None:
    first = sent(PREFIX)
    behind = [Round(1, 5, ROOT, (token,), chain([1, 2])) for token in range(32)]
    async with paced(acceptance=Acceptance.BLOCK) as at:
        await at.refuses("INVALID_INPUT", "lease = 9: must be 0", replace(first, lease=9, drafting=True))
        await at.refuses("INVALID_INPUT", "for coupled acceptance only", first, prefetch(first, *behind))
        verdict = await at.verdict(first)
        assert verdict.self_started is None
        assert (await at.verdict(sent([*PREFIX, *verdict.token_ids]))).base_length == 5


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        pytest.param(Paced.begin_prefetched, "close", id="prefetched, close"),
        pytest.param(Paced.begin_prefetched, "cut link", id="prefetched, cut link"),
        pytest.param(Paced.begin_leased, "time limit", id="leased, time limit"),
    ],
)
async def test_a_session_that_ends_in_a_round_that_the_target_started_frees_its_rows(
    begin: Callable[[Paced], Awaitable[None]], end: str, at: Paced
) -> None:
    rows, status = at.engine.kv_rows, at.events.servicer.status
    async with at.events.another() as other:
        there = replace(at, events=other)
        await there.opened(1, time_left_ms=500 if end == "time limit" else None)
        await begin(there)
        if end == "close":
            await other.handled(Close(1))
        if end == "time limit":
            assert (await other.of(Failure, 1)).reason == "DEADLINE_EXCEEDED"
        assert status().sessions == (2 if end == "cut link" else 1)
    await eventually(lambda: status().sessions == 1, "the session has ended")
    assert at.engine.kv_rows > rows, "its rows are in a step"
    at.engine.let(100)
    await eventually(lambda: at.engine.kv_rows == rows, "its rows are free")
    await still_serves(at.events)
    assert status().queue_length == 0
    assert len(rounds_of(at.engine, 2)) == 2, "the step that ran was its last"
    assert not other.has(Verdict), "nobody waits for the self-started round"


async def test_a_step_that_fails_in_a_self_started_round_fails_its_session_only(at: Paced) -> None:
    rows = at.engine.kv_rows
    await at.opened(2)
    await at.begin_prefetched()
    at.engine.poison = OWN[3]
    at.engine.let(100)
    failure = await at.events.of(Failure, 1)
    at.engine.poison = None
    assert (failure.reason, failure.session_closed) == ("INTERNAL", True)
    await eventually(lambda: at.engine.kv_rows == rows, "the rows are free")
    assert (await verdict_of(at.events, sent(PREFIX, session=2))).token_ids == (OWN[0],)
    await still_serves(at.events)


async def test_no_step_is_held_for_a_session_whose_next_round_has_started(at: Paced) -> None:
    """It is on its way back only when nothing is started behind its last round."""
    batcher = at.events.servicer.scheduler._batcher
    await at.begin_prefetched()
    assert not batcher.is_away(frozenset({1}))
    at.engine.let(100)
    await eventually(lambda: batcher.is_away(frozenset({1})), "its last round is answered")
