"""Clients of the coordinator, without sockets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc

from paceline_lab.simulate import requests


class ClientEnd(requests.ClientEnd):
    """May stop reading for a while, and no request of its fails."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = asyncio.Event()
        self.reads.set()

    async def write(self, message: Any) -> None:
        await self.reads.wait()
        await super().write(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise AssertionError(f"a request fails: {code.name}: {details}")


@dataclass
class AskedText:
    """A request of the coordinator's."""

    seed: int
    client: ClientEnd
    task: asyncio.Task[None]
    cancelled: bool = False
