"""D1: grammars that take time or memory without end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from paceline.client import AsyncClient
from paceline.local.service_process import Flags
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from tests.attacks.registry import attack
from tests.e2e.cluster import Cluster
from tests.grammars.hostile import HOSTILE

TARGET = "table:vocab=260,seed=2,sharpness=1.5"
NOTICED_S = 5.0
"""What another user may wait, of the hundred seconds and more that hostile grammars once took."""
GROWN_BYTES = 64 << 20


@attack("D1", "four grammars without end, with the limits as shipped; another user's requests beside them")
async def hostile_grammars(folder: Path) -> str:
    """Each is refused, the target lives, and nobody waits for it."""
    with Cluster(folder, TARGET, (f"model:{TARGET},noise=0.3",)) as services:
        target, before = services.processes["target"].pid, services.status("target").resident_bytes
        async with services.async_client() as client:
            refused = [asyncio.create_task(_refusal(client, name)) for name in HOSTILE]
            waits = [await _others(client, number) for number in range(20)]
            names = await asyncio.gather(*refused)
        grown = services.status("target").resident_bytes - before
        assert services.processes["target"].pid == target, "the target died"
        assert set(names) <= {"INVALID_INPUT", "followed"}, names
        assert "INVALID_INPUT" in names, names
        assert max(waits) < NOTICED_S, f"another user waited {max(waits):.1f} s"
        assert grown < GROWN_BYTES, f"the target grew by {grown >> 20} MiB"
        return f"another user waited {max(waits):.2f} s at most; the target grew by {grown >> 20} MiB"


@attack("D1", "the same with limits of a second and 64 MiB")
async def hostile_grammars_within_tight_limits(folder: Path) -> str:
    """All four are refused."""
    limits: Flags = {"grammar.compile_ms": 1000, "grammar.memory_bytes": 1 << 26}
    with Cluster(folder, TARGET, (), target_flags=limits) as services:
        async with services.async_client() as client:
            started = time.monotonic()
            names = [await _refusal(client, name) for name in HOSTILE]
            assert set(names) == {"INVALID_INPUT"}, names
            return f"refused within {(time.monotonic() - started) / len(names):.1f} s each"


async def _refusal(client: AsyncClient, name: str) -> str:
    try:
        await client.generate(_request(HOSTILE[name], 1))
    except PacelineError as error:
        return error.reason
    return "followed"


async def _others(client: AsyncClient, number: int) -> float:
    """How long a request with a grammar and one without take, together."""
    started = time.monotonic()
    grammar = Grammar(GrammarKind.REGEX, f"([a-f][g-k])+{number}")
    await asyncio.gather(*(client.generate(_request(each, number)) for each in (grammar, None)))
    return time.monotonic() - started


def _request(grammar: Grammar | None, seed: int) -> GenerateRequest:
    return GenerateRequest(prompt="abc", sampling=SamplingParams(grammar=grammar), seed=seed, max_new_tokens=16)
