"""What holds for every request, over an application that only reads its body."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.http.guard import Guard, RunningRequests

ALLOWED = 1024
Messages = list[dict[str, Any]]


class ReadingApp:
    """Reads a body, waits until it may answer, and answers."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.read = 0
        self.reads = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            self.read += len(message.get("body", b""))
            self.reads.set()
            more = message.get("more_body", False)
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def guarded(app: ReadingApp, running: RunningRequests, **settings: Any) -> Guard:
    given = {"max_body_bytes": ALLOWED, "max_concurrent_requests": 1, "body_timeout_s": 5.0} | settings
    return Guard(app, GatewayConfig.model_validate(given), running)


async def asked(
    guard: Guard, pieces: Messages, method: str = "POST", headers: tuple[Any, ...] = (), client: Any = None
) -> Messages:
    """What is sent to a client that sends these pieces, and then nothing."""
    sent: Messages = []
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/", "headers": list(headers), "client": client}
    await asyncio.wait_for(guard(scope, receive, send), 10)
    return sent


def piece(size: int, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": b"a" * size, "more_body": more}


async def test_a_request_beyond_the_limit_is_told_when_to_come_again_and_probes_are_not_counted() -> None:
    app, running = ReadingApp(), RunningRequests()
    guard = guarded(app, running)
    app.may_answer.clear()
    first = asyncio.create_task(asked(guard, [piece(1, more=False)]))
    await app.reads.wait()
    assert running.count == 1
    start, body = await asked(guard, [piece(1, more=False)])
    assert (start["status"], dict(start["headers"])[b"retry-after"]) == (429, b"1")
    assert "max_concurrent_requests = 1" in json.loads(body["body"])["error"]["message"]
    app.may_answer.set()
    assert (await asked(guard, [piece(0, more=False)], "GET"))[0]["status"] == 200
    assert (await first)[0]["status"] == 200
    assert running.count == 0


async def test_a_body_of_the_allowed_size_is_read_and_one_byte_more_is_not() -> None:
    app = ReadingApp()
    guard = guarded(app, RunningRequests())
    assert (await asked(guard, [piece(ALLOWED - 1, more=True), piece(1, more=False)]))[0]["status"] == 200
    sent = await asked(guard, [piece(ALLOWED, more=True), piece(1, more=False)])
    assert sent[0]["status"] == 413
    assert app.read == ALLOWED


async def test_a_length_beyond_the_limit_is_refused_before_anything_is_read() -> None:
    app = ReadingApp()
    sent = await asked(guarded(app, RunningRequests()), [], headers=((b"content-length", b"1025"),))
    assert (sent[0]["status"], app.read) == (413, 0)


async def test_a_body_that_stops_coming_is_given_up() -> None:
    app, running = ReadingApp(), RunningRequests()
    sent = await asked(guarded(app, running, body_timeout_s=0.05), [piece(1, more=True)])
    assert (sent[0]["status"], running.count, app.read) == (408, 0, 0)
