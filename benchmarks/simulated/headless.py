"""A coordinator without its gRPC server: the same servicer, called directly, its text written nowhere.

    python -m benchmarks.simulated.headless --config FILE --sessions 16 --tokens 128 --k 4

Prints one line of JSON: what the rounds of many sessions cost this process when no client is
attached, and how many frames it sent on each link. `benchmarks.frames` runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from benchmarks.simulated.services import drafted, request
from coordinator import __main__ as process
from paceline.protocol import codec
from paceline.protocol.generation import Finished
from paceline.protocol.records import GenerationStats
from paceline.rpc.peer_link import DraftLink, PeerLink, TargetLink
from paceline.runtime.config import CoordinatorConfig, load_config


@dataclass(frozen=True)
class HeadlessRun:
    """A wave of sessions, after one that isn't counted."""

    cpu_seconds: float
    seconds: float
    rounds: int
    committed: int
    frames_to_target: int
    frames_to_draft: int


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
Links = Mapping[str, PeerLink[Any, Any]]
Found = TypeVar("Found")


async def with_coordinator(config: CoordinatorConfig, body: Callable[[Generate, Links], Awaitable[Found]]) -> Found:
    """Start the coordinator's parts, hand them to `body` once its links are up, and end with it."""
    found: list[Found] = []
    links: dict[str, PeerLink[Any, Any]] = {}

    async def run_server(settings: Any, register: Callable[[Any], Awaitable[None]], names: Any) -> None:
        server = DirectServer()
        await register(server)
        assert server.generate is not None, "the servicer registered"
        for link in links.values():
            await link.wait_up(LINK_SECONDS)
        found.append(await body(server.generate, links))

    def kept(name: str, kind: Callable[..., PeerLink[Any, Any]]) -> Callable[..., PeerLink[Any, Any]]:
        def make(*given: Any, **options: Any) -> PeerLink[Any, Any]:
            links[name] = kind(*given, **options)
            return links[name]

        return make

    with (
        mock.patch.object(process, "run_server", run_server),
        mock.patch.object(process, "TargetLink", kept("target", TargetLink)),
        mock.patch.object(process, "DraftLink", kept("draft", DraftLink)),
    ):
        await process.serve(config)
    return found[0]


async def run(config: CoordinatorConfig, sessions: int, tokens: int, k: int) -> HeadlessRun:
    """Run two waves of sessions, and tell what the second cost."""

    async def waves(generate: Generate, links: Links) -> HeadlessRun:
        await _wave(generate, sessions, tokens, k)
        frames = {name: link.frames_sent for name, link in links.items()}
        began, cpu = time.perf_counter(), time.process_time()
        stats = await _wave(generate, sessions, tokens, k)
        return HeadlessRun(
            cpu_seconds=time.process_time() - cpu,
            seconds=time.perf_counter() - began,
            rounds=sum(each.rounds for each in stats),
            committed=sum(each.committed for each in stats),
            frames_to_target=links["target"].frames_sent - frames["target"],
            frames_to_draft=links["draft"].frames_sent - frames["draft"],
        )

    return await with_coordinator(config, waves)


async def _wave(generate: Generate, sessions: int, tokens: int, k: int) -> list[GenerationStats]:
    contexts = [SilentContext() for _ in range(sessions)]
    requests = [codec.encode_generate_request(request(number, tokens, drafted(k))) for number in range(sessions)]
    await asyncio.gather(*(generate(*each) for each in zip(requests, contexts, strict=True)))
    return [context.stats for context in contexts]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="The coordinator's TOML file.")
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--k", type=int, required=True)
    given = parser.parse_args()
    config = load_config(CoordinatorConfig, given.config, {})
    print(json.dumps(asdict(asyncio.run(run(config, given.sessions, given.tokens, given.k)))))


if __name__ == "__main__":
    main()
