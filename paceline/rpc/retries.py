"""Trying again without a storm: pauses drawn at random, behind the hint that came, on a budget that successes fill.

Every caller of ours that tries again does it with this: the Python client, the gateway, the coordinator's sessions,
and links that reconnect.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from paceline.access.limits import Clock, TokenBucket
from paceline.protocol.errors import PacelineError

RETRIES_PER_MINUTE = 300
"""Tries a minute that a caller may repeat whatever comes of them, and most that it may save up: who has one stream
needs a few a second to find a coordinator that is back; a thousand callers are then 5,000 a second, which a
coordinator refuses in one second or two of its time."""
FOR_EACH_SUCCESS = 1
"""Tries that a success pays for. So a caller's failed tries are at most as many as its successes, beyond the few a
minute. Below 1, who has a thousand streams to resume would take minutes behind an outage: each one that is
back has to pay for the next."""
FIRST_S = 0.1
MOST_S = 2.0
"""Bounds of a stream's pauses: tokens come every few ms, and a service takes seconds to start."""
KEPT_FOR_LOST = RETRIES_PER_MINUTE // 2
"""Tries that are left to texts that wait for one: requests that were refused ask elsewhere at once, and where all are
full they would take each try as it comes."""
WITHOUT_BUDGET_S = 0.5
"""Longest pause until a try that the budget doesn't allow asks it again."""
Draw = Callable[[float, float], float]


class Backoff:
    """Pauses with full jitter: each is drawn evenly between nothing and a bound, which doubles up to `most_s`.

    Who was told when to come again comes no earlier, and later by a draw of its own: those who were
    told the same would come together otherwise.
    """

    def __init__(self, first_s: float = FIRST_S, most_s: float = MOST_S, draw: Draw = random.uniform) -> None:
        self._first_s = first_s
        self._most_s = max(first_s, most_s)
        self._bound_s = first_s
        self._draw = draw

    def reset(self) -> None:
        """Begin with the shortest pauses again: it went well."""
        self._bound_s = self._first_s

    def next_s(self, hint_ms: int | None = None, *, longest: bool = False) -> float:
        """The pause before the next try, in seconds.

        Args:
            hint_ms: when to come again, as the peer said; None: it didn't.
            longest: draw below `most_s`, whatever came before.
        """
        bound_s = self._most_s if longest else self._bound_s
        self._bound_s = min(self._most_s, 2 * self._bound_s)
        hint_s = (hint_ms or 0) / 1e3
        return hint_s + self._draw(0.0, max(bound_s, hint_s))


class RetryBudget:
    """How many tries all requests of one caller may repeat: one for each success, and a few a minute."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._left = TokenBucket(RETRIES_PER_MINUTE, clock)

    def succeeded(self) -> None:
        """A try came through."""
        self._left.put(FOR_EACH_SUCCESS)

    def take(self, leaving: int = 0) -> bool:
        """Take one try, if there is one and it leaves so many."""
        allowed = self._left.wait_s(1 + leaving) == 0
        if allowed:
            self._left.take(1)
        return allowed


class Retries:
    """One request's tries again, on the budget of its caller."""

    def __init__(self, budget: RetryBudget | None = None, draw: Draw = random.uniform) -> None:
        self._budget = budget or RetryBudget()
        self._backoff = Backoff(draw=draw)
        self._draw = draw

    def succeeded(self) -> None:
        """A try came through: the next pause is short, and the budget has one more."""
        self._backoff.reset()
        self._budget.succeeded()

    def take_elsewhere(self) -> bool:
        """Take a try without a pause, if the budget has one to spare: at a service that has not refused it."""
        return self._budget.take(leaving=KEPT_FOR_LOST)

    def pauses(self, error: PacelineError, left_s: float) -> Iterator[float]:
        """Pauses to make one after the other, in seconds; behind the last one the request may be tried again.

        Args:
            error: what the last try failed with; its hint is honoured.
            left_s: time for further tries.

        Raises:
            PacelineError: that error, if its hint or the budget leaves no time.
        """
        end = self._budget.clock() + left_s
        if (error.retry_after_ms or 0) / 1e3 > left_s:
            raise error
        yield min(left_s, self._backoff.next_s(error.retry_after_ms))
        while not self._budget.take():
            left_s = end - self._budget.clock()
            if left_s <= 0:
                raise error
            yield min(left_s, self._draw(0.0, WITHOUT_BUDGET_S))
