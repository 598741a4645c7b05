"""A round that its target never answers: how long it is waited for, and what comes then."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from coordinator.sessions import answers
from coordinator.sessions.answers import MAX_SPARED, AnswerWatch
from paceline.protocol.errors import InvalidInput, PacelineError, PeerUnavailable
from paceline.protocol.session import Close
from paceline.protocol.target import MAX_AT_WORK, AtWork, Round, TargetOpen, TargetOpened
from paceline.rpc.link_kinds import TARGET
from paceline.v1 import target_service_pb2 as target_pb
from tests.coordinator.requests import PROMPT, RecordingLink, TargetRequest

PATIENCE_S = 0.02
BASE = len(PROMPT) - 1


class DroppedLink(RecordingLink):
    """A link that notes why it was given up."""

    dropped: PacelineError | None = None

    def drop(self, error: PacelineError) -> None:
        self.dropped = error
        self.on_down(error)


def named(link: RecordingLink, session: int = 1) -> None:
    """A sign of life names a session."""
    link.on_event(AtWork(session))


class Clock:
    """Moves by hand, so that a slow machine changes nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(answers, "clock", SimpleNamespace(now=lambda: self.now))

    async def pass_half(self) -> None:
        """Half of the patience goes by, and whoever looks at the clock has looked."""
        self.now += PATIENCE_S / 2
        await asyncio.sleep(2 * PATIENCE_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def test_a_session_that_no_sign_of_life_names_is_closed_and_goes_to_another_target(clock: Clock) -> None:
    first, second = RecordingLink(), RecordingLink()
    request = TargetRequest(first, second, round_timeout_s=PATIENCE_S)
    task = await request.pending()
    for _ in range(4):
        await clock.pass_half()
        named(first)
    assert second.take() == [], "at work for twice as long as it may say nothing"
    first.take()
    for _ in range(3):
        await clock.pass_half()
        named(first, session=7)
    assert first.take() == [Close(1)], "what it holds is freed when it hears of it"
    assert second.take_kinds() == [TargetOpen, Round]
    request.answer(BASE)  # too late, from the first one
    assert not task.done()
    request.answer(BASE, token=9, link=1)
    assert (await task).verdict.token_ids == (9,)


async def test_that_test_notices_a_watch_that_any_frame_reassures(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: a link that shows life is waited for, whatever the session."""
    monkeypatch.setattr(AnswerWatch, "_silence_s", lambda watch, link: link.silent_s)
    with pytest.raises(AssertionError, match="what it holds is freed"):
        await test_a_session_that_no_sign_of_life_names_is_closed_and_goes_to_another_target(clock)


async def test_the_error_names_peer_session_round_and_how_long() -> None:
    request = TargetRequest(round_timeout_s=PATIENCE_S, wait_s=0.0)
    task = await request.pending()
    with pytest.raises(PeerUnavailable) as caught:
        await task
    silence = f"is not at work on the session and sent nothing for it for {PATIENCE_S:g} s"
    assert f"target at nowhere {silence}" in str(caught.value)
    facts = caught.value.metadata
    assert (facts["peer"], facts["session"], facts["base_length"]) == ("target", "1", str(BASE))
    assert 0 <= float(facts["unanswered_s"]) < 10
    task = await request.pending()
    request.answer(BASE, session=2)
    assert (await task).verdict.token_ids == (7,), "the next one is served"


async def test_a_link_that_is_silent_as_a_whole_is_dropped() -> None:
    link = DroppedLink()
    link.silent_s = 2 * PATIENCE_S
    request = TargetRequest(link, round_timeout_s=PATIENCE_S, wait_s=0.0)
    with pytest.raises(PeerUnavailable, match="target at nowhere sent nothing for"):
        await (await request.pending())
    assert link.dropped is not None
    assert Close(1) not in link.take(), "the link has told it"


async def test_the_patience_with_a_dead_target_begins_with_its_death() -> None:
    """However long a round has waited before, in a queue or for a prefix."""
    request = TargetRequest(wait_s=PATIENCE_S)
    task = await request.pending()
    await asyncio.sleep(2 * PATIENCE_S)
    await request.lose()
    request.answer(BASE, session=2)
    assert (await task).verdict.token_ids == (7,)


async def held_and_lost(request: TargetRequest, clock: Clock, session: int) -> None:
    """A session is at work for longer than the patience, and then its target dies."""
    request.link.on_event(TargetOpened(session))
    for _ in range(4):
        clock.now += PATIENCE_S / 2
        named(request.link, session)
    await request.lose()


async def test_the_time_at_another_target_is_not_of_the_patience_with_the_first(clock: Clock) -> None:
    request = TargetRequest(wait_s=PATIENCE_S)
    task = await request.pending()
    await request.lose()
    await held_and_lost(request, clock, session=2)
    assert len(request.link.take_only(TargetOpen)) == 3
    request.answer(BASE, session=3)
    assert (await task).verdict.token_ids == (7,)


async def test_a_round_does_not_kill_targets_for_ever(clock: Clock) -> None:
    request = TargetRequest(wait_s=PATIENCE_S)
    task = await request.pending()
    for session in range(1, MAX_SPARED + 1):
        await held_and_lost(request, clock, session)
        assert not task.done()
    await held_and_lost(request, clock, MAX_SPARED + 1)
    with pytest.raises(PeerUnavailable):
        await asyncio.wait_for(task, 5)


async def test_a_target_that_is_not_at_work_spares_nothing(clock: Clock) -> None:
    request = TargetRequest(wait_s=PATIENCE_S)
    task = await request.pending()
    await request.lose()
    request.link.on_event(TargetOpened(2))
    clock.now += 2 * PATIENCE_S
    await request.lose()
    with pytest.raises(PeerUnavailable):
        await asyncio.wait_for(task, 5)


def test_signs_of_life_have_numbers_of_sessions_and_not_without_end() -> None:
    assert [*TARGET.signs(target_pb.VerifyResponse(at_work=[3, 5]))] == [AtWork(3), AtWork(5)]
    with pytest.raises(InvalidInput, match=f"at_work sessions = {MAX_AT_WORK + 1}: must be at most {MAX_AT_WORK}"):
        TARGET.signs(target_pb.VerifyResponse(at_work=[1] * (MAX_AT_WORK + 1)))
