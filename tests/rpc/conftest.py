"""A recording target on a port, and a client whose link to it stands."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.rpc.harness import Client, Servicer, serving


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
async def port(servicer: Servicer) -> AsyncIterator[int]:
    async with serving(servicer) as port:
        yield port


@pytest.fixture
async def client(port: int) -> AsyncIterator[Client]:
    async with Client(port) as client:
        await client.link.wait_up(10)
        yield client
