"""One request's session on the target beside a link that only records: what is sent, and what is waited for."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from coordinator.sessions.target import MAX_DEATHS, TargetSession
from coordinator.sessions.target_pool import TargetPeer, TargetPool
from coordinator.sessions.verified_round import VerifiedRound
from coordinator.text.sequence import GenerationTask
from paceline.costs.service_costs import DraftCosts, TargetCosts
from paceline.protocol.codec import failure_of
from paceline.protocol.errors import InvalidInput, Overloaded, PeerUnavailable
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.handshake import Fingerprint, Welcome
from paceline.protocol.proposal import ROOT, Acceptance, Proposal
from paceline.protocol.sampling import Grammar, GrammarKind, NoiseKey, SamplingParams
from paceline.protocol.session import Close
from paceline.protocol.target import Round, TargetCommand, TargetOpen, TargetOpened, Verdict
from paceline.rpc.peer_link import TargetLink

PROMPT = (1, 2, 3)
PROPOSAL = Proposal(1, (4, 5), (1.0, 1.0))


class RecordingLink:
    """Stands for a link that is up, to a target that takes leases of `max_lease` rounds."""

    is_up = True
    is_refused = False
    name = "target"
    costs: TargetCosts | DraftCosts = TargetCosts()
    address = "nowhere"
    silent_s = 0.0

    def __init__(self, max_lease: int = 64) -> None:
        self.welcome = Welcome("1", Fingerprint(), 256, 8, max_lease=max_lease)
        self.sent: list[TargetCommand] = []
        self._last_id = 0

    def why_down(self) -> PeerUnavailable:
        return PeerUnavailable("no link to nowhere")

    def next_session_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def send(self, command: TargetCommand, urgent: bool = False) -> None:
        self.sent.append(command)

    async def wait_up(self, timeout_s: float) -> Welcome:
        return self.welcome

    def take(self) -> list[TargetCommand]:
        """What was sent since the last look."""
        sent, self.sent = self.sent, []
        return sent


class Request:
    """Commits whatever its verdicts draw."""

    def __init__(
        self,
        link: RecordingLink,
        acceptance: Acceptance = Acceptance.COUPLED,
        wait_s: float = 10.0,
        sampling: SamplingParams = SamplingParams(),
        round_timeout_s: float = 10.0,
    ) -> None:
        task = GenerationTask(
            prompt=PROMPT,
            resume_token_ids=(),
            sampling=sampling,
            noise=NoiseKey(1),
            acceptance=acceptance,
            max_length=60,
            max_rows=124,
            stop=(),
            eos_token_ids=frozenset(),
            speculation=SpeculationSettings(),
        )
        self.link, self.task = link, task
        self.peer = TargetPeer(cast(TargetLink, link))
        self.pool = TargetPool([self.peer], round_timeout_s=round_timeout_s, wait_s=wait_s)
        self.session = TargetSession(self.pool, task)
        self.ids = [*PROMPT]

    async def round(self, lease: int = 0, proposal: Proposal | None = None) -> VerifiedRound:
        async def dispatched(round_: Round) -> None:
            await asyncio.sleep(0)

        verified = await self.session.verify(self.ids, ROOT, proposal, lease, "", dispatched)
        self.ids += verified.verdict.token_ids
        return verified

    def answer(self, base_length: int, token: int = 7, session: int = 1) -> None:
        """A verdict arrives."""
        cast(Any, self.link).on_event(Verdict(session, base_length, (token,)))

    def lose(self) -> None:
        """The link breaks."""
        cast(Any, self.link).on_down(PeerUnavailable("gone"))

    async def refuse(self, session: int = 1, *, closed: bool = False) -> None:
        """The target refuses something that a session was sent; then its coordinator has done what it does."""
        cast(Any, self.link).on_event(failure_of(session, InvalidInput("rows = 9: must be at most 8"), closed))
        await turns()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def pending(request: Request, lease: int = 0, proposal: Proposal | None = None) -> asyncio.Task[VerifiedRound]:
    """A round that waits for its verdict."""
    task = asyncio.create_task(request.round(lease, proposal))
    await turns()
    return task


def bases(commands: list[TargetCommand]) -> list[tuple[int, int]]:
    """Base length and lease of the rounds among some commands."""
    return [(command.base_length, command.lease) for command in commands if isinstance(command, Round)]


async def test_the_rounds_of_a_run_are_waited_for_and_not_sent() -> None:
    request = Request(RecordingLink())
    first = await pending(request, lease=3)
    assert bases(request.link.take()) == [(2, 3)]
    for base in (2, 3, 4):
        request.answer(base, token=base)
    assert not (await first).self_started
    assert request.session.leased_rounds == 3
    assert (await request.round()).self_started
    assert (await request.round()).verdict.token_ids == (4,)
    last = await pending(request)
    request.answer(5)
    assert (await last).self_started
    assert request.session.leased_rounds == 0
    assert bases(request.link.take()) == []
    behind = await pending(request)
    assert bases(request.link.take()) == [(6, 0)]
    request.answer(6)
    assert not (await behind).self_started


async def test_a_run_is_extended_before_it_ends_and_not_at_every_round() -> None:
    request = Request(RecordingLink())
    for base in range(2, 42):
        task = await pending(request, lease=8)
        request.answer(base)
        await task
    sent = bases(request.link.take())
    assert sent == [(base, 8) for base in range(2, 42, 4)]


async def test_a_target_is_leased_no_more_than_it_takes() -> None:
    request = Request(RecordingLink(max_lease=2))
    task = await pending(request, lease=16)
    assert bases(request.link.take()) == [(2, 2)]
    request.answer(2)
    await task
    silent = Request(RecordingLink(max_lease=0))
    task = await pending(silent, lease=16)
    assert bases(silent.link.take()) == [(2, 0)]
    assert silent.session.leased_rounds == 1, "the round itself"
    silent.answer(2)
    await task


async def test_a_link_lost_in_a_run_keeps_what_has_come_and_sends_the_rest_again() -> None:
    request = Request(RecordingLink())
    first = await pending(request, lease=4)
    for base in (2, 3):
        request.answer(base, token=base)
    await first
    request.link.take()
    request.lose()
    assert (await request.round()).verdict.token_ids == (3,), "what was drawn is not drawn again"
    assert request.link.take() == []
    again = await pending(request, lease=2)
    opened, sent = request.link.take()
    assert isinstance(opened, TargetOpen)
    assert opened.spec.token_ids == (*PROMPT, 2, 3)
    assert bases([sent]) == [(4, 2)]
    request.answer(4, session=2)
    assert not (await again).self_started


async def test_a_link_lost_while_a_run_is_waited_for_opens_anew() -> None:
    request = Request(RecordingLink())
    first = await pending(request, lease=4)
    request.answer(2)
    await first
    second = await pending(request, lease=4)
    request.link.take()
    request.lose()
    for _ in range(5):
        await asyncio.sleep(0)
    opened, sent = request.link.take()
    assert isinstance(opened, TargetOpen)
    assert bases([sent]) == [(3, 4)]
    request.answer(3, session=2)
    assert (await second).round_.base_length == 3


@pytest.mark.parametrize("late", [3, 4])
async def test_verdicts_of_a_run_that_was_closed_are_dropped(late: int) -> None:
    request = Request(RecordingLink())
    first = await pending(request, lease=4)
    request.answer(2)
    await first
    request.session.close()
    assert isinstance(request.link.take()[-1], Close)
    request.answer(late, token=9)
    assert request.session.leased_rounds == 0
    again = await pending(request)
    request.answer(3, token=5, session=2)
    assert (await again).verdict.token_ids == (5,)


@pytest.mark.parametrize("acceptance", list(Acceptance))
async def test_a_round_whose_proposal_is_refused_is_sent_again_without(acceptance: Acceptance) -> None:
    request = Request(RecordingLink(), acceptance)
    told: list[str] = []
    request.session.on_refused = lambda error: told.append(error.message)
    task = await pending(request, proposal=PROPOSAL)
    request.link.take()
    await request.refuse()
    closed, opened, sent = request.link.take()
    assert isinstance(closed, Close)
    assert isinstance(opened, TargetOpen)
    assert isinstance(sent, Round)
    assert (sent.base_length, sent.proposal) == (2, None)
    assert told == ["rows = 9: must be at most 8"]
    request.answer(2, session=2)
    verified = await task
    assert (verified.round_, verified.self_started) == (sent, False)
    again = await pending(request, proposal=PROPOSAL)
    (sent,) = request.link.take()
    assert isinstance(sent, Round)
    assert sent.proposal == PROPOSAL, "of the next round"
    again.cancel()


async def test_a_round_that_carries_nothing_is_refused_for_good() -> None:
    request = Request(RecordingLink())
    task = await pending(request, proposal=PROPOSAL)
    await request.refuse()
    await request.refuse(session=2)
    with pytest.raises(InvalidInput):
        await task


async def test_a_session_that_is_refused_is_not_opened_anew() -> None:
    request = Request(RecordingLink())
    task = await pending(request, proposal=PROPOSAL)
    await request.refuse(closed=True)
    with pytest.raises(InvalidInput):
        await task


@pytest.mark.parametrize("acceptance", list(Acceptance))
async def test_a_verdict_that_may_have_been_drawn_is_not_drawn_without_its_proposal(acceptance: Acceptance) -> None:
    request = Request(RecordingLink(), acceptance)
    task = await pending(request, proposal=PROPOSAL)
    request.lose()
    await turns()
    request.link.take()
    await request.refuse(session=2)
    if acceptance is not Acceptance.COUPLED:
        with pytest.raises(InvalidInput):
            await task
        return
    request.answer(2, session=3)
    assert (await task).round_.proposal is None, "the target's own token, whatever is proposed"


async def test_what_goes_wrong_beside_a_round_is_no_refusal_of_it() -> None:
    request = Request(RecordingLink())

    async def dispatched(round_: Round) -> None:
        raise InvalidInput("a defect")

    with pytest.raises(InvalidInput, match="a defect"):
        await request.session.verify(request.ids, ROOT, PROPOSAL, 0, "", dispatched)
    assert len(request.link.take()) == 2, "the open and the round"


async def test_a_lost_session_goes_to_a_target_whose_bits_are_the_same() -> None:
    first, second = RecordingLink(), RecordingLink()
    first.welcome = second.welcome = Welcome("1", Fingerprint("m", numeric="float32"), 256, 8)
    request = Request(first)
    request.pool.add(other := TargetPeer(cast(TargetLink, second)))
    task = await pending(request)
    request.answer(len(PROMPT) - 1)
    await task
    task = await pending(request)
    first.is_up = False
    request.lose()
    await turns()
    opened, sent = second.take()
    assert isinstance(opened, TargetOpen)
    assert opened.spec.token_ids == tuple(request.ids)
    assert isinstance(sent, Round)
    cast(Any, second).on_event(Verdict(1, len(request.ids) - 1, (9,)))
    assert (await task).verdict.token_ids == (9,)
    assert other.sessions == 1


async def test_a_session_with_verdicts_never_goes_to_a_target_that_computes_in_another_way() -> None:
    first, second = RecordingLink(), RecordingLink()
    first.welcome = Welcome("1", Fingerprint("m", numeric="float32"), 256, 8)
    second.welcome = Welcome("1", Fingerprint("m", numeric="bfloat16"), 256, 8)
    request = Request(first, wait_s=0.05)
    request.pool.add(TargetPeer(cast(TargetLink, second)))
    task = await pending(request)
    request.answer(len(PROMPT) - 1)
    await task
    task = await pending(request)
    first.is_up = False
    request.lose()
    with pytest.raises(PeerUnavailable, match="computes in another way"):
        await task
    assert second.take() == []


async def test_a_target_without_room_sends_the_session_to_another() -> None:
    first, second = RecordingLink(), RecordingLink()
    request = Request(first)
    request.pool.add(TargetPeer(cast(TargetLink, second)))
    task = await pending(request)
    cast(Any, first).on_event(failure_of(1, Overloaded("full", retry_after_ms=60_000), session_closed=True))
    await turns()
    assert [type(each) for each in second.take()] == [TargetOpen, Round]
    cast(Any, second).on_event(Verdict(1, len(PROMPT) - 1, (9,)))
    await task


async def test_a_request_is_refused_when_no_target_has_room() -> None:
    first, second = RecordingLink(), RecordingLink()
    request = Request(first)
    request.pool.add(TargetPeer(cast(TargetLink, second)))
    task = await pending(request)
    cast(Any, first).on_event(failure_of(1, Overloaded("full", retry_after_ms=60_000), session_closed=True))
    await turns()
    cast(Any, second).on_event(failure_of(1, Overloaded("full too", retry_after_ms=60_000), session_closed=True))
    with pytest.raises(Overloaded, match="full too"):
        await task


GRAMMAR = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a+"))


async def test_a_grammar_that_targets_die_of_is_not_sent_for_ever() -> None:
    request = Request(RecordingLink(), sampling=GRAMMAR)
    task = await pending(request)
    for _ in range(MAX_DEATHS):
        request.lose()
        await turns()
        assert not task.done(), "a restart loses no request"
    request.lose()
    with pytest.raises(PeerUnavailable):
        await task
    opened = [command for command in request.link.take() if isinstance(command, TargetOpen)]
    assert len(opened) == 1 + MAX_DEATHS


@pytest.mark.parametrize("sampling", [SamplingParams(), GRAMMAR])
async def test_targets_that_die_of_something_else_are_not_counted(sampling: SamplingParams) -> None:
    request = Request(RecordingLink(), sampling=sampling)
    task = await pending(request)
    for session in range(1, 3 * MAX_DEATHS):
        if sampling.grammar is not None:
            cast(Any, request.link).on_event(TargetOpened(session))
        request.lose()
        await turns()
    request.answer(2, session=3 * MAX_DEATHS)
    assert (await task).verdict.token_ids == (7,)
