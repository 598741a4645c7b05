"""What a busy machine may prevent once is asked for again."""

from __future__ import annotations

from collections.abc import Callable

from paceline.client import AsyncClient, Generation
from paceline.protocol.generation import GenerateRequest

TRIES = 10


async def first_that(
    holds: Callable[[Generation], bool], client: AsyncClient, request: GenerateRequest
) -> list[Generation]:
    """Generations up to the first of which something holds; it must of one of a few."""
    tried: list[Generation] = []
    while len(tried) < TRIES:
        tried.append(await client.generate(request))
        if holds(tried[-1]):
            return tried
    raise AssertionError(f"it held of none of {TRIES}: {[each.stats for each in tried]}")
