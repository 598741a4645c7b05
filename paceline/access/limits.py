"""Usage of one key: a bucket for each rate, and its running requests."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.access.keys import KeyLimits
from paceline.protocol.errors import Overloaded
from paceline.runtime import clock

CONCURRENCY_RETRY_MS = 500
"""A fixed hint, since nobody knows when a running request ends."""
Clock = Callable[[], float]


class TokenBucket:
    """Holds at most a minute's worth and fills at an even rate. More may be taken than it holds.

    Taking too much leaves a debt, which has to fill up first. So the length of a text, which nobody knows beforehand,
    is charged as it grows.
    """

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    def wait_s(self, amount: int) -> float:
        """Seconds until the bucket has the amount, or is full if it can't hold that much; 0: it has it now."""
        self._fill()
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing) * 60 / self.per_minute

    def take(self, amount: int) -> None:
        """Take the amount, even below zero."""
        self._fill()
        self._level -= amount

    def put(self, amount: int) -> None:
        """Add an unused or earned amount, up to a minute's worth."""
        self._fill()
        self._level = min(self.per_minute, self._level + amount)

    def resize(self, per_minute: int) -> None:
        """Change the rate."""
        self._fill()
        self.per_minute = per_minute
        self._level = min(self._level, per_minute)

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled_at) * self.per_minute / 60)
        self._filled_at = now


class Meter:
    """Counts one key's requests and tokens against its limits; belongs to one event loop."""

    def __init__(self, limits: KeyLimits, clock: Clock = clock.now) -> None:
        self._clock = clock
        self._limits = limits
        self._running = 0
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.limit(limits)

    def limit(self, limits: KeyLimits) -> None:
        """Set the limits; past usage still counts."""
        self._limits = limits
        self._requests = self._resize(self._requests, limits.requests_per_minute)
        self._tokens = self._resize(self._tokens, limits.tokens_per_minute)

    def begin(self) -> None:
        """Count a request that begins; each needs an `end`.

        Raises:
            Overloaded: a limit is reached, which the error names with the time of the next try.
        """
        most = self._limits.max_concurrent_requests
        if most is not None and self._running >= most:
            raise _limit_error("max_concurrent_requests", most, CONCURRENCY_RETRY_MS)
        _require_room("requests_per_minute", self._requests, 1)
        _require_room("tokens_per_minute", self._tokens, 1)
        if self._requests is not None:
            self._requests.take(1)
        self._running += 1

    def end(self) -> None:
        """Count the end of a request."""
        self._running -= 1

    def take_prompt(self, tokens: int) -> None:
        """Charge a prompt's tokens, if the bucket has them.

        Raises:
            Overloaded: as `begin`.
        """
        _require_room("tokens_per_minute", self._tokens, tokens)
        self.take_generated(tokens)

    def take_generated(self, tokens: int) -> None:
        """Charge generated tokens. A running request may exceed the limit; the next one then waits."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def _resize(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return TokenBucket(per_minute, self._clock)
        bucket.resize(per_minute)
        return bucket


def _require_room(name: str, bucket: TokenBucket | None, amount: int) -> None:
    wait_s = 0.0 if bucket is None else bucket.wait_s(amount)
    if bucket is not None and wait_s > 0:
        raise _limit_error(name, bucket.per_minute, math.ceil(wait_s * 1e3))


def _limit_error(name: str, limit: int, retry_after_ms: int) -> Overloaded:
    return Overloaded(
        f"the API key's {name} = {limit} are used up; try again in {retry_after_ms / 1e3:g} s",
        metadata={"limit": name, "value": str(limit)},  # `Overloaded.is_of_the_key`
        retry_after_ms=retry_after_ms,
    )
