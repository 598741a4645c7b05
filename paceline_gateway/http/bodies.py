"""Bodies of requests: they come whole and within their limits before any work is done for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from paceline.models.prompts import AT_ONCE_BYTES, PromptReader
from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.http.errors import HttpError
from paceline_gateway.http.shapes import MAX_PARTS, parts_of

JSON_AT_ONCE = 16 * AT_ONCE_BYTES
"""JSON up to this size is read on the loop, within 5 ms whatever it is made of."""


class JsonRequest(Request):
    """A request whose body, if it is long, is read beside the event loop."""

    async def check(self) -> JsonRequest:
        """Return the request itself.

        Raises:
            HttpError: its body has too many parts.
        """
        body = await self.body()
        await self._beside_loop(lambda: _check_parts(body), body)
        return self

    async def json(self) -> Any:
        """Read the body. Raises as `json.loads`."""
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = await self._beside_loop(lambda: json.loads(body), body)
        return self._json

    async def _beside_loop(self, work: Callable[[], Any], body: bytes) -> Any:
        prompts: PromptReader = self.app.state.prompts
        return await prompts.run(work, len(body) if len(body) > JSON_AT_ONCE else 0)


class JsonRoute(APIRoute):
    """A route that reads its requests as `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Override FastAPI's handler, which is the way to requests of another class."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(await JsonRequest(request.scope, request.receive).check())

        return handler


def check_length(headers: Headers, config: GatewayConfig) -> None:
    """Refuse a body whose `Content-Length` is too long. Raises as `read_body`."""
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > config.max_body_bytes:
        raise _length_error(config)


async def read_body(receive: Receive, config: GatewayConfig) -> bytes | None:
    """Read a request's whole body; None: its client has gone.

    Raises:
        HttpError: the body is too long, or takes too long.
    """
    pieces: list[bytes] = []
    remaining_bytes, is_open = config.max_body_bytes, True
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while is_open:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                pieces.append(message.get("body", b""))
                remaining_bytes -= len(pieces[-1])
                if remaining_bytes < 0:
                    raise _length_error(config)
                is_open = message.get("more_body", False)
    except TimeoutError:
        limit = f"{config.body_timeout_s:g} s"
        raise HttpError(408, f"body: must be sent within {limit}", code="timeout") from None
    return b"".join(pieces)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the whole body at once, then what comes."""
    whole_body: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def next_message() -> Message:
        nonlocal whole_body
        message, whole_body = whole_body, None
        return await receive() if message is None else message

    return next_message


def _length_error(config: GatewayConfig) -> HttpError:
    return HttpError(413, f"body: must be at most max_body_bytes = {config.max_body_bytes}", code="body_too_large")


def _check_parts(body: bytes) -> None:
    if (parts := parts_of(body)) > MAX_PARTS:
        message = f"body: must have at most {MAX_PARTS} objects, lists and fields together, and has {parts}"
        raise HttpError(400, message, code="invalid_body")
