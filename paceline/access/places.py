"""A bounded number of places, shared so that a new tenant always finds one.

A tenant may take a place while it has fewer than `SHARE_OF_FREE` times the free places: the dynamic threshold of
switches for their buffers. A single tenant so gets four fifths of the places, two get four ninths each, and n tenants
leave one in 4n + 1 to the next one. No place is reserved by name.

The places left for newcomers are part of the limit if places are for waiting, or are refused at once (`Places`). They
are beyond the limit if places are for running: a single tenant may then run as many requests as the limit says, and
newcomers get places to wait in (`RunningPlaces`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline.protocol.errors import Overloaded

SHARE_OF_FREE = 4
"""A larger share leaves a newcomer fewer places; a smaller one takes more places from a single tenant."""


class Places:
    """Counts the places of each tenant. Places without a tenant's name count against the limit alone.

    Args:
        limit: name of the setting that bounds them, for errors.
        most: number of places.
        retry_after_ms: the hint of a refusal.
    """

    def __init__(self, limit: str, most: int, retry_after_ms: int) -> None:
        self._limit = limit
        self._most = most
        self._retry_after_ms = retry_after_ms
        self._counts = Counter[str]()

    def __len__(self) -> int:
        """Number of taken places."""
        return self._counts.total()

    def check(self, tenant: str) -> None:
        """Return if the tenant may take a place.

        Raises:
            Overloaded: all places are taken, or the tenant has its share of them.
        """
        count, share = self._counts[tenant], self._share_of_free()
        if share <= 0 or (not tenant and len(self) >= self._most):
            raise self._refusal("all are taken")
        if tenant and count >= share:
            raise self._refusal(f"the key has {count} of them, and the rest is for others")

    def take(self, tenant: str) -> None:
        """Take a place, until `give_back`. Raises as `check`."""
        self.check(tenant)
        self._counts[tenant] += 1

    def give_back(self, tenant: str) -> None:
        """Free a place."""
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]

    def _share_of_free(self) -> int:
        """`SHARE_OF_FREE` times the free places."""
        return SHARE_OF_FREE * (self._most - len(self))

    def _refusal(self, why: str) -> Overloaded:
        return Overloaded(f"{self._limit} = {self._most}: {why}", retry_after_ms=self._retry_after_ms)


class RunningPlaces(Places):
    """Places to run in, as many as the limit says, and a quarter as many to wait for one of them.

    So a single tenant may run as many requests as the limit says, and newcomers find a place to wait in. When a
    request ends, its place goes to the tenant that runs the fewest requests, and among equals to the one that has
    waited longest. So a tenant that runs nothing waits until one request of others has ended, and one more for each
    such tenant before it.
    """

    def __init__(self, limit: str, most: int, retry_after_ms: int) -> None:
        super().__init__(limit, most, retry_after_ms)
        self._running = Counter[str]()
        self._waiting: dict[asyncio.Future[None], str] = {}

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place to run in, and keep it within the context. Raises as `check`, at once."""
        self.take(tenant)
        try:
            await self._turn(tenant)
            try:
                yield
            finally:
                self._end(tenant)
        finally:
            self.give_back(tenant)

    def _share_of_free(self) -> int:
        return super()._share_of_free() + self._most

    async def _turn(self, tenant: str) -> None:
        if self._running.total() < self._most:
            self._running[tenant] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = tenant
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:
                self._end(tenant)  # its turn came meanwhile
            raise

    def _end(self, tenant: str) -> None:
        """End a running request and give its place to the next one at once, so that none comes between."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        waiting = [turn for turn in self._waiting if not turn.done()]
        if waiting:
            turn = min(waiting, key=lambda each: self._running[self._waiting[each]])
            self._running[self._waiting.pop(turn)] += 1
            turn.set_result(None)
