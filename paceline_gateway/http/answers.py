"""Answers that end with their client: whole as JSON, or as server-sent events.

A client that disconnects cancels what makes its answer, and so frees its sessions. A client that reads slowly holds
what the server has written to its socket, and what one event holds: nothing is made for it that it doesn't take.

A list of a whole answer that may get long is kept as the JSON that it will be. It takes a tenth of the memory of what
it is made of, and leaves no more than joining to do at the end.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.rpc.frames import first_to_end
from paceline.rpc.statuses import unexpected_error
from paceline_gateway.http.errors import FAILURES, HttpError, as_http, http_error

logger = logging.getLogger(__name__)

STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""OpenAPI's description of a route that can stream."""
_LINE_ENDS = "\u0085\u2028\u2029"
DONE = b"data: [DONE]\n\n"
_MARKER = re.compile(rb'"(long lists [0-9a-f]{32})"')


class UntilDisconnect(Response):
    """A response whose work is cancelled when its client has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, or return without it where the client has gone."""
        await first_to_end(self._answer(scope, receive, send), _disconnect(receive))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeReply(UntilDisconnect):
    """A response that is the JSON of what a coroutine returns."""

    def __init__(self, make: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        super().__init__()
        self._make = make

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            content = answer_json(await self._make())
        except FAILURES as error:
            await as_http(error).response(scope, receive, send)
            return
        await Response(content, media_type="application/json")(scope, receive, send)


class EventStream(UntilDisconnect):
    """A response that streams what a generator yields as server-sent events.

    A failure before the first event becomes an HTTP status. A later one becomes an event, since the status has been
    sent.

    Args:
        events: the events, as they are sent.
        terminator: sent behind the last event, an error included.
        reader_timeout_s: how long the client may take nothing.
        error_event: writes an error as an event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        reader_timeout_s: float,
        terminator: bytes = DONE,
        error_event: Callable[[HttpError], bytes] = lambda error: data_event(error.body),
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._events = events
        self._terminator = terminator
        self._error_event = error_event
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
                async with _PatientSend(send, self._reader_timeout_s) as patient:
                    await self._stream(first, events, patient, scope["path"])
            except TimeoutError:
                logger.warning("cut off: the client took nothing for %g s", self._reader_timeout_s)
                return  # without its end: the client must not take it for whole
        await send({"type": "http.response.body", "body": b""})

    async def _stream(self, first: bytes, events: AsyncIterator[bytes], send: _PatientSend, path: str) -> None:
        try:
            await send(first)
            async for event in events:
                await send(event)
            await send(self._terminator)
        except FAILURES as error:
            await send(self._error_event(as_http(error)) + self._terminator)
        except Exception as error:
            logger.exception("stream failed: path=%s", path)
            await send(self._error_event(http_error(unexpected_error(error))) + self._terminator)


class _PatientSend:
    """Sends parts of a body within its context; a client that takes nothing for too long ends it with TimeoutError.

    One timer watches all sends of a response: a timer for each would cost more than the send itself.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._sending_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._watch()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    async def __call__(self, body: bytes) -> None:
        self._sending_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._sending_since = None

    def _watch(self) -> None:
        now = self._loop.time()
        wait_s = 0.0 if self._sending_since is None else now - self._sending_since
        if wait_s < self._timeout_s:
            self._timer = self._loop.call_later(self._timeout_s - wait_s, self._watch)
        else:
            self._limit.reschedule(now)


def data_event(value: dict[str, Any]) -> bytes:
    """Write one event of JSON."""
    return b"data: %b\n\n" % event_json(value)


def event_json(value: dict[str, Any]) -> bytes:
    """Write JSON, and escape what some clients take for a line's end; that can stand in strings alone."""
    content = to_json(value, inf_nan_mode="null")
    for end in _LINE_ENDS:
        content = content.replace(end.encode(), b"\\u%04x" % ord(end))
    return content


class LongLists:
    """An object whose lists grow; its other values are those of the first extension."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes so far."""
        self.marker = f"long lists {secrets.token_hex(16)}"
        """Stands for this object while the answer around it is written; no client can guess it."""
        self._plain: dict[str, Any] = {}
        self._lists: dict[str, list[bytes]] = {}

    def extend(self, addition: Mapping[str, Any]) -> None:
        """Append another such object's lists to these."""
        for key, value in addition.items():
            if not isinstance(value, list):
                self._plain.setdefault(key, value)
                continue
            pieces = self._lists.setdefault(key, [])
            if items_json := to_json(value, inf_nan_mode="null")[1:-1]:
                pieces.append(items_json)
                self.size += len(items_json) + 1

    @property
    def json(self) -> bytes:
        """The whole object."""
        fields = [to_json({key: value})[1:-1] for key, value in self._plain.items()]
        lists = (to_json(key) + b":[" + b",".join(pieces) + b"]" for key, pieces in self._lists.items())
        return b"{" + b",".join((*lists, *fields)) + b"}"


def answer_json(answer: Mapping[str, Any]) -> bytes:
    """Write an answer that may have `LongLists` in it."""
    lists_by_marker: dict[bytes, LongLists] = {}

    def mark(value: object) -> str:
        assert isinstance(value, LongLists), "an answer is JSON otherwise"
        lists_by_marker[value.marker.encode()] = value
        return value.marker

    answer_text = to_json(answer, inf_nan_mode="null", fallback=mark)
    if not lists_by_marker:
        return answer_text
    pieces = enumerate(_MARKER.split(answer_text))
    return b"".join(lists_by_marker[piece].json if place % 2 else piece for place, piece in pieces)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
