"""D3, D6, D9, D10: single requests of clients that mean no good, or have odd limits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc

from paceline.protocol import codec
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.v1 import generation_service_pb2_grpc as pb_grpc
from tests.attacks.registry import attack
from tests.e2e.cluster import Cluster

TIGHT_ROWS = 512
TIGHT = f"table:distribution=text,max_length={TIGHT_ROWS},max_kv_rows={TIGHT_ROWS},step_ms=12,seed=1"
LONG_PROMPT_BYTES = 3_900_000
SHORT = GenerateRequest(token_ids=(1, 2), max_new_tokens=4, seed=1)


@attack("D3", "an honest draft beside a target with KV rows for one session")
async def tight_rows(folder: Path) -> str:
    """No request is lost."""
    draft = "model:table:distribution=middling,max_length=4096,step_ms=1,seed=1"
    base = {"token_ids": tuple(range(3, 103)) * 4, "max_new_tokens": 108, "ignore_eos": True}
    with Cluster(folder, TIGHT, (draft,)) as services:
        async with services.async_client() as client:
            texts = [
                [
                    (await client.generate(GenerateRequest(**base, seed=seed, speculation=each))).token_ids  # type: ignore[arg-type]
                    for each in (SpeculationSettings(), SpeculationSettings(off=True))
                ]
                for seed in range(6)
            ]
    assert all(drafted == plain for drafted, plain in texts), "a text differs from target-only's"
    return f"{len(texts)} of {len(texts)} requests, texts equal target-only's"


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


@attack("D10", "a `traceparent` that is none: 65 bytes, 4096 bytes, not ASCII")
async def odd_traceparents(folder: Path) -> str:
    """It is ignored, as W3C says."""
    message = codec.encode_generate_request(SHORT)
    with Cluster(folder, drafters=()) as services:
        async with grpc.aio.insecure_channel(services.address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            for value in ("0" * 65, "0" * 4096, "00-zz-zz-01"):
                async for _ in stub.Generate(message, metadata=(("traceparent", value),), timeout=30):
                    pass
    return "answered"


async def _reason(generated: object) -> str:
    try:
        await generated  # type: ignore[misc]
    except PacelineError as error:
        return error.reason
    return "answered"
