"""Who sends an HTTP request, as far as its headers say."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.client.shared import is_sendable

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def _nothing() -> None:
    """Nobody waits."""


@dataclass(frozen=True)
class HttpCaller:
    """One request's headers.

    Attributes:
        request_id: the client's own, or one that was made for it.
        api_key: for the coordinator, which alone knows keys; None: none was sent.
        trace_headers: W3C's, as they were sent.
        key_is_sendable: whether a key that was sent can be one.
        begun: to call once the answer has begun; another of the same key may then begin.
    """

    request_id: str
    api_key: str | None = field(default=None, repr=False)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    key_is_sendable: bool = True
    begun: Callable[[], None] = field(default=_nothing, repr=False, compare=False)


def caller_of(headers: Mapping[str, str]) -> HttpCaller:
    """Of OpenAI's clients (`Authorization: Bearer`), or Anthropic's (`x-api-key`)."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    request_id = headers.get("x-request-id", "")
    return HttpCaller(
        request_id if _REQUEST_ID.fullmatch(request_id) else secrets.token_hex(16),
        key or None,
        {name: headers[name] for name in ("traceparent", "tracestate") if name in headers},
        not key or is_sendable(key),
    )
