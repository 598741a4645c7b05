"""A coordinator in this process without its gRPC server: the same servicer, called directly, with no client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from unittest import mock

from coordinator import __main__ as process
from coordinator import pools
from paceline.protocol import codec
from paceline.protocol.generation import Finished
from paceline.protocol.records import GenerationStats
from paceline.rpc.peer_link import DraftLink, PeerLink, TargetLink
from paceline.runtime.config import CoordinatorConfig

LINK_SECONDS = 60.0


class SilentContext:
    """The part of a server's context that `Generate` uses; what is written is kept nowhere but the statistics."""

    def __init__(self, traceparent: str = "") -> None:
        self.stats = GenerationStats()
        self._traceparent = traceparent

    async def write(self, response: Any) -> None:
        """Take a response as a client would that reads at once."""
        event = codec.decode_generate_event(response) if response.HasField("finished") else None
        if isinstance(event, Finished):
            self.stats = event.stats

    def time_remaining(self) -> None:
        """No deadline."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The trace context, if there is one."""
        return (("traceparent", self._traceparent),) if self._traceparent else ()


class DirectServer:
    """Stands for a `grpc.aio.Server` while servicers register."""

    def __init__(self) -> None:
        self.generate: Generate | None = None

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Registered methods say all that is needed."""

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Keep what answers `Generate`."""
        self.generate = handlers["Generate"].unary_stream


Generate = Callable[[Any, SilentContext], Awaitable[None]]
Found = TypeVar("Found")


async def with_coordinator(config: CoordinatorConfig, body: Callable[[Generate], Awaitable[Found]]) -> Found:
    """Start the coordinator's parts, call `body` once its links are up, and end with it."""
    found: list[Found] = []
    links: list[PeerLink[Any, Any]] = []

    async def run_server(
        settings: Any, register: Callable[[Any], Awaitable[None]], names: Any, *, loading: str, most_calls: int
    ) -> None:
        server = DirectServer()
        await register(server)
        assert server.generate is not None, "the servicer registered"
        async with asyncio.timeout(LINK_SECONDS):
            while len(links) < 1 + (config.draft is not None):  # noqa: ASYNC110 - endpoints are looked up first
                await asyncio.sleep(0)
        for link in links:
            await link.wait_up(LINK_SECONDS)
        found.append(await body(server.generate))

    def kept(kind: Callable[..., PeerLink[Any, Any]]) -> Callable[..., PeerLink[Any, Any]]:
        def make(*given: Any, **options: Any) -> PeerLink[Any, Any]:
            links.append(kind(*given, **options))
            return links[-1]

        return make

    with (
        mock.patch.object(process, "run_server", run_server),
        mock.patch.object(pools, "TargetLink", kept(TargetLink)),
        mock.patch.object(pools, "DraftLink", kept(DraftLink)),
    ):
        await process.serve(config)
    return found[0]
