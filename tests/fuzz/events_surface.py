"""A running coordinator whose target or draft service says mutated things.

The service is in this process, right in all that it computes; its frames are mutated as they leave. Whatever a draft
says, the text is the target's own. A target's word is the text, so there a request has an answer or a typed error.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.client import AsyncClient
from paceline.local.service_process import Flags
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.rpc.statuses import unexpected_error
from paceline.v1 import draft_service_pb2_grpc as draft_grpc
from paceline.v1 import target_service_pb2_grpc as target_grpc
from tests.e2e.cluster import Cluster
from tests.fuzz.cases import ACCEPTED, FuzzCase, Untyped, typed
from tests.fuzz.message_mutations import mutated_message, parts_of_messages
from tests.fuzz.running_services import WatchedServices, until_linked
from tests.services.harness import RecordingEngine, draft_service, serving, target_service

MODEL = "table:vocab=32,seed=3,max_length=256"
"""That of `tests.services.harness`, whose text is known."""
TOKENS = 10
MUTATED = 0.3
"""Share of frames."""
REQUEST_S, LIED_S = 20.0, 1.0
"""A request whose target is right ends in some 50 ms; one whose target lies may be asked again and again."""
UNEXPECTED = unexpected_error(ValueError()).message.split()[0]
"""How the coordinator's own defects begin; what a target sends under a name of nobody's is internal, too."""
FLAGS: Flags = {"draft_timeout_ms": 20.0, "round_timeout_ms": 500.0, "reconnect_max_ms": 60.0}


class MutatedWrites:
    """A gRPC context whose frames are mutated on their way out."""

    def __init__(self, context: Any, relay: MutatingRelay) -> None:
        self._context = context
        self._relay = relay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        await self._context.write(self._relay.mutated(message))


class MutatingRelay(draft_grpc.DraftServiceServicer, target_grpc.TargetServiceServicer):
    """Serves links of a servicer in this process; `rng` None: as it is."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer
        self.rng: random.Random | None = None

    def mutated(self, frame: Any) -> Any:
        if self.rng is None or self.rng.random() >= MUTATED:
            return frame
        if frame.HasField("welcome") and self.rng.random() < 0.5:
            return frame
        return mutated_message(self.rng, frame, (*parts_of_messages(), frame), most=2)

    async def Draft(self, request_iterator: Any, context: Any) -> None:
        await self._servicer.serve_link(MutatedWrites(context, self))

    async def Verify(self, request_iterator: Any, context: Any) -> None:
        await self._servicer.serve_link(MutatedWrites(context, self))


@dataclass
class LiedToTarget:
    """A coordinator, asked for text while a peer of its says mutated things."""

    watched: WatchedServices
    client: AsyncClient
    hasty: AsyncClient
    """Asks while the peer lies."""
    relay: MutatingRelay
    keeps_text: bool
    expected: dict[int, tuple[int, ...]]

    async def run(self, case: FuzzCase) -> str:
        rng = case.rng
        request = _request(rng.randrange(8), off=False)
        self.relay.rng = rng
        try:
            generation = await self.hasty.generate(request)
        except PacelineError as error:
            if self.keeps_text:
                raise Untyped(f"the draft ended a request: {error.reason} {error.message}") from error
            said = error.reason == "INTERNAL" and not error.message.startswith(UNEXPECTED)
            return "INTERNAL, in the target's words" if said else typed(error)
        finally:
            self.relay.rng = None
            self.watched.check()
        if self.keeps_text and generation.token_ids != self.expected[request.seed or 0]:
            raise Untyped("the draft changed the text")
        return ACCEPTED

    async def probe(self) -> None:
        await until_linked(self.watched.cluster, to_draft=False)  # a welcome that a mutation broke is asked for anew
        for seed in range(8) if not self.expected else (0,):
            # A link that a mutation has broken may have to be made anew first.
            text = (await self.client.generate(_request(seed, off=True))).token_ids
            assert self.expected.setdefault(seed, text) == text, "the text is as it was"
        await self.watched.check_held()

    def facts(self) -> dict[str, str]:
        return self.watched.facts()


def _request(seed: int, *, off: bool) -> GenerateRequest:
    drafted = SpeculationSettings(off=True) if off else SpeculationSettings(drafter="auto", num_draft_tokens=3)
    return GenerateRequest(token_ids=(1, 2, 3), seed=seed, max_new_tokens=TOKENS, speculation=drafted)


@asynccontextmanager
async def open_draft_events(seed: int) -> AsyncIterator[LiedToTarget]:
    async with draft_service(RecordingEngine()) as (servicer, _):
        relay = MutatingRelay(servicer)
        async with (
            serving(lambda server: draft_grpc.add_DraftServiceServicer_to_server(relay, server)) as address,
            _lied_to(relay, FLAGS | {"draft.address": address}, None, REQUEST_S) as target,
        ):
            yield target


@asynccontextmanager
async def open_target_events(seed: int) -> AsyncIterator[LiedToTarget]:
    async with target_service(RecordingEngine()) as (servicer, _):
        relay = MutatingRelay(servicer)
        async with (
            serving(lambda server: target_grpc.add_TargetServiceServicer_to_server(relay, server)) as address,
            _lied_to(relay, FLAGS, address, LIED_S) as target,
        ):
            yield target


@asynccontextmanager
async def _lied_to(
    relay: MutatingRelay, flags: Flags, target: str | None, hasty_s: float
) -> AsyncIterator[LiedToTarget]:
    """A coordinator, started beside this loop, which answers its first call; `target` None: its own honest one."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), MODEL, drafters=(), coordinator_flags=flags)
        cluster.target_proxy = target
        await asyncio.to_thread(cluster.__enter__)
        try:
            async with (
                cluster.async_client(timeout_s=REQUEST_S, wait_ready=REQUEST_S) as client,
                cluster.async_client(timeout_s=hasty_s) as hasty,
            ):
                yield LiedToTarget(WatchedServices(cluster), client, hasty, relay, target is None, {})
        finally:
            await asyncio.to_thread(cluster.__exit__, None, None, None)
