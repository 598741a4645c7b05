"""A client that leaves with the last message of its text."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from coordinator.pools import Pools
from coordinator.servicer import GenerationServicer
from paceline.access.gate import gate_of
from paceline.engine.table.engine import TableEngine
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol import codec
from paceline.protocol.generation import GenerateRequest
from paceline.runtime.config import CoordinatorConfig, PoolSettings
from tests.interleaving.clients import ClientEnd
from tests.services.harness import SPEC, target_service

MODEL = f"table:vocab={SPEC.vocab},seed={SPEC.seed}"


class Leaving(ClientEnd):
    """Cancels its call as soon as it has the end of the text, as a client that has all it wants does."""

    call: asyncio.Task[Any]

    async def write(self, message: Any) -> None:
        await super().write(message)
        if self.finished is not None:
            self.call.cancel()
            await asyncio.sleep(0)


async def test_a_request_whose_client_leaves_with_its_end_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tokenizer = load_tokenizer(MODEL)
    async with target_service(TableEngine(SPEC)) as (_, address):
        pools = Pools.of(CoordinatorConfig(model=MODEL, target=PoolSettings(address=(address,))), tokenizer)
        servicer = GenerationServicer(
            CoordinatorConfig(model=MODEL), tokenizer, pools.target, pools.draft, gate_of(None)
        )
        pools.start()
        client = Leaving()
        asked = codec.encode_generate_request(GenerateRequest(token_ids=(1, 2), max_new_tokens=4))
        client.call = asyncio.ensure_future(servicer.Generate(asked, client))
        with pytest.raises(asyncio.CancelledError):
            await client.call
        servicer.close()
        await pools.close()
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    assert line.startswith("request done:")
