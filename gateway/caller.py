"""Who sends an HTTP request, as far as its headers say."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_KEY = re.compile(r"[!-~]{1,1024}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True)
class HttpCaller:
    """One request's headers.

    Attributes:
        request_id: the client's own, or one that was made for it.
        api_key: for the coordinator, which alone knows keys; None: none was sent.
        traceparent: of the client's span; empty: none, or none that W3C would know.
        key_is_sendable: whether a key that was sent can be one.
    """

    request_id: str
    api_key: str | None = None
    traceparent: str = ""
    key_is_sendable: bool = True


def caller_of(headers: Mapping[str, str]) -> HttpCaller:
    """Of OpenAI's clients (`Authorization: Bearer`), or Anthropic's (`x-api-key`)."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    traceparent = headers.get("traceparent", "")
    request_id = headers.get("x-request-id", "")
    return HttpCaller(
        request_id if _REQUEST_ID.fullmatch(request_id) else secrets.token_hex(16),
        key or None,
        traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
        not key or _KEY.fullmatch(key) is not None,
    )
