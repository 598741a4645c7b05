"""Fields that can't change a text: hints, labels, what to store or cache. They are taken, ignored, and named.

A header of the answer names them, the debug log does, and once a process the log at INFO. Names are those of the
shapes' own fields, so that neither header nor logs grow with what clients send.
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
IGNORED = "taken, and ignored"
"""Marks such a field."""
Hint = Annotated[Any, IGNORED]
"""The type of one that may have any value: nobody reads it."""
_EMPTY: tuple[Any, ...] = (None, "", [], {})


def hints_of(part: object, path: str = "") -> Iterator[str]:
    """Names of the hints that a request has, without the indexes of lists: `messages.content.cache_control`."""
    if isinstance(part, list):
        if part and isinstance(part[0], int | str):
            return  # ids, a million of them
        for item in part:
            yield from hints_of(item, path)
    elif isinstance(part, BaseModel):
        fields = type(part).model_fields
        for name in part.model_fields_set:
            value = getattr(part, name)
            if IGNORED not in fields[name].metadata:
                yield from hints_of(value, f"{path}{name}.")
            elif value not in _EMPTY:
                yield f"{path}{name}"


class IgnoredFields:
    """Adds the header, as plain ASGI; whoever reads a request calls `ignore` before its answer begins."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._logged = set[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        names: set[str] = scope.setdefault("ignored", set())

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start" and names:
                MutableHeaders(scope=message)[HEADER] = ", ".join(sorted(names))
                self._log(names, scope["caller"])
            await send(message)

        await self._app(scope, receive, told)

    def _log(self, names: Collection[str], caller: HttpCaller) -> None:
        for name in sorted(set(names) - self._logged):
            logger.info("ignored, since it can't change a text; said once: field=%s", name)
        self._logged.update(names)
        logger.debug("ignored: fields=%s id=%s", ",".join(sorted(names)), caller.request_id)


def ignore(scope: Scope, names: Iterable[str]) -> None:
    """Note fields of the request that runs in this scope."""
    scope["ignored"].update(names)
