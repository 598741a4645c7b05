"""Requests as their clients see them, over gRPC and over HTTP; nobody tries again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from paceline.client import AsyncClient
from paceline.protocol.errors import Overloaded, PacelineError
from paceline.protocol.generation import Tokens
from paceline_lab.bench.simulated.services import OFF, request

TEXTS = 16
SERVED, REFUSED, CHANGED, LOST = "served", "refused", "changed", "lost"
GRPC, HTTP = "gRPC", "HTTP"
TOO_MANY_REQUESTS = 429


@dataclass
class UserRequest:
    """One request: when it was sent, what became of it, and when what came.

    Attributes:
        way: gRPC or HTTP.
        sent_s: on the clock of `time.perf_counter`.
        outcome: one of the four above.
        arrivals_s: of messages with tokens, on the same clock.
        ended_s: when it was over, on the same clock.
        hint_ms: when to come again, as a refusal says; None: it doesn't.
        why: of one that was lost.
    """

    way: str
    sent_s: float
    outcome: str = LOST
    arrivals_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    hint_ms: float | None = None
    why: str = ""

    @property
    def gaps_ms(self) -> list[float]:
        """Between its messages with tokens."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return [1e3 * (later - earlier) for earlier, later in pairs]

    @property
    def first_ms(self) -> float:
        """Until its first token."""
        return 1e3 * (self.arrivals_s[0] - self.sent_s)

    @property
    def refusal_ms(self) -> float:
        """Until it was refused."""
        return 1e3 * (self.ended_s - self.sent_s)

    def end(self, outcome: str, *, hint_ms: float | None = None, why: str = "") -> UserRequest:
        """It is over."""
        self.outcome, self.hint_ms, self.why, self.ended_s = outcome, hint_ms, why, time.perf_counter()
        return self

    def judge(self, token_ids: Sequence[int], expected: Sequence[int]) -> UserRequest:
        """It has come to its end with this text."""
        return self.end(SERVED if list(token_ids) == list(expected) else CHANGED)


Ask = Callable[[int], Coroutine[None, None, UserRequest]]
"""Sends the request of a number."""


class GrpcUsers:
    """Ask a coordinator."""

    def __init__(self, client: AsyncClient, tokens: int, expected: Sequence[Sequence[int]]) -> None:
        self._client = client
        self._tokens = tokens
        self._expected = expected

    async def ask(self, number: int) -> UserRequest:
        """Send one request."""
        text = number % TEXTS
        asked, token_ids = UserRequest(GRPC, time.perf_counter()), list[int]()
        try:
            async for event in self._client.stream(request(text, self._tokens, OFF)):
                if isinstance(event, Tokens):
                    asked.arrivals_s.append(time.perf_counter())
                    token_ids += event.token_ids
        except Overloaded as error:
            return asked.end(REFUSED, hint_ms=error.retry_after_ms)
        except PacelineError as error:
            return asked.end(LOST, why=f"{error.reason}: {error.message}")
        return asked.judge(token_ids, self._expected[text])


class HttpUsers:
    """Ask a gateway, each over a connection of its own."""

    def __init__(self, address: str, tokens: int, expected: Sequence[Sequence[int]]) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._tokens = tokens
        self._expected = expected

    async def ask(self, number: int) -> UserRequest:
        """Send one request."""
        text = number % TEXTS
        asked = UserRequest(HTTP, time.perf_counter())
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                writer.write(self._sent(text))
                return await self._received(asked, reader, self._expected[text])
            finally:
                writer.close()
        except (OSError, EOFError) as error:
            return asked.end(LOST, why=repr(error))

    def _sent(self, text: int) -> bytes:
        asked = request(text, self._tokens, OFF)
        body = {
            "prompt": list(asked.token_ids or ()),
            "seed": asked.seed,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "paceline": {"off": True},
        }
        content = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        return b"%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (head, len(content), content)

    async def _received(
        self, asked: UserRequest, reader: asyncio.StreamReader, expected: Sequence[int]
    ) -> UserRequest:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        if status == TOO_MANY_REQUESTS:
            after_s = headers.get("retry-after")
            return asked.end(REFUSED, hint_ms=None if after_s is None else 1e3 * float(after_s))
        token_ids: list[int] = []
        async for line in reader:
            if line.startswith(b"data: {") and (came := _ids_of(line)):
                asked.arrivals_s.append(time.perf_counter())
                token_ids += came
            elif line.startswith(b"data: [DONE]"):
                return asked.judge(token_ids, expected)
        return asked.end(LOST, why=f"status {status}, and no end of the text")


def _ids_of(line: bytes) -> list[int]:
    choices = json.loads(line.removeprefix(b"data: ")).get("choices") or [{}]
    found: list[int] = choices[0].get("token_ids") or []
    return found
