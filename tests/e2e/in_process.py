"""All three services in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from coordinator.pools import Pools
from coordinator.servicer import GenerationServicer
from draft_service.drafters.model import ModelDrafter
from paceline.access.gate import gate_of
from paceline.client import AsyncClient
from paceline.engine.interface import Engine
from paceline.models.generation_defaults import NO_DEFAULTS, GenerationDefaults
from paceline.models.tokenizer import load_tokenizer
from paceline.rpc.peer_pool import Pool
from paceline.runtime.config import CoordinatorConfig, PoolSettings
from paceline.v1 import generation_service_pb2_grpc as pb_grpc
from tests.services.harness import draft_service, eventually, serving, target_service

TARGET = "table:vocab=64,seed=1,max_length=512"
NEAR = f"{TARGET},noise=0.3"


@asynccontextmanager
async def three_services(target: Engine, drafter: ModelDrafter, **settings: Any) -> AsyncIterator[AsyncClient]:
    """A client of a coordinator of a target and of this drafter."""
    async with (
        target_service(target) as (_, target_address),
        draft_service(drafter._engine, drafter=drafter) as (_, draft_address),
        coordinator(target_address, draft_address, **settings) as client,
    ):
        yield client


def all_up(pool: Pool[Any]) -> bool:
    return bool(pool.peers) and all(peer.link.is_up for peer in pool.peers)


@asynccontextmanager
async def coordinator(
    target: str,
    *drafts: str,
    model: str = TARGET,
    awaits_draft: bool = True,
    defaults: GenerationDefaults = NO_DEFAULTS,
    **settings: Any,
) -> AsyncIterator[AsyncClient]:
    """A coordinator of these services, and a client of it; `model` names the tokenizer."""
    config = CoordinatorConfig(
        model=model,
        target=PoolSettings(address=(target,)),
        draft=PoolSettings(address=drafts),
        reconnect_max_ms=100,
        **settings,
    )
    tokenizer = load_tokenizer(model)
    pools = Pools.of(config, tokenizer)
    assert pools.draft is not None
    servicer = GenerationServicer(config, tokenizer, pools.target, pools.draft, gate_of(None), defaults=defaults)

    def register(server: grpc.aio.Server) -> None:
        pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)

    pools.start()
    try:
        async with serving(register) as address, AsyncClient(address) as client:
            peers: list[Pool[Any]] = [pools.target, pools.draft] if awaits_draft else [pools.target]
            await eventually(lambda: all(map(all_up, peers)), "links stand")
            yield client
    finally:
        servicer.close()
        await pools.close()
