"""The guard in front of every request, as plain ASGI: the request's id, its line in the log, and its limits."""

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
from paceline_gateway.http.bodies import check_length, read_body, replay
from paceline_gateway.http.errors import FAILURES, HttpError, as_http, unsendable_key
from paceline_gateway.http.sites import Sites
from paceline_gateway.upstream.caller import HttpCaller, caller_of

logger = logging.getLogger(__name__)

RETRY_AFTER_MS = 1_000
MAX_STARTING_REQUESTS = 32
"""Requests of one tenant that start at once: more would be no faster, and others would wait for all of them."""
CLIENT_CLOSED_REQUEST = 499
"""Status in the log of a request whose client has gone before an answer; no client sees it."""
PROBE_PATHS = ("/cluster", "/health", "/metrics", "/ping")
"""Paths that probes and pages ask for again and again; at INFO only their failures are logged."""


class RunningRequests:
    """Counts the requests that run now."""

    def __init__(self) -> None:
        self.count = 0
        self.is_draining = False

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count one more request within this context."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


async def _no_tenant(caller: HttpCaller) -> str:
    return ""


class Guard:
    """Admits requests, bounds their bodies, gives them ids, and logs how they ended.

    A request has a place once its key is accepted and its body has come whole. Callers without a key share the places
    of their address.

    Args:
        app: the application that answers.
        config: the limits.
        running_requests: counts the requests that have a place.
        tenant_of: returns a caller's tenant; empty: none in particular.
        error_shape: puts an error in the shape of the API that a path belongs to.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: GatewayConfig,
        running_requests: RunningRequests,
        tenant_of: Callable[[HttpCaller], Awaitable[str]] = _no_tenant,
        error_shape: Callable[[str, HttpError], HttpError] = lambda path, error: error,
    ) -> None:
        self._app = app
        self._config = config
        self._running_requests = running_requests
        self._tenant_of = tenant_of
        self._error_shape = error_shape
        self._sites = Sites(config.allowed_host, config.server.host)
        self._places = RunningPlaces("max_concurrent_requests", config.max_concurrent_requests, RETRY_AFTER_MS)
        self._start_turns = WeakValueDictionary[str, asyncio.Semaphore]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI defines it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["caller"] = caller = caller_of(headers)
        response = _LoggedResponse(send, caller)
        start = time.monotonic()
        try:
            await self._admit(scope, headers, receive, response.send)
        except FAILURES as error:
            await self._error_shape(scope["path"], as_http(error)).response(scope, receive, response.send)
        finally:
            seconds = time.monotonic() - start
            metrics.http_request_done(_route(scope), response.status, seconds)
            is_probe = scope["path"] in PROBE_PATHS and response.status < 400
            logger.log(
                logging.DEBUG if is_probe else logging.INFO,
                "request: method=%s path=%s status=%d ms=%.1f id=%s",
                scope["method"], scope["path"][:200], response.status, seconds * 1e3, caller.request_id,
            )  # fmt: skip

    async def _admit(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Let the application answer; what is raised here is answered before it has begun."""
        for host in headers.getlist("host"):
            if not self._sites.is_own(host):
                raise _host_error(host)
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
        owner = f"key of {tenant}" if tenant else f"address {(scope.get('client') or ('',))[0]}"
        async with self._place(owner) as on_begin:
            if (connection := scope.get("connection")) is not None:
                connection.admit()
            scope["caller"] = replace(caller, on_begin=on_begin)
            await self._app(scope, replay(body, receive), send)

    @asynccontextmanager
    async def _place(self, owner: str) -> AsyncIterator[Callable[[], None]]:
        """Hold a place within this context; yields a function to call once the answer has begun.

        Few requests of one tenant start at once, so that many that come together keep nobody else waiting.

        Raises:
            Overloaded: the owner has no free place.
        """
        self._places.check(owner)
        with self._running_requests.track():
            async with self._places.place(owner):
                turn_limit = self._start_turns.setdefault(owner, asyncio.Semaphore(MAX_STARTING_REQUESTS))
                await turn_limit.acquire()
                on_begin = OnceCall(turn_limit.release)
                try:
                    yield on_begin
                finally:
                    on_begin()

    def _check_origin(self, headers: Headers) -> None:
        for origin in headers.getlist("origin"):
            if self._sites.is_foreign(origin, headers.get("host", "")):
                message = f"origin = {origin[:200]!r}: must be this gateway's own site, or one of allowed_host"
                raise HttpError(403, message, "permission_error", code="permission_denied")


class OnceCall:
    """A function that calls another one once, however often it is called itself."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        """Call the function, if this is the first time."""
        call, self._call = self._call, None
        if call is not None:
            call()


def _host_error(host: str) -> HttpError:
    message = f"host = {host[:200]!r}: must be an address, a name of this machine, or one of allowed_host"
    return HttpError(421, message, param=None, code="misdirected_request")


def _route(scope: Scope) -> str:
    """Return the template of a request's route; clients can make up any number of paths."""
    return getattr(scope.get("route"), "path", "none")


class _LoggedResponse:
    """A response that bears the request's id, and whose status is kept for the log."""

    def __init__(self, send: Send, caller: HttpCaller) -> None:
        self._send = send
        self._caller = caller
        self.status = CLIENT_CLOSED_REQUEST

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self._caller.request_id
        await self._send(message)
