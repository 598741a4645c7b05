"""Tries again: how long between them, how many, and what many callers of ours do to a service that is back."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from paceline.protocol.errors import Overloaded, PacelineError, PeerUnavailable
from paceline.rpc import retries
from paceline.rpc.retries import MOST_S, RETRIES_PER_MINUTE, Backoff, Retries, RetryBudget

FULL = Overloaded("full", retry_after_ms=500)
GONE = PeerUnavailable("gone")


class VirtualTime:
    """Seconds that pass as a test says, and what happens at which of them."""

    def __init__(self, seed: int = 1) -> None:
        self.now = 0.0
        self.source = random.Random(seed)
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def at(self, when: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), happens))

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, happens = heapq.heappop(self._due)
            happens()
        self.now = until


@dataclass
class CrowdedService:
    """Serves `capacity` requests at once, each for `seconds`, and is away for a time. Counts who comes when."""

    time: VirtualTime
    capacity: int
    seconds: float
    away: tuple[float, float] = (-1.0, -1.0)
    running: int = 0
    tries: Counter[int] = field(default_factory=Counter)
    """By the second in which they came."""

    def ask(self, ended: Callable[[], None]) -> PacelineError | None:
        """Begin a request; `ended` is called when it has its answer. None: it is being served."""
        self.tries[int(self.time.now)] += 1
        if self.away[0] <= self.time.now < self.away[1]:
            return GONE
        if self.running >= self.capacity:
            return FULL
        self.running += 1
        self.time.at(self.time.now + self.seconds, partial(self._end, ended))
        return None

    def _end(self, ended: Callable[[], None]) -> None:
        self.running -= 1
        ended()


@dataclass
class PatientStream:
    """One request of a caller, tried again as the clients try: with pauses between, until it is served."""

    service: CrowdedService
    retries: Retries
    patience_s: float
    served_at: float | None = None
    refused: bool = False
    began: float = 0.0

    def begin(self) -> None:
        self.began = self.service.time.now
        self._try()

    def _try(self) -> None:
        error = self.service.ask(self._served)
        if error is not None:
            left_s = self.began + self.patience_s - self.service.time.now
            self._pause(self.retries.pauses(error, left_s)) if left_s > 0 else self._give_up()

    def _pause(self, pauses: Iterator[float]) -> None:
        time = self.service.time
        try:
            time.at(time.now + next(pauses), partial(self._pause, pauses))
        except StopIteration:
            self._try()
        except PacelineError:
            self._give_up()

    def _served(self) -> None:
        self.served_at = self.service.time.now
        self.retries.note_success()

    def _give_up(self) -> None:
        self.refused = True


def streams_of(service: CrowdedService, callers: int, each: int, patience_s: float) -> list[PatientStream]:
    """Streams of so many callers, each with a budget of its own."""
    time = service.time
    budgets = [RetryBudget(time.clock) for _ in range(callers)]
    draw = time.source.uniform
    return [PatientStream(service, Retries(budget, draw), patience_s) for budget in budgets for _ in range(each)]


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
    time = VirtualTime()
    budget = RetryBudget(time.clock)
    assert sum(budget.take() for _ in range(2 * RETRIES_PER_MINUTE)) == RETRIES_PER_MINUTE
    budget.note_success()
    assert [budget.take(), budget.take()] == [True, False]
    time.now = 10.0
    assert sum(budget.take() for _ in range(RETRIES_PER_MINUTE)) == RETRIES_PER_MINUTE // 6
    for _ in range(3 * RETRIES_PER_MINUTE):
        budget.note_success()
    assert sum(budget.take() for _ in range(2 * RETRIES_PER_MINUTE)) == RETRIES_PER_MINUTE, "nobody saves up a storm"


def test_requests_that_ask_elsewhere_leave_half_of_the_tries_to_those_that_wait() -> None:
    budget = RetryBudget(VirtualTime().clock)
    refused = Retries(budget)
    assert sum(refused.take_spare() for _ in range(2 * RETRIES_PER_MINUTE)) == RETRIES_PER_MINUTE // 2
    assert sum(budget.take() for _ in range(2 * RETRIES_PER_MINUTE)) == RETRIES_PER_MINUTE // 2
    budget.note_success()
    assert (refused.take_spare(), budget.take()) == (False, True)


def test_without_a_budget_a_stream_waits_for_one_and_in_the_end_gives_up() -> None:
    time = VirtualTime()
    budget = RetryBudget(time.clock)
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


def after_an_outage(callers: int, each: int) -> tuple[CrowdedService, list[PatientStream]]:
    """A service that has room for all vanishes for 20 s: all their streams break at its beginning."""
    time = VirtualTime()
    service = CrowdedService(time, callers * each, 0.05, OUTAGE)
    streams = streams_of(service, callers, each, PATIENCE_S)
    for stream in streams:
        time.at(OUTAGE[0], stream.begin)
    time.run(OUTAGE[0] + PATIENCE_S + 1)
    return service, streams


@pytest.mark.parametrize(("callers", "each"), [(200, 1), (1, 1000)])
def test_many_streams_outlive_an_outage_without_a_storm(callers: int, each: int) -> None:
    """With a pause of 0.1 s and no budget each stream would try ten times a second."""
    service, streams = after_an_outage(callers, each)
    assert not [stream for stream in streams if stream.served_at is None], "each of them is served"
    during = [service.tries[second] for second in range(5, 21)]
    # A pause of MOST_S / 2 on average; of a thousand streams the one budget's few.
    assert max(during) <= (1.3 * callers if each == 1 else RETRIES_PER_MINUTE / 60 + 5)
    last = max(stream.served_at or 0.0 for stream in streams)
    assert last - OUTAGE[1] <= 2 * MOST_S + 1, "and all of them within seconds"


def overloaded(callers: int, each: int, seconds: int) -> tuple[CrowdedService, list[PatientStream]]:
    """Ten times as many streams as there is room for come each second, and each is patient."""
    time = VirtualTime()
    service = CrowdedService(time, 10, 1.0)
    streams = streams_of(service, callers, each * seconds, 10.0)
    for number, stream in enumerate(streams):
        time.at(number % (100 * seconds) / 100, stream.begin)
    time.run(seconds + 15.0)
    return service, streams


def test_a_gateway_at_ten_times_its_capacity_repeats_no_more_than_is_served() -> None:
    seconds = 15
    service, streams = overloaded(1, 100, seconds)
    served = sum(stream.served_at is not None for stream in streams)
    first = len(streams)
    again = sum(service.tries.values()) - first
    allowed = RETRIES_PER_MINUTE + (seconds + 15) * RETRIES_PER_MINUTE / 60 + served
    assert again <= allowed
    assert served >= 9.5 * seconds, "the room that there is was used"


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
