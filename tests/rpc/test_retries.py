"""Tries again: how long between them, how many, and what many callers of ours do to a service that is back."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

from paceline.protocol.errors import Overloaded, PacelineError, PeerUnavailable
from paceline.rpc import retries
from paceline.rpc.retries import MOST_S, RETRIES_PER_MINUTE, Backoff, Retries, RetryBudget

FULL = Overloaded("full", retry_after_ms=500)
GONE = PeerUnavailable("gone")


class Crowd:
    """A service with room for `capacity` requests, each of which takes `seconds`, and its callers' streams.

    It is in virtual time. `tries` has how many came in which second, `served` when each stream had its answer.
    """

    def __init__(self, capacity: int, seconds: float, away: tuple[float, float] = (-1.0, -1.0)) -> None:
        self._capacity, self._seconds, self._away = capacity, seconds, away
        self._source = random.Random(1)
        self._now, self._running = 0.0, 0
        self.tries: Counter[int] = Counter()
        self.served: list[float] = []

    def run(self, callers: int, begins: Sequence[float], patience_s: float, end: float) -> None:
        """Let streams begin at these times, as many of each caller, and be patient for so long."""
        budgets = [RetryBudget(lambda: self._now) for _ in range(callers)]
        due = []
        for place, begin in enumerate(begins):
            tries = Retries(budgets[place % callers], self._source.uniform)
            due.append((begin, place, self._stream(tries, patience_s)))
        order = itertools.count(len(due))
        heapq.heapify(due)
        while due and due[0][0] <= end:
            self._now, _, stream = heapq.heappop(due)
            with suppress(StopIteration, PacelineError):
                heapq.heappush(due, (self._now + next(stream), next(order), stream))

    def _stream(self, retries: Retries, patience_s: float) -> Iterator[float]:
        """One request, tried as the clients try: yields how long it waits."""
        gives_up = self._now + patience_s
        while error := self._refusal():
            if self._now >= gives_up:
                return
            yield from retries.pauses(error, gives_up - self._now)
        self._running += 1
        yield self._seconds
        self._running -= 1
        self.served.append(self._now)
        retries.note_success()

    def _refusal(self) -> PacelineError | None:
        self.tries[int(self._now)] += 1
        if self._away[0] <= self._now < self._away[1]:
            return GONE
        return FULL if self._running >= self._capacity else None


def test_pauses_are_drawn_below_a_bound_that_doubles() -> None:
    bounds: list[tuple[float, float]] = []

    def longest(low: float, high: float) -> float:
        bounds.append((low, high))
        return high

    backoff = Backoff(0.1, 1.0, longest)
    assert [backoff.next_s() for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert {low for low, _ in bounds} == {0.0}, "the whole of it is drawn"
    backoff.reset()
    assert backoff.next_s(longest=True) == 1.0
    assert backoff.next_s() == pytest.approx(0.2)


def test_a_hint_is_never_undercut_and_those_who_had_it_come_apart() -> None:
    source = random.Random(5)
    pauses = sorted(Backoff(draw=source.uniform).next_s(500) for _ in range(1000))
    assert pauses[0] >= 0.5
    assert pauses[-1] <= 1.0
    busiest = max(Counter(int(pause * 100) for pause in pauses).values())
    assert busiest < 50, "a thousand who were told the same spread over half a second: twenty in 10 ms"


def test_a_hint_beyond_the_time_that_is_left_ends_the_tries_at_once() -> None:
    with pytest.raises(Overloaded, match="full"):
        next(Retries().pauses(FULL, left_s=0.4))
    assert 0.5 <= next(Retries().pauses(FULL, left_s=0.6)) <= 0.6


def test_a_budget_has_so_many_a_minute_and_one_for_each_success() -> None:
    time = SimpleNamespace(now=0.0)
    budget = RetryBudget(lambda: time.now)
    assert sum(budget.take() for _ in range(2 * RETRIES_PER_MINUTE)) == RETRIES_PER_MINUTE
    budget.note_success()
    assert [budget.take(), budget.take()] == [True, False]
    time.now = 10.0
    assert sum(budget.take() for _ in range(RETRIES_PER_MINUTE)) == RETRIES_PER_MINUTE // 6
    for _ in range(3 * RETRIES_PER_MINUTE):
        budget.note_success()
    assert sum(budget.take() for _ in range(2 * RETRIES_PER_MINUTE)) == RETRIES_PER_MINUTE, "nobody saves up a storm"


def test_requests_that_ask_elsewhere_leave_half_of_the_tries_to_those_that_wait() -> None:
    budget = RetryBudget(lambda: 0.0)
    refused = Retries(budget)
    assert sum(refused.take_spare() for _ in range(2 * RETRIES_PER_MINUTE)) == RETRIES_PER_MINUTE // 2
    assert sum(budget.take() for _ in range(2 * RETRIES_PER_MINUTE)) == RETRIES_PER_MINUTE // 2
    budget.note_success()
    assert (refused.take_spare(), budget.take()) == (False, True)


def test_without_a_budget_a_stream_waits_for_one_and_in_the_end_gives_up() -> None:
    time = SimpleNamespace(now=0.0)
    budget = RetryBudget(lambda: time.now)
    while budget.take():
        pass
    pauses = Retries(budget, lambda low, high: high).pauses(GONE, left_s=1.0)
    waited = []
    with pytest.raises(PeerUnavailable, match="gone"):
        for pause in pauses:
            waited.append(pause)
            time.now += pause
            while budget.take():
                pass
    assert sum(waited) == pytest.approx(1.0)


OUTAGE = (1.0, 21.0)
PATIENCE_S = 60.0


@pytest.mark.parametrize(("callers", "each"), [(200, 1), (1, 1000)])
def test_many_streams_outlive_an_outage_without_a_storm(callers: int, each: int) -> None:
    """A service that has room for all vanishes for 20 s: all their streams break at its beginning.

    With a pause of 0.1 s and no budget each stream would try ten times a second.
    """
    crowd = Crowd(callers * each, 0.05, OUTAGE)
    crowd.run(callers, [OUTAGE[0]] * callers * each, PATIENCE_S, OUTAGE[0] + PATIENCE_S + 1)
    assert len(crowd.served) == callers * each, "each of them is served"
    during = [crowd.tries[second] for second in range(5, 21)]
    # A pause of MOST_S / 2 on average; of a thousand streams the one budget's few.
    assert max(during) <= (1.3 * callers if each == 1 else RETRIES_PER_MINUTE / 60 + 5)
    assert max(crowd.served) - OUTAGE[1] <= 2 * MOST_S + 1, "and all of them within seconds"


def test_a_gateway_at_ten_times_its_capacity_repeats_no_more_than_is_served() -> None:
    """Each second ten times as many streams come as there is room for, and each is patient."""
    seconds = 15
    crowd = Crowd(10, 1.0)
    begins = [place / 100 for place in range(100 * seconds)]
    crowd.run(1, begins, 10.0, seconds + 15.0)
    again = sum(crowd.tries.values()) - len(begins)
    assert again <= RETRIES_PER_MINUTE + (seconds + 15) * RETRIES_PER_MINUTE / 60 + len(crowd.served)
    assert len(crowd.served) >= 9.5 * seconds, "the room that there is was used"


@pytest.mark.parametrize("defect", ["no budget", "no jitter", "no growth"])
def test_the_simulation_notices(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is there for something: without it one of the tests above fails."""
    if defect == "no budget":
        monkeypatch.setattr(RetryBudget, "take", lambda self: True)
        check = partial(test_a_gateway_at_ten_times_its_capacity_repeats_no_more_than_is_served)
    elif defect == "no jitter":
        monkeypatch.setattr(Backoff, "next_s", lambda self, hint_ms=None: (hint_ms or 100) / 1e3)
        check = partial(test_a_hint_is_never_undercut_and_those_who_had_it_come_apart)
    else:
        monkeypatch.setattr(retries, "MOST_S", retries.FIRST_S)
        monkeypatch.setattr(Backoff.__init__, "__defaults__", (retries.FIRST_S, retries.FIRST_S, random.uniform))
        check = partial(test_many_streams_outlive_an_outage_without_a_storm, 200, 1)
    with pytest.raises(AssertionError):
        check()
