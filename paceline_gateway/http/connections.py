"""Connections as uvicorn has them, bounded: the time and size of a request's head, and how many may wait.

uvicorn bounds none of them; a body is bounded by `paceline_gateway.http.guard`. An address answers for its own
connections. Beyond a limit the oldest one of the address that has most is dropped: who floods loses what it began
itself, and others' requests, which come whole at once, are served.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.events import TimerHandle
from collections import defaultdict
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.runtime.gateway_config import GatewayConfig

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers, of what frames a chunk, and of trailers: far more than clients send, chosen."""
PIECE_BYTES = 4 << 10
"""What is parsed at once, so that little is parsed beyond a limit; the parser takes 2 µs for as much of a body."""
MAX_AHEAD = 16
"""Requests that may wait behind one that runs: a connection's own, since one is answered at a time."""


class BoundedConnection(HttpToolsProtocol):
    """Ends when a head is awaited for too long, or when what is no body gets too long; what runs is left alone.

    A head is awaited from the first byte of a connection's life, and behind a reply from the next byte on: until
    then uvicorn's own time for idle connections runs. Trailers, which nobody reads, are not kept.
    """

    def __init__(self, *args: Any, head_timeout_s: float, waiting: WaitingConnections, **options: Any) -> None:
        super().__init__(*args, **options)
        self.address = ""
        """The peer's, without its port."""
        self.body_bytes = 0
        self._waiting = waiting
        self._head_timeout_s = head_timeout_s
        self._timer: TimerHandle | None = None
        self._in_head = False
        self._unended_bytes = 0
        """Parsed since the last end of a head and the last byte of a body: of a head, a chunk's frame or trailers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As `asyncio.Protocol`."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._await_head()
        self._waiting.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.Protocol`."""
        self._stop_timer()
        self._waiting.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As `asyncio.Protocol`; in pieces, so that a limit holds however much is read at once."""
        at = 0
        while at < len(data) and not self.transport.is_closing():
            piece = data[at : at + min(PIECE_BYTES, MAX_HEAD_BYTES - self._unended_bytes)]
            at += len(piece)
            self._unended_bytes += len(piece)
            super().data_received(piece)
            if self._unended_bytes >= MAX_HEAD_BYTES:
                self.drop(f"a request's head, a chunk's frame or trailers are longer than {MAX_HEAD_BYTES} bytes")
            elif len(self.pipeline) > MAX_AHEAD:
                self.drop(f"more than {MAX_AHEAD} requests wait behind one that runs")
        if self._timer is None and not self._runs and not self.transport.is_closing():
            self._await_head()  # an empty line in front of a request, or a body whose request is answered

    def on_message_begin(self) -> None:
        """As the parser has it: the first byte of a request."""
        super().on_message_begin()
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]  # ours, for `paceline_gateway.http.guard`
        self._in_head = True
        self._waiting.renew(self)
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """As the parser has it, which has trailers, too."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """As the parser has it."""
        self._stop_timer()
        self._in_head, self._unended_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """As the parser has it."""
        self._unended_bytes = 0
        if self._runs:
            self._waiting.grow(self, len(body))
        super().on_body(body)

    def let_in(self) -> None:
        """The request that runs is let in."""
        self._waiting.let_in(self)

    @property
    def waits(self) -> bool:
        """Whether no request has come whole that isn't answered."""
        return not self._runs or self.cycle.more_body

    @property
    def _runs(self) -> bool:
        """Whether a request is answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._head_timeout_s, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._runs:
            self._await_head()  # the next request's, which was sent early
        else:
            self.drop(f"no whole head of a request within {self._head_timeout_s:g} s")

    def drop(self, why: str) -> None:
        """End it, whatever it does."""
        logger.info("connection dropped: client=%s why=%s", self.client, why)
        self._stop_timer()
        self.transport.abort()


class WaitingConnection(Protocol):
    """One whose request has not come whole."""

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
