"""Clients of the coordinator, without sockets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.protocol import codec
from paceline.protocol.generation import Finished, Tokens


class ClientEnd:
    """Stands for the client's `grpc.aio.ServicerContext`: keeps what it is told, and may stop reading for a while."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finished: Finished | None = None
        self.reads = asyncio.Event()
        self.reads.set()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None

    def peer(self) -> str:
        return "client"

    async def write(self, message: Any) -> None:
        await self.reads.wait()
        event = codec.decode_generate_event(message)
        if isinstance(event, Tokens):
            self.tokens += event.token_ids
        elif isinstance(event, Finished):
            self.finished = event

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise AssertionError(f"a request fails: {code.name}: {details}")


@dataclass
class AskedText:
    """A request of the coordinator's."""

    seed: int
    client: ClientEnd
    task: asyncio.Task[None]
    cancelled: bool = False
