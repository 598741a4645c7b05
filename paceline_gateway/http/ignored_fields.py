"""Fields that can't change a text: hints, labels, what to store or cache. They are accepted, ignored, and named.

A header of the answer names them, and so does the debug log; the log at INFO names each once a process. Only names of
the shapes' own fields appear there, so neither header nor logs grow with what clients send.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any

from pydantic import BaseModel
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_gateway.upstream.caller import HttpCaller

logger = logging.getLogger(__name__)
HEADER = "X-Paceline-Ignored"
HINT_MARK = "taken, and ignored"
"""Marks the annotation of such a field."""
Hint = Annotated[Any, HINT_MARK]
"""The type of an ignored field, which may have any value."""
_EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})


def hints_of(part: object, path: str = "") -> Iterator[str]:
    """Yield the names of a request's hints, without the indexes of lists: `messages.content.cache_control`."""
    if isinstance(part, list):
        if part and isinstance(part[0], int | str):
            return  # ids, a million of them
        for item in part:
            yield from hints_of(item, path)
    elif isinstance(part, BaseModel):
        fields = type(part).model_fields
        for name in part.model_fields_set:
            value = getattr(part, name)
            if HINT_MARK not in fields[name].metadata:
                yield from hints_of(value, f"{path}{name}.")
            elif value not in _EMPTY_VALUES:
                yield f"{path}{name}"


class IgnoredFields:
    """Adds the header, as plain ASGI; a route calls `ignore` before its answer begins."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._logged_names = set[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI defines it."""
        names: set[str] = scope.setdefault("ignored", set())

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and names:
                MutableHeaders(scope=message)[HEADER] = ", ".join(sorted(names))
                self._log(names, scope["caller"])
            await send(message)

        await self._app(scope, receive, send_with_header)

    def _log(self, names: Collection[str], caller: HttpCaller) -> None:
        for name in sorted(set(names) - self._logged_names):
            logger.info("ignored, since it can't change a text; said once: field=%s", name)
        self._logged_names.update(names)
        logger.debug("ignored: fields=%s id=%s", ",".join(sorted(names)), caller.request_id)


def ignore(scope: Scope, names: Iterable[str]) -> None:
    """Note ignored fields of the request in this scope."""
    scope["ignored"].update(names)
