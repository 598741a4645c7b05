"""D4, D5: a checkpoint that is not whole, a target that is busy."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import GenerateRequest
from paceline.runtime.config import EngineSettings
from tests.attacks.registry import attack
from tests.e2e.cluster import Cluster


@attack("D4", "a checkpoint that lacks a layer")
async def missing_tensors(folder: Path) -> str:
    """It is refused by the names of what it lacks."""
    return await asyncio.to_thread(_load_without_a_layer, folder)


def _load_without_a_layer(folder: Path) -> str:
    from paceline.engine.loading import load_engine
    from tests.engine.test_loading import lose_a_layer, saved

    folder.mkdir(parents=True)
    try:
        load_engine(saved(folder, lose_a_layer), EngineSettings(threads=1))
    except InvalidInput as error:
        assert "tensors missing" in error.message, error.message
        return "refused, naming them"
    raise AssertionError("it was served")


@attack("D5", "a target whose steps take 2 s, beside a coordinator that waits 1.5 s")
async def busy_target(folder: Path) -> str:
    """Nothing is begun anew."""
    target = "table:vocab=64,seed=1,step_ms=2000"
    flags = {"engine.prefill_chunk": 16, "engine.max_num_seqs": 1}
    patience = {"round_timeout_ms": 1500.0, "target_wait_ms": 0.0}
    with Cluster(folder, target, (), target_flags={**flags}, coordinator_flags={**patience}) as services:
        async with services.async_client(resume_wait_s=0) as client:
            prompts = [tuple(range(first, first + 20)) for first in (1, 30)]
            requests = [GenerateRequest(token_ids=prompt, max_new_tokens=1) for prompt in prompts]
            await asyncio.gather(*(client.generate(each) for each in requests))
        steps = services.status("target").steps
    assert steps == 4, f"{steps} steps for 4: sessions were opened anew"
    return "4 steps for 4, two requests of two answered"
