"""Connections as uvicorn has them, bounded: the time and size of a request's head, and how many may wait.

uvicorn bounds none of them; bodies are bounded by `paceline_gateway.http.guard`. An address answers for its own
connections: beyond a limit the address that has most loses its oldest one. So a flood costs the flooder, and others'
requests, which come whole at once, are served.
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
"""Limit of a request's line and headers, of a chunk's frame, and of trailers: far more than clients send, chosen."""
PIECE_BYTES = 4 << 10
"""Bytes that are parsed at once, so that little is parsed beyond a limit; a piece of a body takes the parser 2 µs."""
MAX_PIPELINED_REQUESTS = 16
"""Requests of a connection that may wait behind the one that is answered."""


class BoundedConnection(HttpToolsProtocol):
    """A connection that is dropped if a head takes too long, or if all that is no body gets too long.

    A request that runs is left alone. The time for a head runs from the connection's first byte, and behind a reply
    from the next byte on: until then uvicorn's own time for idle connections runs. Trailers, which nobody reads, are
    not kept.
    """

    def __init__(
        self, *args: Any, head_timeout_s: float, waiting_connections: WaitingConnections, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.address = ""
        """The peer's address, without its port."""
        self.body_bytes = 0
        self._waiting_connections = waiting_connections
        self._head_timeout_s = head_timeout_s
        self._timer: TimerHandle | None = None
        self._in_head = False
        self._framing_bytes = 0
        """Bytes of a head, a chunk's frame or trailers, since the last end of a head or byte of a body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Override `asyncio.Protocol`."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._await_head()
        self._waiting_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Override `asyncio.Protocol`."""
        self._stop_timer()
        self._waiting_connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Override `asyncio.Protocol`, in pieces, so that a limit holds however much is read at once."""
        offset = 0
        while offset < len(data) and not self.transport.is_closing():
            piece = data[offset : offset + min(PIECE_BYTES, MAX_HEAD_BYTES - self._framing_bytes)]
            offset += len(piece)
            self._framing_bytes += len(piece)
            super().data_received(piece)
            if self._framing_bytes >= MAX_HEAD_BYTES:
                self.drop(f"a request's head, a chunk's frame or trailers are longer than {MAX_HEAD_BYTES} bytes")
            elif len(self.pipeline) > MAX_PIPELINED_REQUESTS:
                self.drop(f"more than {MAX_PIPELINED_REQUESTS} requests wait behind one that runs")
        if self._timer is None and not self._is_answering and not self.transport.is_closing():
            self._await_head()  # an empty line in front of a request, or a body whose request is answered

    def on_message_begin(self) -> None:
        """Take the first byte of a request from the parser."""
        super().on_message_begin()
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]  # ours, for `paceline_gateway.http.guard`
        self._in_head = True
        self._waiting_connections.renew(self)
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header from the parser, and leave out trailers."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Take the end of a head from the parser."""
        self._stop_timer()
        self._in_head, self._framing_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body from the parser."""
        self._framing_bytes = 0
        if self._is_answering:
            self._waiting_connections.grow(self, len(body))
        super().on_body(body)

    def admit(self) -> None:
        """Admit the request that is answered."""
        self._waiting_connections.admit(self)

    @property
    def is_waiting(self) -> bool:
        """Whether the connection has no whole request that is unanswered."""
        return not self._is_answering or self.cycle.more_body

    @property
    def _is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._head_timeout_s, self._on_head_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _on_head_timeout(self) -> None:
        self._timer = None
        if self._is_answering:
            self._await_head()  # of the next request, which the client sent early
        else:
            self.drop(f"no whole head of a request within {self._head_timeout_s:g} s")

    def drop(self, reason: str) -> None:
        """End the connection, whatever it does."""
        logger.info("connection dropped: client=%s why=%s", self.client, reason)
        self._stop_timer()
        self.transport.abort()


class WaitingConnection(Protocol):
    """A connection as `WaitingConnections` needs it."""

    address: str
    body_bytes: int
    """Bytes of its request's body, until the request is admitted."""

    @property
    def is_waiting(self) -> bool:
        """Whether it has no whole request."""

    def drop(self, reason: str) -> None:
        """End the connection, which then calls `remove`."""


class WaitingConnections:
    """All connections by address, in the order in which they began their requests.

    Args:
        config: the limits.
        system_limit: connections that the system allows.
    """

    def __init__(self, config: GatewayConfig, system_limit: int) -> None:
        self._max_connections = max(1, min(config.max_waiting_connections, system_limit))
        self._max_bytes = config.max_waiting_bytes
        self._by_address: defaultdict[str, dict[WaitingConnection, None]] = defaultdict(dict)
        self._bytes_by_address: defaultdict[str, int] = defaultdict(int)
        self._connection_count = self._total_bytes = 0

    def add(self, connection: WaitingConnection) -> None:
        """Take in a new connection, for which an older one may be dropped."""
        self._by_address[connection.address][connection] = None
        self._connection_count += 1
        if self._connection_count > self._max_connections:
            address = max(self._by_address, key=lambda address: len(self._by_address[address]))
            self._drop_oldest(address, f"max_waiting_connections: {self._max_connections} are reached")

    def renew(self, connection: WaitingConnection) -> None:
        """Put a connection last: it begins a request."""
        neighbours = self._by_address[connection.address]
        neighbours.pop(connection, None)
        neighbours[connection] = None

    def remove(self, connection: WaitingConnection) -> None:
        """Take out a connection that has ended."""
        self.admit(connection)
        neighbours = self._by_address[connection.address]
        if neighbours.pop(connection, self) is None:
            self._connection_count -= 1
        if not neighbours:
            del self._by_address[connection.address]

    def grow(self, connection: WaitingConnection, size: int) -> None:
        """Count `size` more bytes of a connection's body, for which an older connection may be dropped."""
        connection.body_bytes += size
        self._bytes_by_address[connection.address] += size
        self._total_bytes += size
        if self._total_bytes > self._max_bytes:
            address = max(self._bytes_by_address, key=lambda address: self._bytes_by_address[address])
            self._drop_oldest(address, f"max_waiting_bytes = {self._max_bytes} are reached")

    def admit(self, connection: WaitingConnection) -> None:
        """Count a connection's body no longer: from now on its key's limits hold."""
        size, connection.body_bytes = connection.body_bytes, 0
        self._total_bytes -= size
        self._bytes_by_address[connection.address] -= size
        if not self._bytes_by_address[connection.address]:
            del self._bytes_by_address[connection.address]

    def _drop_oldest(self, address: str, reason: str) -> None:
        """Drop the oldest waiting connection of an address; beyond the limit of bytes the oldest that holds some."""
        for connection in self._by_address[address]:
            if connection.is_waiting and (connection.body_bytes or self._connection_count > self._max_connections):
                connection.drop(reason)
                return
