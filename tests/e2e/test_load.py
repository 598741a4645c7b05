"""Many short requests at once: none lost, none crossed, nothing left behind."""

from __future__ import annotations

import asyncio
from functools import cache

import psutil

from paceline.engine.table.engine import TableModel
from paceline.models.table_names import TableSpec
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from tests.e2e.cluster import NEAR, TARGET, Cluster, cluster_fixture

REQUESTS = 100
LENGTH = 24
MEMORY_TOLERANCE = 1.05


loaded = cluster_fixture(TARGET, NEAR)


@cache
def greedy_text(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What plain greedy decoding of the table writes."""
    model = TableModel(TableSpec.parse(TARGET))
    history = list(prompt)
    for _ in range(LENGTH):
        history.append(int(model.logits(history).argmax()))
    return tuple(history[len(prompt) :])


async def wave(cluster: Cluster) -> None:
    prompts = [(i % 64, (7 * i) % 64, i // 64) for i in range(REQUESTS)]
    async with cluster.async_client() as client:
        requests = [
            GenerateRequest(
                token_ids=prompt,
                sampling=SamplingParams(temperature=0),
                max_new_tokens=LENGTH,
                acceptance=list(Acceptance)[i % 3],
            )
            for i, prompt in enumerate(prompts)
        ]
        generations = await asyncio.gather(*(client.generate(request) for request in requests))
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.prompt_token_ids == prompt
        assert generation.token_ids == greedy_text(prompt)


def resident_bytes(cluster: Cluster) -> dict[str, int]:
    return {name: psutil.Process(service.pid).memory_info().rss for name, service in cluster.processes.items()}


async def test_two_waves_of_concurrent_requests(loaded: Cluster) -> None:
    await wave(loaded)
    await asyncio.to_thread(loaded.wait_idle)
    first = resident_bytes(loaded)
    await wave(loaded)
    await asyncio.to_thread(loaded.wait_idle)
    second = resident_bytes(loaded)
    for name, size in second.items():
        assert size <= first[name] * MEMORY_TOLERANCE, f"{name} grew from {first[name]} to {size} bytes"
