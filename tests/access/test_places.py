"""Places that tenants share: whoever floods leaves room for those who come later."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from paceline.access import places as module
from paceline.access.places import Places, RunningPlaces
from paceline.protocol.errors import Overloaded

MOST = 100


def flood(places: Places, tenant: str) -> int:
    """Take places until one is refused; returns how many there were."""
    taken = 0
    try:
        while True:
            places.take(tenant)
            taken += 1
    except Overloaded:
        return taken


@pytest.mark.parametrize("kind", [Places, RunningPlaces])
def test_without_a_tenant_s_name_every_place_of_the_limit_is_to_be_had(kind: type[Places]) -> None:
    places = kind("max_queue", MOST, 200)
    assert flood(places, "") == MOST == len(places)
    with pytest.raises(Overloaded, match="max_queue = 100: all are taken") as caught:
        places.check("")
    assert caught.value.retry_after_ms == 200
    places.give_back("")
    places.take("somebody")
    for tenant in ("somebody", *[""] * (MOST - 1)):
        places.give_back(tenant)
    assert (len(places), dict(places._counts)) == (0, {}), "nothing is kept of them"


@pytest.mark.parametrize(("kind", "alone"), [(Places, 80), (RunningPlaces, MOST)])
def test_who_floods_leaves_a_quarter_as_many_and_is_told_why(kind: type[Places], alone: float) -> None:
    places = kind("max_queue", MOST, 200)
    assert flood(places, "flood") == alone
    with pytest.raises(Overloaded, match=f"the key has {alone:g} of them, and the rest is for others"):
        places.take("flood")
    assert flood(places, "other") == alone / 5


@pytest.mark.parametrize("kind", [Places, RunningPlaces])
@pytest.mark.parametrize("floods", [2, 20, *(pytest.param(floods, marks=pytest.mark.full) for floods in (1, 5))])
def test_there_is_a_place_for_whoever_comes_next_however_many_flood(floods: int, kind: type[Places]) -> None:
    """Requests end in any order and each flood takes what it may at once; a newcomer comes at any time."""
    source = random.Random(floods)
    names = [f"flood {number}" for number in range(floods)]
    places = kind("max_queue", MOST, 200)
    places_of = {name: flood(places, name) for name in names}
    for _ in range(2000):
        ended = source.choices(names, [places_of[name] for name in names])[0]
        places.give_back(ended)
        places_of[ended] -= 1
        places.check("newcomer")
        for name in source.sample(names, floods):
            places_of[name] += flood(places, name)
    most = max(places_of.values())
    assert most - min(places_of.values()) <= 0.25 * most + 2, "and all floods have about as much"
    assert sum(places_of.values()) >= (MOST if kind is RunningPlaces else MOST * 0.79), "of what there is"


@pytest.mark.parametrize("most", range(1, 12))
def test_one_tenant_has_all_places_to_run_in_and_no_other_however_few_there_are(most: int) -> None:
    places = RunningPlaces("max_concurrent_requests", most, 200)
    assert flood(places, "flood") == most
    places.take("newcomer")


class Requests:
    """Requests that run until they are told to end."""

    def __init__(self, places: RunningPlaces) -> None:
        self._places = places
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ends: dict[int, asyncio.Event] = {}
        self.running: dict[int, str] = {}
        self.began: list[str] = []

    async def ask(self, tenant: str, times: int = 1) -> None:
        """So many come, one after the other."""
        for _ in range(times):
            number = len(self._tasks)
            self._ends[number] = asyncio.Event()
            self._tasks[number] = asyncio.create_task(self._run(number, tenant))
            await turns()

    async def end(self, choose: Callable[[str], bool] = lambda tenant: True) -> str:
        """The first that runs, and is chosen, ends; returns whose it was."""
        number = next(each for each, tenant in self.running.items() if choose(tenant))
        tenant = self.running[number]
        self._ends[number].set()
        await self._tasks[number]
        await turns()
        return tenant

    async def leave(self, number: int) -> None:
        """A request is cancelled."""
        self._tasks[number].cancel()
        await turns()

    async def close(self) -> list[BaseException | None]:
        for task in self._tasks.values():
            task.cancel()
        return await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, number: int, tenant: str) -> None:
        async with self._places.place(tenant):
            self.running[number] = tenant
            self.began.append(tenant)
            try:
                await self._ends[number].wait()
            finally:
                del self.running[number]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def flooded(most: int) -> AsyncIterator[Requests]:
    """All places are one tenant's; in the end every place is free."""
    places = RunningPlaces("max_concurrent_requests", most, 200)
    requests = Requests(places)
    await requests.ask("flood", most)
    assert len(requests.running) == most
    try:
        yield requests
    finally:
        await requests.close()
    assert len(places) == 0
    assert not places._running
    assert not places._waiting


async def test_a_second_tenant_waits_for_one_end_and_is_served_before_the_flood() -> None:
    async with flooded(8) as requests:
        await requests.ask("calm")
        assert "calm" not in requests.running.values()
        for _ in range(3):
            await requests.ask("flood")  # refused, or behind it
        await requests.end()
        assert Counter(requests.running.values()) == {"flood": 7, "calm": 1}


async def test_places_go_to_who_runs_least_until_all_run_as_many() -> None:
    """Both ask for more than they get; the places that end are the first tenant's, as long as it has more."""
    async with flooded(8) as requests:
        for _ in range(12):
            await requests.ask("calm", 2)
            await requests.ask("flood", 2)
            await requests.end()
            assert len(requests.running) == 8, "nothing stays free"
        counts = Counter(requests.running.values())
        assert abs(counts["flood"] - counts["calm"]) <= 2, counts


async def test_who_came_first_begins_first_of_those_that_run_as_little() -> None:
    async with flooded(16) as requests:
        for tenant in ("a", "b", "c"):
            await requests.ask(tenant)
        for _ in range(3):
            await requests.end(lambda tenant: tenant == "flood")
        assert requests.began[-3:] == ["a", "b", "c"]


async def test_a_newcomer_waits_for_one_end_and_one_for_each_other_newcomer() -> None:
    """However many requests of theirs wait before it."""
    async with flooded(MOST) as requests:
        await requests.ask("eager", 30)
        await requests.ask("calm")
        for _ in range(2):
            await requests.end()
        assert requests.began[MOST:] == ["eager", "calm"]


async def test_one_that_leaves_while_it_waits_or_as_its_turn_comes_keeps_no_place() -> None:
    async with flooded(8) as requests:
        await requests.ask("calm", 2)
        await requests.leave(8)
        ending = asyncio.create_task(requests.end())
        for _ in range(20):
            if len(requests.running) < 8:
                break
            await asyncio.sleep(0)
        await requests.leave(9)
        await ending
        await requests.ask("other")
        assert Counter(requests.running.values()) == {"flood": 7, "other": 1}


@pytest.mark.parametrize("kind", [Places, RunningPlaces])
def test_the_newcomer_s_test_notices_first_come_first_served(
    monkeypatch: pytest.MonkeyPatch, kind: type[Places]
) -> None:
    monkeypatch.setattr(module, "SHARE_OF_FREE", MOST)
    with pytest.raises((AssertionError, Overloaded)):
        test_there_is_a_place_for_whoever_comes_next_however_many_flood(20, kind)


async def test_the_newcomer_s_wait_notices_turns_by_age_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "min", lambda waiting, key: waiting[0], raising=False)
    with pytest.raises(AssertionError):
        await test_a_newcomer_waits_for_one_end_and_one_for_each_other_newcomer()
