"""Connections as uvicorn has them, whose requests' heads come within a time and a size.

uvicorn bounds neither; a body is bounded by `gateway.middleware`.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.events import TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers: far more than clients send, chosen, not tuned."""


class TimedConnection(HttpToolsProtocol):
    """Ends when a head is awaited for too long, or gets too long; a request that runs is left alone.

    A head is awaited from the first byte of a connection's life, and behind a reply from the next byte on: until
    then uvicorn's own time for idle connections runs.
    """

    def __init__(self, *args: Any, head_timeout_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timeout_s = head_timeout_s
        self._timer: TimerHandle | None = None
        self._head_bytes = 0
        self._in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As `asyncio.Protocol`."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.Protocol`."""
        self._head_is_whole()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As `asyncio.Protocol`."""
        awaited = self._timer is not None and not self._in_body
        super().data_received(data)
        if self._timer is None and not self._runs and not self.transport.is_closing():
            self._await_head()  # an empty line in front of a request, or a body whose request is answered
        if self._timer is not None and awaited and not self._in_body:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._drop(f"a request's head is longer than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """As the parser has it: the first byte of a request."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """As the parser has it."""
        self._head_is_whole()
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """As the parser has it."""
        self._in_body = False
        super().on_message_complete()

    @property
    def _runs(self) -> bool:
        """Whether a request is answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._head_timeout_s, self._late)

    def _head_is_whole(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._head_bytes = None, 0

    def _late(self) -> None:
        self._timer = None
        if self._runs:
            self._await_head()  # the next request's, which was sent early
        else:
            self._drop(f"no whole head of a request within {self._head_timeout_s:g} s")

    def _drop(self, why: str) -> None:
        logger.info("connection dropped: client=%s why=%s", self.client, why)
        self._head_is_whole()
        self.transport.abort()
