"""What a gateway asks its coordinators about themselves, and how often."""

from __future__ import annotations

import asyncio

import pytest

from paceline.protocol.errors import Unauthenticated
from paceline_gateway.upstream import coordinators
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.coordinators import DESCRIPTION_FRESH_S, MAX_NEW_KEY_QUERIES
from tests.gateway.description_service import DESCRIPTION, WRONG_KEY, SteppedTime, describing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedTime:
    """The coordinators' own."""
    stepped = SteppedTime()
    monkeypatch.setattr(coordinators, "time", stepped)
    return stepped


def key(text: str) -> HttpCaller:
    return HttpCaller("r", api_key=text)


async def test_requests_that_come_at_once_ask_once_for_each_key() -> None:
    async with describing() as (service, coordinator):
        waiting = [asyncio.create_task(coordinator.recent_description(key(text))) for text in "aaabb"]
        await service.came.wait()
        service.may_answer.set()
        assert await asyncio.gather(*waiting) == [DESCRIPTION] * 5
        assert sorted(service.keys) == ["a", "b"]
        assert await coordinator.recent_description(key("a")) == DESCRIPTION
        assert sorted(service.keys) == ["a", "b"], "it is known for a while"


async def test_requests_that_follow_each_other_wait_once(clock: SteppedTime) -> None:
    async with describing() as (service, coordinator):
        service.may_answer.set()
        await coordinator.recent_description(key("a"))
        service.may_answer.clear()
        service.came.clear()
        clock.now += 0.6 * DESCRIPTION_FRESH_S
        for _ in range(3):
            assert await coordinator.recent_description(key("a")) == DESCRIPTION
        await asyncio.wait_for(service.came.wait(), 5)
        assert service.keys == ["a", "a"]
        clock.now += 0.5 * DESCRIPTION_FRESH_S
        waits = asyncio.create_task(coordinator.recent_description(key("a")))
        await asyncio.sleep(0)
        assert not waits.done(), "what is old is not told"
        service.may_answer.set()
        assert await waits == DESCRIPTION
        assert service.keys == ["a", "a"]


async def test_a_request_that_leaves_takes_no_answer_from_the_others() -> None:
    async with describing() as (service, coordinator):
        leaves, stays = (asyncio.create_task(coordinator.recent_description(key("a"))) for _ in range(2))
        await service.came.wait()
        leaves.cancel()
        service.may_answer.set()
        assert await stays == DESCRIPTION
        with pytest.raises(asyncio.CancelledError):
            await leaves


async def test_a_refusal_is_told_to_all_who_wait_and_is_asked_for_again() -> None:
    async with describing() as (service, coordinator):
        service.may_answer.set()
        for asked in (1, 2):
            waiting = [coordinator.recent_description(key(WRONG_KEY)) for _ in range(3)]
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(answer) for answer in answers] == [Unauthenticated] * 3
            assert service.keys == [WRONG_KEY] * asked


async def test_strangers_wait_for_each_other_and_who_is_known_does_not(clock: SteppedTime) -> None:
    async with describing() as (service, coordinator):
        service.may_answer.set()
        await coordinator.recent_description(key("known"))
        service.may_answer.clear()
        invented = [key(f"invented-{number}") for number in range(100)]
        strangers = [asyncio.create_task(coordinator.recent_description(each)) for each in invented]
        while len(service.keys) < 1 + MAX_NEW_KEY_QUERIES:
            service.came.clear()
            await service.came.wait()
        clock.now += DESCRIPTION_FRESH_S
        again = asyncio.create_task(coordinator.recent_description(key("known")))
        while service.keys.count("known") < 2:
            service.came.clear()
            await service.came.wait()
        assert len(service.keys) == 2 + MAX_NEW_KEY_QUERIES
        service.may_answer.set()
        assert (await again).target_ready
        await asyncio.gather(*strangers)
        assert len(service.keys) == 102
