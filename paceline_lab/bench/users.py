"""Requests as their users see them, over gRPC and over HTTP; users don't try again."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from paceline.client import AsyncClient
from paceline.protocol.errors import Overloaded, PacelineError
from paceline.protocol.generation import Finished, GenerateRequest, Tokens
from paceline.protocol.records import GenerationStats

GRPC, HTTP = "gRPC", "HTTP"
TOO_MANY_REQUESTS = 429
TOKEN_MARK = b'"token_ids":['


class RequestOutcome(StrEnum):
    """How a request ended: with its text, with a refusal, or with no end."""

    SERVED = "served"
    REFUSED = "refused"
    LOST = "lost"


@dataclass
class UserRequest:
    """One request: when it was sent, how it ended, and when its tokens came.

    Attributes:
        protocol: gRPC or HTTP.
        sent_s: when it was sent, on the clock of `time.perf_counter`.
        outcome: how it ended.
        arrivals_s: when each message with tokens came, on the same clock.
        messages: each message, as token ids or as an HTTP event's line. The line is parsed only when somebody asks:
            parsing it while others wait for theirs would count as the service's time.
        why: why the request was refused or lost.
        stats: the generation's statistics, which come over gRPC alone.
    """

    protocol: str
    sent_s: float
    outcome: RequestOutcome = RequestOutcome.LOST
    arrivals_s: list[float] = field(default_factory=list)
    messages: list[Sequence[int] | bytes] = field(default_factory=list)
    why: str = ""
    stats: GenerationStats = field(default_factory=GenerationStats)

    def arrive(self, message: Sequence[int] | bytes) -> None:
        """Note a message with tokens and the time at which it came."""
        self.arrivals_s.append(time.perf_counter())
        self.messages.append(message)

    @cached_property
    def ids(self) -> list[list[int]]:
        """Return each message's tokens, once all messages have come."""
        return [_ids_of(each) if isinstance(each, bytes) else list(each) for each in self.messages]

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens of the whole text."""
        return [token_id for each in self.ids for token_id in each]

    @property
    def gaps_ms(self) -> list[float]:
        """Return the times between messages with tokens."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return [1e3 * (later - earlier) for earlier, later in pairs]

    @property
    def first_ms(self) -> float:
        """Return the time from sending to the first token."""
        return 1e3 * (self.arrivals_s[0] - self.sent_s)

    @property
    def token_ms(self) -> float:
        """Return the mean time per token behind the first message; 0 where there is no second message."""
        later_tokens = len(self.token_ids) - len(self.ids[0])
        return sum(self.gaps_ms) / later_tokens if later_tokens else 0.0

    def end(self, outcome: RequestOutcome, why: str = "") -> UserRequest:
        """Note how the request ended."""
        self.outcome, self.why = outcome, why
        return self


class GrpcUsers:
    """Users of coordinators, who ask each in turn, over one channel to each."""

    def __init__(self, *clients: AsyncClient) -> None:
        self._clients = itertools.cycle(clients)

    async def connect(self, count: int) -> None:
        """Do nothing: all requests share the channel, which is there."""

    async def ask(self, request: GenerateRequest) -> UserRequest:
        """Send one request."""
        user = UserRequest(GRPC, time.perf_counter())
        try:
            async for event in next(self._clients).stream(request):
                if isinstance(event, Tokens):
                    user.arrive(event.token_ids)
                elif isinstance(event, Finished):
                    user.stats = event.stats
        except PacelineError as error:
            outcome = RequestOutcome.REFUSED if isinstance(error, Overloaded) else RequestOutcome.LOST
            return user.end(outcome, f"{error.reason}: {error.message}")
        return user.end(RequestOutcome.SERVED)


class HttpUsers:
    """Users of a gateway, who stream completions of token ids, each over a connection of its own."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect(self, count: int) -> None:
        """Open connections for the next requests, so that these find them open."""
        self._open += [await asyncio.open_connection(self._host, self._port) for _ in range(count)]

    async def ask(self, request: GenerateRequest) -> UserRequest:
        """Send one request."""
        user = UserRequest(HTTP, time.perf_counter())
        try:
            if not self._open:
                await self.connect(1)
            reader, writer = self._open.pop()
            try:
                writer.write(completion(request))
                return await _receive(user, reader)
            finally:
                writer.close()
        except (OSError, EOFError) as error:
            return user.end(RequestOutcome.LOST, repr(error))


def completion(request: GenerateRequest) -> bytes:
    """Write a request for a streamed completion, or for that of a chat, as bytes of HTTP."""
    speculation = request.speculation
    body: dict[str, object] = {
        "seed": request.seed,
        "max_tokens": request.max_new_tokens,
        "ignore_eos": request.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # or a token that has no text yet would have no event
        "paceline": {"off": True}
        if speculation.off
        else {"drafter": speculation.drafter, "num_draft_tokens": speculation.num_draft_tokens},
    }
    if request.messages:
        path = b"chat/completions"
        body["temperature"] = request.sampling.temperature
        body["messages"] = [{"role": each.role, "content": each.content} for each in request.messages]
    else:
        path = b"completions"
        body["prompt"] = list(request.token_ids or ())
    content = json.dumps(body).encode()
    head = b"POST /v1/%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % path
    return b"%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (head, len(content), content)


async def _receive(user: UserRequest, reader: asyncio.StreamReader) -> UserRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split()[1])
    if status == TOO_MANY_REQUESTS:
        return user.end(RequestOutcome.REFUSED, f"status {status}")
    async for line in reader:
        if line.startswith(b"data: {") and TOKEN_MARK in line and TOKEN_MARK + b"]" not in line:
            user.arrive(line)
        elif line.startswith(b"data: {") and b'"metrics"' in line:
            user.stats = _stats_of(line)
        elif line.startswith(b"data: [DONE]"):
            return user.end(RequestOutcome.SERVED)
    return user.end(RequestOutcome.LOST, f"status {status}, and no end of the text")


def _ids_of(line: bytes) -> list[int]:
    token_ids: list[int] = json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"]
    return token_ids


def _stats_of(line: bytes) -> GenerationStats:
    """Return the statistics of the last chunk; a round commits a token beside those that it accepts."""
    chunk = json.loads(line.removeprefix(b"data: "))
    figures, tokens = chunk["metrics"]["speculative_decoding"], chunk["usage"]["completion_tokens"]
    return GenerationStats(
        rounds=tokens - figures["num_accepted_draft_tokens"],
        committed=tokens,
        num_spec_steps=figures["num_spec_steps"],
        num_draft_tokens=figures["num_draft_tokens"],
        num_accepted_draft_tokens=figures["num_accepted_draft_tokens"],
    )
