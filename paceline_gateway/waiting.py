"""Connections whose request has not come whole: how many there may be, and how much of bodies they may hold.

An address answers for its own. Beyond a limit the oldest one of the address that has most is dropped: who floods
loses what it began itself, and others' requests, which come whole at once, are served.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

from paceline.runtime.gateway_config import GatewayConfig


class WaitingConnection(Protocol):
    """One of them."""

    address: str
    body_bytes: int
    """What came of its request's body, until that is let in."""

    @property
    def waits(self) -> bool:
        """Whether it has no request that came whole."""

    def drop(self, why: str) -> None:
        """End it; `remove` is called of it."""


class WaitingConnections:
    """All connections by address, the one that began a request last behind the others.

    Args:
        config: their limits.
        most: that the system allows.
    """

    def __init__(self, config: GatewayConfig, most: int) -> None:
        self._most = max(1, min(config.max_waiting_connections, most))
        self._most_bytes = config.max_waiting_bytes
        self._of: defaultdict[str, dict[WaitingConnection, None]] = defaultdict(dict)
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._count = self._total_bytes = 0

    def add(self, connection: WaitingConnection) -> None:
        """A new one, which may cost an older one its life."""
        self._of[connection.address][connection] = None
        self._count += 1
        if self._count > self._most:
            most = max(self._of, key=lambda address: len(self._of[address]))
            self._drop_oldest(most, f"max_waiting_connections: {self._most} are reached")

    def renew(self, connection: WaitingConnection) -> None:
        """It begins a request."""
        own = self._of[connection.address]
        own.pop(connection, None)
        own[connection] = None

    def remove(self, connection: WaitingConnection) -> None:
        """It has ended."""
        self.let_in(connection)
        own = self._of[connection.address]
        if own.pop(connection, self) is None:
            self._count -= 1
        if not own:
            del self._of[connection.address]

    def grow(self, connection: WaitingConnection, size: int) -> None:
        """So much more of its body has come."""
        connection.body_bytes += size
        self._bytes[connection.address] += size
        self._total_bytes += size
        if self._total_bytes > self._most_bytes:
            most = max(self._bytes, key=lambda address: self._bytes[address])
            self._drop_oldest(most, f"max_waiting_bytes = {self._most_bytes} are reached")

    def let_in(self, connection: WaitingConnection) -> None:
        """Its request is let in: what it holds from now on is its key's affair."""
        size, connection.body_bytes = connection.body_bytes, 0
        self._total_bytes -= size
        self._bytes[connection.address] -= size
        if not self._bytes[connection.address]:
            del self._bytes[connection.address]

    def _drop_oldest(self, address: str, why: str) -> None:
        """Of those that wait; where a body is too much, of those that hold some."""
        for connection in self._of[address]:
            if connection.waits and (connection.body_bytes or self._count > self._most):
                connection.drop(why)
                return
