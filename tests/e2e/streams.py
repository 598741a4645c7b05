"""A text as it comes, with something done meanwhile; and one that is asked for again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from paceline.client import AsyncClient, Generation
from paceline.client.shared import Collector
from paceline.protocol.generation import GenerateEvent, GenerateRequest

TRIES = 10
Blow = tuple[int, Callable[[], object]]
"""How many tokens come before it, and what it does, in a thread."""


async def stream(client: AsyncClient, request: GenerateRequest, *blows: Blow) -> Generation:
    """A text under blows; all of them fall."""
    collector, waiting = Collector(), list(blows)
    async for event in client.stream(request):
        collector.add(event)
        while waiting and len(collector.token_ids) >= waiting[0][0]:
            await asyncio.to_thread(waiting.pop(0)[1])
    assert not waiting, f"the text ended before {waiting[0][0]} tokens"
    return collector.generation()


async def read(events: AsyncIterator[GenerateEvent], text: Collector, tokens: int) -> None:
    """Go on with a text until so many of its tokens have come."""
    async for event in events:
        text.add(event)
        if len(text.token_ids) >= tokens:
            return
    raise AssertionError(f"the text ended before {tokens} tokens")


async def leave(client: AsyncClient, request: GenerateRequest, tokens: int = 1) -> tuple[int, ...]:
    """Read the beginning of a text, and cancel it; returns what had come."""
    text = Collector()
    async with aclosing(client.stream(request)) as events:
        await read(events, text, tokens)
    return text.token_ids


def output_of(generation: Generation) -> tuple[Any, ...]:
    """What no way of drafting may change."""
    return generation.token_ids, generation.text, generation.finish_reason, generation.logprobs


async def first_that(
    holds: Callable[[Generation], bool], client: AsyncClient, request: GenerateRequest
) -> list[Generation]:
    """Generations up to the first of which something holds: what a busy machine prevents once is asked for again."""
    tried: list[Generation] = []
    while len(tried) < TRIES:
        tried.append(await client.generate(request))
        if holds(tried[-1]):
            return tried
    raise AssertionError(f"it held of none of {TRIES}: {[each.stats for each in tried]}")
