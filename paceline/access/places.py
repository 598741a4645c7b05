"""A bounded number of places, of which no tenant may take so many that another finds none.

A tenant may take a place as long as it has fewer than `SHARE_OF_FREE` times those that are free, a dynamic threshold
as switches share their buffers by. One tenant alone so gets four fifths of the places, two get four ninths
each, and n leave one in 4n + 1 to whoever comes next: nothing is reserved for anybody by name, and no place
stays free that all tenants need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.protocol.errors import Overloaded

SHARE_OF_FREE = 4
"""More leaves a newcomer fewer places, less leaves more of them empty while one tenant is alone."""


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
        free, held = self._most - len(self), self._taken[tenant]
        if free <= 0:
            raise self._refusal("all are taken")
        if tenant and held >= SHARE_OF_FREE * free:
            raise self._refusal(f"{held} are the key's, and the {free} that are left are for others")

    def take(self, tenant: str) -> None:
        """Take a place; `give_back` it. Raises as `check`."""
        self.check(tenant)
        self._taken[tenant] += 1

    def give_back(self, tenant: str) -> None:
        """A place is free again."""
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Have a place meanwhile. Raises as `take`."""
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)

    def _refusal(self, why: str) -> Overloaded:
        return Overloaded(f"{self._limit} = {self._most}: {why}", retry_after_ms=self._retry_after_ms)
