"""Ignored fields of a request are named: in a header of its answer, in the debug log, once a process at INFO."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_gateway.caller import HttpCaller

HEADER = "X-Paceline-Ignored"
logger = logging.getLogger(__name__)


class IgnoredFields:
    """Adds the header, as plain ASGI; whoever reads a request calls `ignore` before its answer begins.

    Names are those of shapes' own fields (`hints`), so neither header nor logs grow with what clients send.
    """

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
