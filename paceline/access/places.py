"""A bounded number of places, of which no tenant may take so many that another finds none.

A tenant may take a place as long as it has fewer than `SHARE_OF_FREE` times those that are free, a dynamic threshold
as switches share their buffers by. One tenant alone so gets four fifths of what there is, two get four ninths
each, and n leave one in 4n + 1 to whoever comes next: nothing is reserved for anybody by name.

What is left for newcomers is among the places of the limit where they are places to wait in, or are used at once or
not at all (`Places`). Where what has a place runs, it is room to wait in, beyond the limit: a tenant alone may have
all places to run in (`RunningPlaces`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline.protocol.errors import Overloaded

SHARE_OF_FREE = 4
"""More leaves a newcomer fewer places, less takes more of them from a tenant that is alone."""


class Places:
    """Counts who has how many places. Without a tenant's name a place is anybody's: only the limit holds.

    Args:
        limit: the setting that bounds them, as errors name it.
        most: how many there are.
        retry_after_ms: the hint of a refusal.
    """

    def __init__(self, limit: str, most: int, retry_after_ms: int) -> None:
        self._limit = limit
        self._most = most
        self._retry_after_ms = retry_after_ms
        self._taken = Counter[str]()

    def __len__(self) -> int:
        """Places that are taken."""
        return self._taken.total()

    def check(self, tenant: str) -> None:
        """Return if the tenant may take a place.

        Raises:
            Overloaded: all are taken, or as many by the tenant as leave others room.
        """
        held, allowed = self._taken[tenant], self._share_of_free()
        if allowed <= 0 or (not tenant and len(self) >= self._most):
            raise self._refusal("all are taken")
        if tenant and held >= allowed:
            raise self._refusal(f"{held} are the key's, and what is left is for others")

    def take(self, tenant: str) -> None:
        """Take a place; `give_back` it. Raises as `check`."""
        self.check(tenant)
        self._taken[tenant] += 1

    def give_back(self, tenant: str) -> None:
        """A place is free again."""
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]

    def _share_of_free(self) -> int:
        """`SHARE_OF_FREE` times the places that are free."""
        return SHARE_OF_FREE * (self._most - len(self))

    def _refusal(self, why: str) -> Overloaded:
        return Overloaded(f"{self._limit} = {self._most}: {why}", retry_after_ms=self._retry_after_ms)


class RunningPlaces(Places):
    """Places to run in, as many as the limit says, and a quarter as many to wait for one of them.

    So a tenant that is alone may run as many as the limit says, and whoever comes then finds a place to wait in. One
    that has ended gives its place to the tenant that runs least, of several that run as little to the one that has
    waited longest. A tenant that runs nothing so waits until one request of others has ended, and one more for each
    other such tenant that came before it.
    """

    def __init__(self, limit: str, most: int, retry_after_ms: int) -> None:
        super().__init__(limit, most, retry_after_ms)
        self._running = Counter[str]()
        self._waiting: dict[asyncio.Future[None], str] = {}

    @asynccontextmanager
    async def taken(self, tenant: str) -> AsyncIterator[None]:
        """Run meanwhile, as soon as there is a place. Raises as `check`, at once."""
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
                self._end(tenant)  # it had its turn meanwhile
            raise

    def _end(self, tenant: str) -> None:
        """One that ran has ended; the next is counted at once, so that nobody comes between."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        waiting = [turn for turn in self._waiting if not turn.done()]
        if waiting:
            turn = min(waiting, key=lambda each: self._running[self._waiting[each]])
            self._running[self._waiting.pop(turn)] += 1
            turn.set_result(None)
