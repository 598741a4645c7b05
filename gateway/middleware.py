"""What holds for every request: its id, its line in the log, and its limits, as plain ASGI."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.caller import HttpCaller, caller_of
from gateway.dialects import in_dialect
from gateway.errors import HttpError, http_error, unsendable_key
from paceline.access.places import RunningPlaces
from paceline.protocol.errors import Overloaded
from paceline.runtime import metrics
from paceline.runtime.gateway_config import GatewayConfig

logger = logging.getLogger(__name__)

RETRY_AFTER_MS = 1_000
CLIENT_GONE = 499
"""What the log says of a request whose client has gone before an answer; no client sees it."""


ASKED_AGAIN_AND_AGAIN = ("/cluster", "/health", "/metrics", "/ping")
"""Paths of probes and pages: the log tells only where they fail."""


class RunningRequests:
    """Requests that run now."""

    def __init__(self) -> None:
        self.count = 0
        self.draining = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """One more meanwhile."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


class Guard:
    """Lets a request in, bounds its body, names it, and logs how it ended."""

    def __init__(self, app: ASGIApp, config: GatewayConfig, running: RunningRequests) -> None:
        self._app = app
        self._config = config
        self._running = running
        self._places = RunningPlaces("max_concurrent_requests", config.max_concurrent_requests, RETRY_AFTER_MS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller = caller_of(headers)
        scope["caller"] = caller
        said = _Said(send, caller)
        began = time.monotonic()
        try:
            await self._let_in(scope, headers, caller, _Body(receive, self._config).receive, said.send)
        finally:
            seconds = time.monotonic() - began
            metrics.http_request_done(_route(scope), said.status, seconds)
            quiet = scope["path"] in ASKED_AGAIN_AND_AGAIN and said.status < 400
            logger.log(
                logging.DEBUG if quiet else logging.INFO,
                "request: method=%s path=%s status=%d ms=%.1f id=%s",
                scope["method"], scope["path"][:200], said.status, seconds * 1e3, caller.request_id,
            )  # fmt: skip

    async def _let_in(self, scope: Scope, headers: Headers, caller: HttpCaller, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        whose = caller.api_key or ""
        refusal = self._refusal(headers, caller, whose)
        if refusal is not None:
            await in_dialect(scope["path"], refusal).response(scope, receive, send)
            return
        with self._running.counted():
            async with self._places.taken(whose):
                await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, caller: HttpCaller, whose: str) -> HttpError | None:
        try:
            self._places.check(whose)
        except Overloaded as error:
            return http_error(error)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._config.max_body_bytes:
            return too_large(self._config)
        return None if caller.key_is_sendable else unsendable_key()


def _route(scope: Scope) -> str:
    """The template of a request's route: paths of requests are as many as clients like."""
    return getattr(scope.get("route"), "path", "none")


class _Said:
    """What is sent, with the request's id."""

    def __init__(self, send: Send, caller: HttpCaller) -> None:
        self._send = send
        self._caller = caller
        self.status = CLIENT_GONE

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self._caller.request_id
        await self._send(message)


class _Body:
    """A body within its limits."""

    def __init__(self, receive: Receive, config: GatewayConfig) -> None:
        self._receive = receive
        self._config = config
        self._left = config.max_body_bytes
        self._deadline = time.monotonic() + config.body_timeout_s
        self._whole = False

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            limit = f"{self._config.body_timeout_s:g} s"
            raise _refusing(HttpError(408, f"body: must be sent within {limit}", code="timeout")) from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise _refusing(too_large(self._config))
        self._whole = not message.get("more_body", False)
        return message


def too_large(config: GatewayConfig) -> HttpError:
    """A body beyond its limit."""
    return HttpError(413, f"body: must be at most max_body_bytes = {config.max_body_bytes}", code="body_too_large")


def _refusing(error: HttpError) -> HTTPException:
    """The one kind of exception that passes through the reading of a body."""
    found = HTTPException(error.status, detail=error.message)
    found.detail = error  # type: ignore[assignment]  # read by the handler of the application
    return found


def detail_of(error: HTTPException) -> HttpError:
    """An exception of the framework's, or the error that it stands for."""
    detail: Any = error.detail
    return detail if isinstance(detail, HttpError) else HttpError(error.status_code, str(detail))
