"""Connections as uvicorn has them, whose requests' heads come within a time and a size, and their number.

uvicorn bounds none of them; a body is bounded by `paceline_gateway.middleware`.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.events import TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline_gateway.waiting import WaitingConnections

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
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]  # ours, for `paceline_gateway.middleware`
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
