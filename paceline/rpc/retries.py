"""Retries without a storm: random pauses after the peer's hint, and a budget that successes fill.

All our callers retry with it: the Python client, the gateway, the coordinator's sessions, and links that reconnect.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from paceline.access.limits import Clock, TokenBucket
from paceline.protocol.errors import PacelineError
from paceline.runtime.clock import now

RETRIES_PER_MINUTE = 300
"""Retries a minute that a caller has whether they succeed or not, and most that it may save up. A caller with one
stream needs a few a second to find a coordinator that is back. A thousand callers then make 5,000 a second, which a
coordinator refuses in one or two seconds of its time."""
FOR_EACH_SUCCESS = 1
"""Retries that a success pays for. So a caller has at most as many failed tries as successes, beyond the few a
minute. Below 1, a caller with a thousand streams to resume would take minutes after an outage: each resumed stream
has to pay for the next."""
FIRST_S = 0.1
MOST_S = 2.0
"""Bounds of a stream's pauses: tokens arrive every few ms, and a service takes seconds to start."""
RESERVED_RETRIES = RETRIES_PER_MINUTE // 2
"""Retries reserved for broken streams. Refused requests try other services at once, and if all are full they would
otherwise take every retry."""
WITHOUT_BUDGET_S = 0.5
"""Longest pause until a request without a retry checks the budget again."""
Draw = Callable[[float, float], float]


class Backoff:
    """Pauses with full jitter: each is uniform between 0 and a bound, which doubles up to `most_s`.

    A pause is no shorter than the peer's hint, and longer by a random draw, so that callers with the same hint don't
    return at the same time.
    """

    def __init__(self, first_s: float = FIRST_S, most_s: float = MOST_S, draw: Draw = random.uniform) -> None:
        self._first_s = first_s
        self._most_s = max(first_s, most_s)
        self._bound_s = first_s
        self._draw = draw

    def reset(self) -> None:
        """Return to the shortest pauses after a success."""
        self._bound_s = self._first_s

    def next_s(self, hint_ms: int | None = None, *, longest: bool = False) -> float:
        """The pause before the next try, in seconds.

        Args:
            hint_ms: the peer's hint when to retry; None: it gave none.
            longest: draw below `most_s`, whatever the last bound was.
        """
        bound_s = self._most_s if longest else self._bound_s
        self._bound_s = min(self._most_s, 2 * self._bound_s)
        hint_s = (hint_ms or 0) / 1e3
        return hint_s + self._draw(0.0, max(bound_s, hint_s))


class RetryBudget:
    """The retries that all requests of one caller share: one for each success, and a few a minute."""

    def __init__(self, clock: Clock = now) -> None:
        self.clock = clock
        self._bucket = TokenBucket(RETRIES_PER_MINUTE, clock)

    def note_success(self) -> None:
        """Count a successful try."""
        self._bucket.put(FOR_EACH_SUCCESS)

    def take(self, leaving: int = 0) -> bool:
        """Take one retry, if there is one and `leaving` are left after it."""
        is_allowed = self._bucket.wait_s(1 + leaving) == 0
        if is_allowed:
            self._bucket.take(1)
        return is_allowed


class Retries:
    """One request's retries, on the budget of its caller."""

    def __init__(self, budget: RetryBudget | None = None, draw: Draw = random.uniform) -> None:
        self._budget = budget or RetryBudget()
        self._backoff = Backoff(draw=draw)
        self._draw = draw

    def note_success(self) -> None:
        """Count a successful try: the next pause is short, and the budget has one more retry."""
        self._backoff.reset()
        self._budget.note_success()

    def take_spare(self) -> bool:
        """Take a retry at another service, without a pause, if the budget has a spare one."""
        return self._budget.take(leaving=RESERVED_RETRIES)

    def pauses(self, error: PacelineError, left_s: float) -> Iterator[float]:
        """Pauses in seconds, one after the other; after the last one the request may be tried again.

        Args:
            error: the last try's error; its hint is honoured.
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
