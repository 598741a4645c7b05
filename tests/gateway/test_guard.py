"""What holds for every request, over an application that only reads its body."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.http.guard import Guard, RunningRequests

ALLOWED = 1024
Messages = list[dict[str, Any]]


class GuardedApp:
    """A guard, and behind it an application that reads a body, waits until it may answer, and answers."""

    def __init__(self, tenant_of: Any = None, **settings: Any) -> None:
        self.running = RunningRequests()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.bytes_read = 0
        self.reads = asyncio.Event()
        self.callers: list[Any] = []
        config = GatewayConfig.model_validate(settings)
        self._guard = Guard(self._answer, config, self.running, *([tenant_of] if tenant_of else []))

    async def ask(
        self, *sizes: int, ends: bool = True, method: str = "POST", client: Any = None, **headers: str
    ) -> Messages:
        """What a client gets that sends pieces of a body, the last one unless it `ends`, and then nothing."""
        last = len(sizes) - 1 if ends else None
        pieces = [
            {"type": "http.request", "body": b"a" * size, "more_body": place != last}
            for place, size in enumerate(sizes)
        ]
        sent: Messages = []

        async def receive() -> dict[str, Any]:
            if not pieces:
                await asyncio.Event().wait()
            return pieces.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": "/", "headers": lines, "client": client}
        await asyncio.wait_for(self._guard(scope, receive, send), 10)
        return sent

    async def status(self, *sizes: int, **request: Any) -> int:
        return int((await self.ask(*sizes, **request))[0]["status"])

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.callers.append(scope.get("caller"))
        more = True
        while more:
            message = await receive()
            self.bytes_read += len(message.get("body", b""))
            self.reads.set()
            more = message.get("more_body", False)
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def guarded(**settings: Any) -> GuardedApp:
    return GuardedApp(**{"max_body_bytes": ALLOWED, "max_concurrent_requests": 1, "body_timeout_s": 5.0} | settings)


async def test_a_request_beyond_the_limit_is_told_when_to_come_again_and_probes_are_not_counted() -> None:
    app = guarded()
    app.may_answer.clear()
    first = asyncio.create_task(app.status(1))
    await app.reads.wait()
    assert app.running.count == 1
    start, body = await app.ask(1)
    assert (start["status"], dict(start["headers"])[b"retry-after"]) == (429, b"1")
    assert "max_concurrent_requests = 1" in json.loads(body["body"])["error"]["message"]
    app.may_answer.set()
    assert await app.status(0, method="GET") == 200
    assert await first == 200
    assert app.running.count == 0


async def test_a_body_of_the_allowed_size_is_read_and_one_byte_more_is_not() -> None:
    app = guarded()
    assert await app.status(ends=False, content_length=str(ALLOWED + 1)) == 413
    assert app.bytes_read == 0, "that is known before anything is read"
    assert await app.status(ALLOWED - 1, 1) == 200
    assert await app.status(ALLOWED, 1) == 413
    assert app.bytes_read == ALLOWED


async def test_a_body_that_stops_coming_is_given_up() -> None:
    app = guarded(body_timeout_s=0.05)
    assert await app.status(1, ends=False) == 408
    assert (app.running.count, app.bytes_read) == (0, 0)
