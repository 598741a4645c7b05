"""Responses that end with their client: whole as JSON, or as server-sent events.

A client that disconnects cancels what makes its response, and so frees its sessions. A client that reads slowly holds
what the server has written to its socket, and what one event holds: nothing is made for it that it doesn't take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import HttpError, http_error
from paceline.protocol.errors import PacelineError
from paceline.rpc.frames import first_to_end
from paceline.rpc.statuses import unexpected

logger = logging.getLogger(__name__)

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""What the description of a route says that streams beside sending JSON whole."""
DONE = b"data: [DONE]\n\n"
FAILURES = (HttpError, PacelineError)


class UntilDisconnect(Response):
    """A response whose making ends when its client has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; returns without it where nobody is there to read."""
        await first_to_end(self._answer(scope, receive, send), _gone(receive))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeReply(UntilDisconnect):
    """JSON of what a coroutine returns."""

    def __init__(self, make: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        super().__init__()
        self._make = make

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            content = to_json(await self._make(), inf_nan_mode="null")
        except FAILURES as error:
            await as_http(error).response(scope, receive, send)
            return
        await Response(content, media_type="application/json")(scope, receive, send)


class EventStream(UntilDisconnect):
    """Server-sent events of what a generator yields.

    A failure before the first event is an HTTP status; a later one is an event, since the status has been sent.

    Args:
        events: the data of each event.
        last: behind the last one, errors included.
        reader_timeout_s: how long the client may take nothing.
        shown: an error as an event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        reader_timeout_s: float,
        last: bytes = DONE,
        shown: Callable[[HttpError], bytes] = lambda error: data_event(error.body),
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._events = events
        self._last = last
        self._shown = shown
        self._reader_timeout_s = reader_timeout_s

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except FAILURES as error:
                await as_http(error).response(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._send(send, first)
                async for event in events:
                    await self._send(send, event)
                await self._send(send, self._last)
            except FAILURES as error:
                await self._send(send, self._shown(as_http(error)) + self._last)
            except TimeoutError:
                logger.warning("cut off: the client took nothing for %g s", self._reader_timeout_s)
                return  # without its end: the client must not take it for whole
            except Exception as error:
                logger.exception("stream failed: path=%s", scope["path"])
                await self._send(send, self._shown(http_error(unexpected(error))) + self._last)
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, body: bytes) -> None:
        async with asyncio.timeout(self._reader_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})


def data_event(value: dict[str, Any]) -> bytes:
    """One event of JSON."""
    return b"data: %b\n\n" % to_json(value, inf_nan_mode="null")


def as_http(error: HttpError | PacelineError) -> HttpError:
    """An error as it is sent."""
    return error if isinstance(error, HttpError) else http_error(error)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
