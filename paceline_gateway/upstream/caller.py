"""Who sends an HTTP request, as far as its headers say."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.client.shared import is_sendable

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def _no_action() -> None:
    """Do nothing: no other request waits."""


@dataclass(frozen=True)
class HttpCaller:
    """Who sends one request.

    Attributes:
        request_id: the client's own, or one that the gateway made.
        api_key: for the coordinator, which alone knows keys; None: the client sent none.
        trace_headers: W3C's, as the client sent them.
        key_is_sendable: whether gRPC can carry the key.
        on_begin: called once the answer has begun; another request of the same key may then begin.
    """

    request_id: str
    api_key: str | None = field(default=None, repr=False)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    key_is_sendable: bool = True
    on_begin: Callable[[], None] = field(default=_no_action, repr=False, compare=False)


def caller_of(headers: Mapping[str, str]) -> HttpCaller:
    """Read the headers of OpenAI's clients (`Authorization: Bearer`) or Anthropic's (`x-api-key`)."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    request_id = headers.get("x-request-id", "")
    return HttpCaller(
        request_id if _REQUEST_ID.fullmatch(request_id) else secrets.token_hex(16),
        key or None,
        {name: headers[name] for name in ("traceparent", "tracestate") if name in headers},
        not key or is_sendable(key),
    )
