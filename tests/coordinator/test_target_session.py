"""One request's session on the target beside a link that only records: what is sent, and what is waited for."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.sessions.target import MAX_DEATHS
from paceline.protocol.errors import InvalidInput, Overloaded, PeerUnavailable, ProtocolMismatch
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from paceline.protocol.session import Close
from paceline.protocol.target import Round, SelfStarted, TargetOpen, TargetOpened, Verdict
from tests.coordinator.requests import PROMPT, NarrowLink, RecordingLink, TargetRequest

PROPOSAL = Proposal(1, (4, 5), (1.0, 1.0))
FULL = Overloaded("full", retry_after_ms=60_000)


def bases(commands: list[Any]) -> list[tuple[int, int]]:
    """Base length and lease of the rounds among some commands."""
    return [(command.base_length, command.lease) for command in commands if isinstance(command, Round)]


async def test_the_rounds_of_a_run_are_waited_for_and_not_sent() -> None:
    request = TargetRequest()
    first = await request.pending(lease=3)
    assert bases(request.link.take()) == [(2, 3)]
    for base in (2, 3, 4):
        request.answer(base, token=base)
    assert not (await first).self_started
    assert request.session.leased_rounds == 3
    assert (await request.round()).self_started
    assert (await request.round()).verdict.token_ids == (4,)
    assert (await request.verify(5)).self_started
    assert request.session.leased_rounds == 0
    assert bases(request.link.take()) == []
    behind = await request.pending()
    assert bases(request.link.take()) == [(6, 0)]
    request.answer(6)
    assert not (await behind).self_started


async def test_a_run_is_extended_before_it_ends_and_not_at_every_round() -> None:
    request = TargetRequest()
    for base in range(2, 42):
        await request.verify(base, lease=8)
    sent = bases(request.link.take())
    assert sent == [(base, 8) for base in range(2, 42, 4)]


@pytest.mark.parametrize(
    ("max_lease", "drafting", "lease"), [(2, False, 2), (0, False, 0), (64, True, 0)], ids=["two", "none", "no mixed"]
)
async def test_a_target_is_leased_no_more_than_it_takes(max_lease: int, drafting: bool, lease: int) -> None:
    request = TargetRequest(RecordingLink(max_lease=max_lease))
    task = await request.pending(lease=16, drafting=drafting)
    (round_,) = request.link.take_only(Round)
    assert (round_.base_length, round_.lease, round_.drafting) == (2, lease, drafting)
    assert request.session.leased_rounds == 1 + lease
    request.answer(2)
    await task


async def test_a_mixed_lease_goes_on_by_the_rounds_that_verdicts_name() -> None:
    request = TargetRequest(RecordingLink(mixed_leases=True))
    first = await request.pending(lease=8, proposal=PROPOSAL, drafting=True)
    assert bases(request.link.take()) == [(2, 8)]
    request.link.on_event(Verdict(1, 2, (4, 5, 6), self_started=SelfStarted(5, 0)))
    assert not (await first).self_started
    assert request.session.leased_rounds == 1, "the one that was named"
    second = await request.pending(lease=8, drafting=True)
    assert bases(request.link.take()) == [], "the lease reaches far enough"
    request.answer(5)
    assert (await second).self_started
    assert request.session.leased_rounds == 0, "none was named, so the target waits"


async def test_verdicts_of_a_mixed_lease_are_read_in_order_however_early_they_come() -> None:
    request = TargetRequest(RecordingLink(mixed_leases=True))
    first = await request.pending(lease=8, drafting=True)
    for base in range(2, 6):
        request.link.on_event(Verdict(1, base, (base,), self_started=SelfStarted(base + 1, 0)))
    request.link.on_event(Verdict(1, 6, (6,)))
    request.link.on_event(Verdict(1, 2, (2,), self_started=SelfStarted(3, 0)))  # of a repeat that extended the lease
    await first
    request.link.take()
    rounds = [await request.round(lease=0, drafting=True) for _ in range(4)]
    assert [each.verdict.token_ids for each in rounds] == [(3,), (4,), (5,), (6,)]
    assert all(each.self_started for each in rounds)
    assert bases(request.link.take()) == [], "none is asked for again"
    assert request.session.leased_rounds == 0


@pytest.mark.parametrize("drafting", [True, False])
async def test_a_mixed_lease_is_extended_by_its_own_kind(drafting: bool) -> None:
    request = TargetRequest(RecordingLink(mixed_leases=True))
    for base in range(2, 9):
        task = await request.pending(lease=8, drafting=drafting or base == 2)
        request.link.on_event(Verdict(1, base, (7,), self_started=SelfStarted(base + 1, 0)))
        await task
    assert bases(request.link.take()) == ([(2, 8), (6, 8)] if drafting else [(2, 8)])


async def test_a_round_that_was_named_elsewhere_is_no_round_of_the_text() -> None:
    request = TargetRequest(RecordingLink(mixed_leases=True))
    task = await request.pending(lease=8, proposal=PROPOSAL, drafting=True)
    request.link.on_event(Verdict(1, 2, (4, 5, 6), self_started=SelfStarted(4, 0)))
    verified = await task
    with pytest.raises(ProtocolMismatch, match="started round 4 by itself behind"):
        request.session.next_after(verified.round_, Outcome(2, 1, 6), verified.verdict)


async def test_a_link_lost_in_a_run_keeps_what_has_come_and_sends_the_rest_again() -> None:
    request = TargetRequest()
    first = await request.pending(lease=4)
    for base in (2, 3):
        request.answer(base, token=base)
    await first
    request.link.take()
    await request.lose()
    assert (await request.round()).verdict.token_ids == (3,), "what was drawn is not drawn again"
    assert request.link.take() == []
    again = await request.pending(lease=2)
    opened, sent = request.link.take()
    assert opened.spec.token_ids == (*PROMPT, 2, 3)
    assert bases([sent]) == [(4, 2)]
    request.answer(4, session=2)
    assert not (await again).self_started


async def test_a_link_lost_while_a_run_is_waited_for_opens_anew() -> None:
    request = TargetRequest()
    await request.verify(2, lease=4)
    second = await request.pending(lease=4)
    request.link.take()
    await request.lose()
    opened, sent = request.link.take()
    assert opened.spec.token_ids == (*PROMPT, 7)
    assert bases([sent]) == [(3, 4)]
    request.answer(3, session=2)
    assert (await second).round_.base_length == 3


async def test_verdicts_of_a_run_that_was_closed_are_dropped() -> None:
    request = TargetRequest()
    await request.verify(2, lease=4)
    request.session.close()
    assert isinstance(request.link.take()[-1], Close)
    for late in (3, 4):
        request.answer(late, token=9)
    assert request.session.leased_rounds == 0
    again = await request.pending()
    request.answer(3, token=5, session=2)
    assert (await again).verdict.token_ids == (5,)


@pytest.mark.parametrize("acceptance", list(Acceptance))
async def test_a_round_whose_proposal_is_refused_is_sent_again_without(acceptance: Acceptance) -> None:
    request = TargetRequest(acceptance=acceptance)
    errors: list[str] = []
    request.session.on_refused = lambda error: errors.append(error.message)
    task = await request.pending(proposal=PROPOSAL)
    request.link.take()
    await request.refuse()
    *reopening, sent = request.link.take()
    assert [type(command) for command in reopening] == [Close, TargetOpen]
    assert (sent.base_length, sent.proposal) == (2, None)
    assert errors == ["rows = 9: must be at most 8"]
    request.answer(2, session=2)
    verified = await task
    assert (verified.round_, verified.self_started) == (sent, False)
    again = await request.pending(proposal=PROPOSAL)
    (following,) = request.link.take()
    assert following.proposal == PROPOSAL
    again.cancel()


@pytest.mark.parametrize("closed", [False, True], ids=["a round that carries nothing", "a session"])
async def test_what_has_nothing_to_leave_out_is_refused_for_good(closed: bool) -> None:
    request = TargetRequest()
    task = await request.pending(proposal=PROPOSAL)
    await request.refuse(closed=closed)
    if not closed:
        await request.refuse(session=2)
    with pytest.raises(InvalidInput):
        await task


@pytest.mark.parametrize("acceptance", list(Acceptance))
async def test_a_verdict_that_may_have_been_drawn_is_not_drawn_without_its_proposal(acceptance: Acceptance) -> None:
    request = TargetRequest(acceptance=acceptance)
    task = await request.pending(proposal=PROPOSAL)
    await request.lose()
    request.link.take()
    await request.refuse(session=2)
    if acceptance is not Acceptance.COUPLED:
        with pytest.raises(InvalidInput):
            await task
        return
    request.answer(2, session=3)
    assert (await task).round_.proposal is None, "the target's own token, whatever is proposed"


async def test_what_goes_wrong_beside_a_round_is_no_refusal_of_it() -> None:
    request = TargetRequest()

    async def dispatched(round_: Round) -> None:
        raise InvalidInput("a defect")

    with pytest.raises(InvalidInput, match="a defect"):
        await request.session.verify(request.ids, ROOT, PROPOSAL, 0, "", dispatched)
    assert request.link.take_kinds() == [TargetOpen, Round]


@pytest.mark.parametrize("numeric", ["float32", "bfloat16"])
async def test_a_session_with_verdicts_goes_only_to_a_target_whose_bits_are_the_same(numeric: str) -> None:
    links = (RecordingLink(fingerprint=Fingerprint("m", numeric=each)) for each in ("float32", numeric))
    request = TargetRequest(*links, wait_s=0.05)
    first, second = request.links
    await request.verify(len(PROMPT) - 1)
    task = await request.pending()
    first.is_up = False
    await request.lose()
    if numeric != "float32":
        with pytest.raises(PeerUnavailable, match="computes in another way"):
            await task
        assert second.take() == []
        return
    opened, _ = second.take()
    assert opened.spec.token_ids == tuple(request.ids)
    request.answer(len(request.ids) - 1, token=9, link=1)
    assert (await task).verdict.token_ids == (9,)
    assert request.pool.peers[1].sessions == 1


@pytest.mark.parametrize("both", [False, True])
async def test_a_target_without_room_sends_the_session_to_another_if_that_has_room(both: bool) -> None:
    request = TargetRequest(RecordingLink(), RecordingLink())
    task = await request.pending()
    await request.refuse(FULL, closed=True)
    assert request.links[1].take_kinds() == [TargetOpen, Round]
    if both:
        await request.refuse(Overloaded("full too", retry_after_ms=60_000), link=1, closed=True)
        with pytest.raises(Overloaded, match="full too"):
            await task
    else:
        request.answer(len(PROMPT) - 1, link=1)
        await task


GRAMMAR = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a+"))


async def test_a_grammar_that_targets_die_of_is_not_sent_for_ever() -> None:
    request = TargetRequest(sampling=GRAMMAR)
    task = await request.pending()
    for _ in range(MAX_DEATHS):
        await request.lose()
        assert not task.done(), "a restart loses no request"
    await request.lose()
    with pytest.raises(PeerUnavailable):
        await task
    assert len(request.link.take_only(TargetOpen)) == 1 + MAX_DEATHS


@pytest.mark.parametrize("sampling", [SamplingParams(), GRAMMAR])
async def test_targets_that_die_of_something_else_are_not_counted(sampling: SamplingParams) -> None:
    request = TargetRequest(sampling=sampling)
    task = await request.pending()
    for session in range(1, 3 * MAX_DEATHS):
        if sampling.grammar is not None:
            request.link.on_event(TargetOpened(session))
        await request.lose()
    request.answer(2, session=3 * MAX_DEATHS)
    assert (await task).verdict.token_ids == (7,)


async def test_a_session_that_is_too_large_for_a_frame_is_not_counted_on_its_peer() -> None:
    request = TargetRequest(NarrowLink(TargetOpen))
    with pytest.raises(InvalidInput, match="bytes of TargetOpen"):
        await request.round()
    request.session.close()
    assert request.pool.peers[0].sessions == 0
