"""What holds for every request: its id, its line in the log, and its limits, as plain ASGI."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from weakref import WeakValueDictionary

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.access.places import RunningPlaces
from paceline.runtime import metrics
from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.http.bodies import check_length, read_body, replayed
from paceline_gateway.http.errors import FAILURES, HttpError, as_http, unsendable_key
from paceline_gateway.http.sites import Sites
from paceline_gateway.upstream.caller import HttpCaller, caller_of

logger = logging.getLogger(__name__)

RETRY_AFTER_MS = 1_000
MAX_BEGINNING = 32
"""Requests of one tenant that are read and begun at once: more would be no faster, and others would wait for all."""
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


async def _nobody(caller: HttpCaller) -> str:
    return ""


class Guard:
    """Lets a request in, bounds its body, names it, and logs how it ended.

    A place is for a request whose key is known to be one and whose body has come whole. Whoever has no key has
    places by his address.

    Args:
        app: what answers.
        config: its limits.
        running: counts the requests that have a place.
        tenant_of: says whose a caller's requests are; empty: nobody's in particular.
        shaped: an error in the shape of the API that a path belongs to.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: GatewayConfig,
        running: RunningRequests,
        tenant_of: Callable[[HttpCaller], Awaitable[str]] = _nobody,
        shaped: Callable[[str, HttpError], HttpError] = lambda path, error: error,
    ) -> None:
        self._app = app
        self._config = config
        self._running = running
        self._tenant_of = tenant_of
        self._shaped = shaped
        self._sites = Sites(config.allowed_host, config.server.host)
        self._places = RunningPlaces("max_concurrent_requests", config.max_concurrent_requests, RETRY_AFTER_MS)
        self._beginning = WeakValueDictionary[str, asyncio.Semaphore]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["caller"] = caller = caller_of(headers)
        said = _Said(send, caller)
        began = time.monotonic()
        try:
            await self._let_in(scope, headers, receive, said.send)
        except FAILURES as error:
            await self._shaped(scope["path"], as_http(error)).response(scope, receive, said.send)
        finally:
            seconds = time.monotonic() - began
            metrics.http_request_done(_route(scope), said.status, seconds)
            quiet = scope["path"] in ASKED_AGAIN_AND_AGAIN and said.status < 400
            logger.log(
                logging.DEBUG if quiet else logging.INFO,
                "request: method=%s path=%s status=%d ms=%.1f id=%s",
                scope["method"], scope["path"][:200], said.status, seconds * 1e3, caller.request_id,
            )  # fmt: skip

    async def _let_in(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Answer, or raise what is answered before the application has begun."""
        for host in headers.getlist("host"):
            if not self._sites.knows(host):
                raise _unknown_host(host)
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        caller: HttpCaller = scope["caller"]
        check_length(headers, self._config)
        if not caller.key_is_sendable:
            raise unsendable_key()
        tenant = await self._tenant_of(caller)
        if not tenant:
            self._check_origin(headers)
        body = await read_body(receive, self._config)
        if body is None:
            return
        whose = f"key of {tenant}" if tenant else f"address {(scope.get('client') or ('',))[0]}"
        async with self._place(whose) as begun:
            if (connection := scope.get("connection")) is not None:
                connection.let_in()
            scope["caller"] = replace(caller, on_begin=begun)
            await self._app(scope, replayed(body, receive), send)

    @asynccontextmanager
    async def _place(self, whose: str) -> AsyncIterator[Callable[[], None]]:
        """Run meanwhile; yields what to call once the answer has begun.

        Few of one tenant begin at once, so that many that come at once keep nobody else waiting.

        Raises:
            Overloaded: no place is free for it.
        """
        self._places.check(whose)
        with self._running.counted():
            async with self._places.place(whose):
                turns = self._beginning.setdefault(whose, asyncio.Semaphore(MAX_BEGINNING))
                await turns.acquire()
                begun = Once(turns.release)
                try:
                    yield begun
                finally:
                    begun()

    def _check_origin(self, headers: Headers) -> None:
        for origin in headers.getlist("origin"):
            if self._sites.is_foreign(origin, headers.get("host", "")):
                message = f"origin = {origin[:200]!r}: must be this gateway's own site, or one of allowed_host"
                raise HttpError(403, message, "permission_error", code="permission_denied")


class Once:
    """Calls something once, however often it is called."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        """Call it, unless that was done."""
        call, self._call = self._call, None
        if call is not None:
            call()


def _unknown_host(host: str) -> HttpError:
    message = f"host = {host[:200]!r}: must be an address, a name of this machine, or one of allowed_host"
    return HttpError(421, message, param=None, code="misdirected_request")


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
