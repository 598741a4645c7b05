"""Coupled text is a function of prompt, seed, sampling and target, and of nothing else."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from paceline.protocol.generation import GenerateRequest, Provenance, SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from tests.e2e.cluster import Cluster, full
from tests.e2e.streams import output_of

TARGET_ONLY = SpeculationSettings(off=True)
PROMPTS = ((1, 2, 3), (7,), tuple(range(40)), (5, 6, 5, 6, 5, 6, 5, 6))
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=1),
    SamplingParams(temperature=1.5, min_p=0.05),
)


def random_speculation(rng: np.random.Generator) -> SpeculationSettings:
    drafter = str(rng.choice(["model", "ngram"]))
    k = int(rng.integers(0, 9))
    widths = tuple(int(w) for w in rng.integers(1, 4, size=3)) if rng.random() < 0.5 else ()
    return SpeculationSettings(drafter=drafter, num_draft_tokens=k, tree_widths=widths)


@pytest.mark.parametrize(
    ("sampling", "prompts"),
    [(SAMPLINGS[0], PROMPTS[:2]), (SAMPLINGS[1], PROMPTS[2:]), *(full(each, PROMPTS) for each in SAMPLINGS)],
)
async def test_any_speculation_writes_the_target_only_text(
    cluster: Cluster, sampling: SamplingParams, prompts: tuple[tuple[int, ...], ...]
) -> None:
    rng = np.random.default_rng(11)
    async with cluster.async_client() as client:
        for prompt in prompts:
            request = partial(GenerateRequest, token_ids=prompt, sampling=sampling, seed=17, max_new_tokens=32)
            plain = await client.generate(request(speculation=TARGET_ONLY))
            assert set(plain.provenance) == {Provenance.TARGET}
            settings = [random_speculation(rng) for _ in range(8)]
            drafted = await asyncio.gather(*(client.generate(request(speculation=each)) for each in settings))
            for each, generation in zip(settings, drafted, strict=True):
                assert output_of(generation) == output_of(plain), each
            assert any(Provenance.ACCEPTED in generation.provenance for generation in drafted)
