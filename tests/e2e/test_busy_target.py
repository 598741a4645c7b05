"""A target that is busy for longer than its coordinator's patience is not taken for a dead one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.protocol.generation import GenerateRequest
from tests.e2e.cluster import Cluster

PATIENCE_MS = 1500.0
STEP_MS = 2000
CHUNK = 16
PROMPTS = tuple(tuple(range(first, first + CHUNK + 4)) for first in (1, 30))
"""Of no common prefix: the second waits for room, and nothing else."""


async def test_long_steps_chunks_and_a_queue_are_waited_for(tmp_path: Path) -> None:
    """A step takes longer than the target may be silent, a prompt two steps, and one request waits for another."""
    with Cluster(
        tmp_path,
        target_model=f"table:vocab=64,seed=1,step_ms={STEP_MS}",
        drafters=(),
        target_flags={"engine.prefill_chunk": CHUNK, "engine.max_num_seqs": 1},
        coordinator_flags={"round_timeout_ms": PATIENCE_MS, "target_wait_ms": 0.0},
    ) as cluster:
        async with cluster.async_client(resume_wait_s=0) as client:
            generations = await asyncio.gather(
                *(client.generate(GenerateRequest(token_ids=prompt, max_new_tokens=1)) for prompt in PROMPTS)
            )
        assert [len(generation.token_ids) for generation in generations] == [1, 1]
        assert cluster.status("target").steps == 2 * len(PROMPTS), "nothing was begun anew"
