"""Bodies of requests: come whole, within their limits, before anything is done for them."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from gateway.errors import HttpError
from paceline.runtime.gateway_config import GatewayConfig


def check_length(headers: Headers, config: GatewayConfig) -> None:
    """Refuse what says itself that it is too long. Raises as `read_body`."""
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > config.max_body_bytes:
        raise _too_large(config)


async def read_body(receive: Receive, config: GatewayConfig) -> bytes | None:
    """A request's whole body; None: its client has gone.

    Raises:
        HttpError: it is too long, or takes too long.
    """
    pieces: list[bytes] = []
    left, more = config.max_body_bytes, True
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                pieces.append(message.get("body", b""))
                left -= len(pieces[-1])
                if left < 0:
                    raise _too_large(config)
                more = message.get("more_body", False)
    except TimeoutError:
        limit = f"{config.body_timeout_s:g} s"
        raise HttpError(408, f"body: must be sent within {limit}", code="timeout") from None
    return b"".join(pieces)


def replayed(body: bytes, receive: Receive) -> Receive:
    """What an application receives: the whole body at once, then what comes."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def received() -> Message:
        nonlocal first
        message, first = first, None
        return await receive() if message is None else message

    return received


def _too_large(config: GatewayConfig) -> HttpError:
    return HttpError(413, f"body: must be at most max_body_bytes = {config.max_body_bytes}", code="body_too_large")
