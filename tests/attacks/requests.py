"""D6, D9: single requests of clients that mean no good, or have odd limits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest
from tests.attacks.registry import attack
from tests.e2e.cluster import Cluster

LONG_PROMPT_BYTES = 3_900_000
SHORT = GenerateRequest(token_ids=(1, 2), max_new_tokens=4, seed=1)


@attack("D6", f"20 prompts of {LONG_PROMPT_BYTES / 1e6:g} MB at once; another user beside them")
async def long_prompts(folder: Path) -> str:
    """They hold nobody up."""
    with Cluster(folder, drafters=()) as services:
        async with services.async_client() as client:
            await client.generate(SHORT)
            huge = GenerateRequest(prompt="x " * (LONG_PROMPT_BYTES // 2), max_new_tokens=1)
            flood = [asyncio.create_task(_reason(client.generate(huge))) for _ in range(20)]
            await asyncio.sleep(0)
            slowest = 0.0
            while not all(task.done() for task in flood):
                started = time.monotonic()
                await client.generate(SHORT)
                slowest = max(slowest, time.monotonic() - started)
            reasons = {task.result() for task in flood}
    assert slowest < 3, f"another user waited {slowest:.1f} s"
    return f"another user waited {slowest:.2f} s at most; answers: {', '.join(sorted(reasons))}"


@attack("D9", "a client deadline of 5,000,000 s")
async def far_deadline(folder: Path) -> str:
    """It is a deadline like others."""
    with Cluster(folder, drafters=()) as services:
        async with services.async_client(timeout_s=5_000_000) as client:
            return f"{len((await client.generate(SHORT)).token_ids)} tokens"


async def _reason(generated: object) -> str:
    try:
        await generated  # type: ignore[misc]
    except PacelineError as error:
        return error.reason
    return "answered"
