"""A coordinator that takes calls and answers none: asked by one at a time, ever more rarely, and noticed again."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from paceline.protocol.errors import DeadlineExceeded, PeerUnavailable, Unauthenticated
from paceline_gateway.upstream import coordinators, hang_watch
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.hang_watch import FIRST_PAUSE_S, MAX_PAUSE_S, HangWatch
from tests.gateway.description_service import SteppedTime, describing

NOBODY = HttpCaller("")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedTime:
    stepped = SteppedTime()
    monkeypatch.setattr(hang_watch, "time", stepped)
    return stepped


def hangs(watch: HangWatch, clock: SteppedTime, seconds: float = 2.0) -> None:
    with pytest.raises(DeadlineExceeded), watch.query():
        clock.now += seconds
        raise DeadlineExceeded("2 s")


def refused(watch: HangWatch) -> bool:
    try:
        with watch.query():
            raise AssertionError("asked")
    except PeerUnavailable:
        return True
    except AssertionError:
        return False


def test_a_peer_that_says_something_meanwhile_does_not_hang(clock: SteppedTime) -> None:
    watch = HangWatch()
    with pytest.raises(DeadlineExceeded), watch.query():
        clock.now += 1
        watch.note_answer()
        clock.now += 1
        raise DeadlineExceeded("2 s")
    assert not refused(watch)
    clock.now += 1
    hangs(watch, clock)
    assert refused(watch), "what it said before counts no longer"


def test_pauses_double_up_to_a_limit(clock: SteppedTime) -> None:
    watch, pause = HangWatch(), FIRST_PAUSE_S
    for _ in range(8):
        hangs(watch, clock)
        clock.now += pause - 0.01
        with pytest.raises(PeerUnavailable, match=r"asked again in 0\.0 s"), watch.query():
            pass
        clock.now += 0.02
        pause = min(MAX_PAUSE_S, 2 * pause)
    assert pause == MAX_PAUSE_S


def test_one_asks_and_the_others_are_told_at_once(clock: SteppedTime) -> None:
    watch = HangWatch()
    with watch.query(), watch.query():
        pass
    hangs(watch, clock)
    clock.now += FIRST_PAUSE_S
    with watch.query():
        assert refused(watch)


def test_questions_that_were_asked_together_count_once(clock: SteppedTime) -> None:
    watch = HangWatch()
    with pytest.raises(DeadlineExceeded), watch.query():
        hangs(watch, clock)
        raise DeadlineExceeded("2 s")
    clock.now += FIRST_PAUSE_S
    assert not refused(watch)


@pytest.mark.parametrize("answer", [None, Unauthenticated("a key"), PeerUnavailable("refused")])
def test_any_answer_ends_the_pauses(clock: SteppedTime, answer: Exception | None) -> None:
    watch = HangWatch()
    hangs(watch, clock)
    clock.now += FIRST_PAUSE_S
    with contextlib.suppress(Unauthenticated, PeerUnavailable), watch.query():
        if answer is not None:
            raise answer
    assert not refused(watch)


async def test_health_checks_of_a_hanging_coordinator_cost_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "DESCRIBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(hang_watch, "FIRST_PAUSE_S", 0.3)
    async with describing() as (service, coordinator):
        with pytest.raises(PeerUnavailable):
            await coordinator.describe(NOBODY)
        for _ in range(50):
            with pytest.raises(PeerUnavailable, match=f"{coordinator.address}: it takes calls and does not answer"):
                await coordinator.describe(NOBODY)
        assert len(service.keys) == 1
        service.may_answer.set()
        async with asyncio.timeout(10):
            while len(service.keys) < 2:
                with contextlib.suppress(PeerUnavailable):
                    described = await coordinator.describe(NOBODY)
                await asyncio.sleep(0.02)
        assert (described.name, len(service.keys)) == ("m", 2)
        await asyncio.gather(*(coordinator.describe(NOBODY) for _ in range(5)))
        assert len(service.keys) == 7
