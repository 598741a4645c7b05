"""A request while faults fall: how it went, token by token, whatever ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.client import AsyncClient
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import Finished, GenerateRequest, Tokens

HANGS = "HANGS"
LEFT = "LEFT"
"""Ends that no service tells: the request did not end in time, and its client left it on purpose."""


@dataclass
class Ended:
    """How a request went.

    Attributes:
        error: the reason of a typed error, `HANGS`, `LEFT`, or what an HTTP client saw; empty: it has its text.
        message: of that error.
        times: of every message with tokens, by `time.monotonic`, as are `begun` and `ended`.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Any, ...] = ()
    reason: str = ""
    error: str = ""
    message: str = ""
    begun: float = field(default_factory=time.monotonic)
    times: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def result(self) -> tuple[Any, ...]:
        """What must not change."""
        return self.token_ids, self.text, self.logprobs, self.reason


@dataclass(frozen=True)
class Manner:
    """How a client reads.

    Attributes:
        pause_s: before each message.
        leave_after: messages with tokens behind which it leaves; None: it stays.
        patience_s: a request that takes longer hangs.
    """

    pause_s: float = 0.0
    leave_after: int | None = None
    patience_s: float = 60.0


async def ask(client: AsyncClient, request: GenerateRequest, manner: Manner) -> Ended:
    ended = Ended()
    try:
        async with asyncio.timeout(manner.patience_s):
            stream = client.stream(request)
            async for event in stream:
                _add(ended, event)
                if manner.leave_after is not None and len(ended.times) >= manner.leave_after:
                    await stream.aclose()
                    ended.error = LEFT
                    break
                await asyncio.sleep(manner.pause_s)
    except PacelineError as error:
        ended.error, ended.message = error.reason, error.message
    except TimeoutError:
        ended.error = HANGS
    ended.ended = time.monotonic()
    return ended


def _add(ended: Ended, event: object) -> None:
    if isinstance(event, Tokens):
        ended.times.append(time.monotonic())
        ended.token_ids += event.token_ids
        ended.text += event.text
        ended.logprobs += event.logprobs
    elif isinstance(event, Finished):
        ended.text += event.text
        ended.reason = event.reason.value


def recovered_s(at: float, ends: Sequence[Ended]) -> float | None:
    """Seconds from `at` until the last request that was under way had a token again; None: none had to wait."""
    waits = [min(later) - at for each in ends if each.begun < at and (later := [t for t in each.times if t > at])]
    return max(waits, default=None)
