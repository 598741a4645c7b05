"""Errors as OpenAI's clients read them: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from paceline.protocol.errors import (
    Code,
    PacelineError,
    Unauthenticated,
    UnknownModel,
)
from paceline_gateway.http.shapes import UNSUPPORTED_TYPE

INVALID_REQUEST = "invalid_request_error"
MAX_NAME_CHARACTERS = 64
MAX_PATH_PARTS = 8
"""Longest path of a parameter that an error names: deeper ones are in JSON of the client's own."""
UNAVAILABLE_RETRY_S = 1
"""When a client may try again that found no coordinator or no target; their restart takes longer."""


class ErrorFields(BaseModel):
    """The fields of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of an error."""

    error: ErrorFields


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request is wrong, refused, or too much."},
    "5XX": {"model": ErrorReply, "description": "No coordinator, no target, no time, or a defect."},
}
"""OpenAPI's description of the errors of every route."""


@dataclass(eq=False)
class HttpError(Exception):
    """An error as it is sent; not frozen, since Python writes an exception's traceback."""

    status: int
    message: str
    type: str = INVALID_REQUEST
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The body in OpenAI's shape."""
        fields = ErrorFields(message=self.message, type=self.type, param=self.param, code=self.code)
        return ErrorReply(error=fields).model_dump()

    @property
    def response(self) -> Response:
        """The whole response, in ASCII alone: a refused value may hold what UTF-8 can't."""
        content = json.dumps(self.body).encode()
        return Response(content, self.status, dict(self.headers), "application/json")


FAILURES = (HttpError, PacelineError)
"""Failures of a request that its client is told of."""


@dataclass(frozen=True)
class _Kind:
    status: int
    type: str = INVALID_REQUEST
    code: str | None = None


_KINDS: Mapping[Code, _Kind] = {
    Code.INVALID_ARGUMENT: _Kind(400, code="invalid_value"),
    Code.UNIMPLEMENTED: _Kind(400, code="unsupported_value"),
    Code.UNAUTHENTICATED: _Kind(401, code="invalid_api_key"),
    Code.PERMISSION_DENIED: _Kind(403, "permission_error", "permission_denied"),
    Code.NOT_FOUND: _Kind(404, code="not_found"),
    Code.RESOURCE_EXHAUSTED: _Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    Code.UNAVAILABLE: _Kind(503, "service_unavailable_error", "service_unavailable"),
    Code.DEADLINE_EXCEEDED: _Kind(504, "timeout_error", "timeout"),
    Code.CANCELLED: _Kind(499, "cancelled_error", "cancelled"),
}
_DEFECT = _Kind(500, "server_error", "internal_error")
_LENGTH_FIELDS = ("prompt length", "prompt bytes", "chat content bytes")
_PARAMS: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "prompt length": "prompt",
    "prompt bytes": "prompt",
    "prompt token_ids": "prompt",
    "token_ids": "prompt",
    "chat content bytes": "messages",
    "chat messages": "messages",
    "message content": "messages",
    "message content: texts of special tokens": "messages",
    "names in tools and arguments": "tools",
    "stop string": "stop",
    "stop strings": "stop",
    "drafter": "paceline.drafter",
    "num_draft_tokens": "paceline.num_draft_tokens",
}
"""HTTP's names for fields of our protocol; other fields have the same name."""


def http_error(error: PacelineError) -> HttpError:
    """Translate a typed error to HTTP."""
    if isinstance(error, UnknownModel):
        return HttpError(404, error.message, param="model", code="model_not_found")
    kind = _KINDS.get(error.code, _DEFECT)
    name = error.metadata.get("field")
    code = "context_length_exceeded" if name in _LENGTH_FIELDS else kind.code
    message = error.message
    if name is None or kind.status != 400:
        return HttpError(kind.status, message, kind.type, None, code, _headers(error, kind))
    param = _param_of(name)
    if " " not in name and message.startswith(name):
        message = param + message.removeprefix(name)
    return HttpError(kind.status, message, kind.type, param, code)


def as_http(error: HttpError | PacelineError) -> HttpError:
    """Return an error as it is sent."""
    return error if isinstance(error, HttpError) else http_error(error)


def refusal(param: str, message: str, code: str = "invalid_value") -> HttpError:
    """Build the error for a parameter that is wrong, or that this gateway doesn't have."""
    return HttpError(400, f"{param}: {message}", param=param, code=code)


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> HttpError:
    """Build the error for the first thing that pydantic finds wrong with a body."""
    first = errors[0]
    kind, place = first["type"], first["loc"][1:]
    if kind == "json_invalid":
        return HttpError(400, f"body: must be JSON ({first.get('ctx', {}).get('error', first['msg'])})", code=kind)
    param = field_path(place, keeps_last=kind == "extra_forbidden")
    if kind == "extra_forbidden":
        return refusal(param, "unknown, or not supported by this server", "unsupported_parameter")
    if kind == UNSUPPORTED_TYPE:
        return refusal(param, first["msg"], "unsupported_value")
    if not param and kind != "too_many_fields":
        message = "body: must be a JSON object, sent as Content-Type: application/json"
        return HttpError(400, message, code="invalid_body")
    input_text = "" if kind == "missing" else f" = {reprlib.repr(first.get('input'))}"
    return HttpError(400, f"{param or 'body'}{input_text}: {first['msg']}", param=param or None, code="invalid_value")


def unsendable_key() -> HttpError:
    """Build the error for a key that gRPC can't carry."""
    return http_error(Unauthenticated("authorization: must be 'Bearer KEY', the key in ASCII without white space"))


def _param_of(name: str) -> str:
    param = _PARAMS.get(name)
    return param if param is not None else name.partition(" ")[0]


def field_path(place: Sequence[object], *, keeps_last: bool) -> str:
    """Write a field's path, without pydantic's names for members of unions, and no longer than anybody would read.

    Args:
        place: `loc` of pydantic's error.
        keeps_last: whether the last part is a name that the client chose.
    """
    names = [part for index, part in enumerate(place) if _is_field(part) or (keeps_last and index == len(place) - 1)]
    return ".".join(str(part)[:MAX_NAME_CHARACTERS] for part in names[:MAX_PATH_PARTS])


def _is_field(part: object) -> bool:
    """Whether a part of pydantic's path is a field's name or index, not the name of a union's member."""
    if isinstance(part, int):
        return True
    text = str(part)
    return text.replace("_", "").isalnum() and text.islower() and text not in ("str", "int", "float", "bool", "none")


def _headers(error: PacelineError, kind: _Kind) -> dict[str, str]:
    if kind.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if kind.status not in (429, 503):
        return {}
    retry_after_ms = error.retry_after_ms
    return {"Retry-After": str(UNAVAILABLE_RETRY_S if retry_after_ms is None else math.ceil(retry_after_ms / 1000))}
