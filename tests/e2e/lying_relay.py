"""A service that is right in all that it computes, and whose frames say something else as they leave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.client import AsyncClient
from paceline.engine.table.engine import load_table
from paceline.v1 import draft_service_pb2_grpc as draft_grpc
from paceline.v1 import target_service_pb2_grpc as target_grpc
from tests.e2e.in_process import NEAR, TARGET, coordinator
from tests.fuzz.events_surface import MutatingRelay
from tests.services.feature_spy import FeatureSpy
from tests.services.harness import draft_service, serving, target_service

Lie = Callable[[Any], None]
"""Changes a frame in place."""


def in_events(kind: str, change: Callable[[Any], None]) -> Lie:
    """Changes each event of a kind."""

    def lie(frame: Any) -> None:
        for event in getattr(frame, "events", ()):
            if event.WhichOneof("event") == kind:
                change(getattr(event, kind))

    return lie


class LyingRelay(MutatingRelay):
    """Serves links of a servicer in this process; without a lie as it is."""

    lie: Lie | None = None

    def mutated(self, frame: Any) -> Any:
        """What leaves in place of a frame."""
        if self.lie is None:
            return frame
        changed = type(frame)()
        changed.CopyFrom(frame)
        self.lie(changed)
        return changed


@dataclass
class HostileCluster:
    """Three services in this process: target and draft lie as they are told."""

    client: AsyncClient
    target: LyingRelay
    draft: LyingRelay


@asynccontextmanager
async def hostile_cluster(
    draft_lie: Lie | None = None, *, target_model: str = TARGET, **settings: Any
) -> AsyncIterator[HostileCluster]:
    """A cluster whose draft reads features, and lies as soon as somebody links to it."""
    async with AsyncExitStack() as services:
        engine = load_table(NEAR)
        target_servicer, _ = await services.enter_async_context(target_service(load_table(target_model)))
        draft_servicer, _ = await services.enter_async_context(draft_service(engine, drafter=FeatureSpy(engine)))
        target, draft = LyingRelay(target_servicer), LyingRelay(draft_servicer)
        draft.lie = draft_lie

        def register(server: grpc.aio.Server) -> None:
            target_grpc.add_TargetServiceServicer_to_server(target, server)
            draft_grpc.add_DraftServiceServicer_to_server(draft, server)

        address = await services.enter_async_context(serving(register))
        linking = coordinator(address, address, awaits_draft=draft_lie is None, **settings)
        client = await services.enter_async_context(linking)
        yield HostileCluster(client, target, draft)
