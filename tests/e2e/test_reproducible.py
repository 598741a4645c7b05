"""Reproducible mode on the real model: the same bits alone, in company, with drafts, across a killed target."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from paceline.client import Generation
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import DEFAULT_MODEL
from tests.e2e.cluster import Cluster, eventually
from tests.e2e.test_real_model import PROMPTS

pytestmark = [pytest.mark.real_model, pytest.mark.full, pytest.mark.timeout(1800)]

LENGTH = 128
OFF = SpeculationSettings(off=True)
SPECULATIONS = (
    SpeculationSettings(drafter="ngram", num_draft_tokens=8),
    SpeculationSettings(drafter="model", num_draft_tokens=3),
    SpeculationSettings(drafter="model", num_draft_tokens=3, tree_widths=(3, 2, 1)),
    SpeculationSettings(drafter="model", num_draft_tokens=12),
    OFF,
)


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    threads: dict[str, object] = {"engine.threads": 1}
    with Cluster(
        tmp_path_factory.mktemp("fixed"),
        target_model=DEFAULT_MODEL,
        drafters=("model:default",),
        target_flags=threads | {"engine.reproducible": True},
        draft_flags=threads | {"target_model": DEFAULT_MODEL},
        coordinator_flags={"draft_timeout_ms": 5000.0, "target_wait_ms": 120_000.0},
    ) as running:
        yield running


def request(number: int, speculation: SpeculationSettings) -> GenerateRequest:
    """Sixteen requests: each prompt greedy and at temperature 0.8, every other one behind a system prompt."""
    system = (ChatMessage("system", "You are a keeper of a lighthouse, and answer briefly. " * 6),)
    user = ChatMessage("user", PROMPTS[number // 2])
    return GenerateRequest(
        messages=(*(system if number // 2 % 2 else ()), user),
        seed=42 + number,
        sampling=SamplingParams(temperature=0.8 * (number % 2), logprobs=1),
        max_new_tokens=LENGTH,
        ignore_eos=True,
        speculation=speculation,
    )


def emitted(generation: Generation) -> list[tuple[int, float]]:
    """Each token and its log-probability, whose bits are compared."""
    rows = zip(generation.token_ids, generation.logprobs, strict=True)
    return [(token, row.logprobs[row.token_ids.index(token)]) for token, row in rows]


def test_16_prompts_of_128_tokens(fixed: Cluster) -> None:
    numbers = range(2 * len(PROMPTS))
    with fixed.client() as client:
        alone = [emitted(client.generate(request(number, OFF))) for number in numbers]

    before = fixed.status("target").steps

    async def in_company(shift: int, *, kill: bool) -> list[Generation]:
        async with fixed.async_client() as client:
            running = [
                asyncio.create_task(client.generate(request(number, SPECULATIONS[(number + shift) % 5])))
                for number in numbers
            ]
            if kill:
                await asyncio.to_thread(eventually, lambda: fixed.status("target").steps > before + 20, "rounds run")
                await asyncio.to_thread(fixed.restart, "target")
            return await asyncio.gather(*running)

    for shift, kill in ((0, False), (2, True)):
        for number, generation in enumerate(asyncio.run(in_company(shift, kill=kill))):
            assert emitted(generation) == alone[number], (number, shift)
