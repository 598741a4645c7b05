"""The sessions of a target and of a draft service, in this process: whole links of frames, without a network.

The servicers get a context that reads the frames of a script and keeps what is written. A script goes on when what
it said before was worked off, so that rounds follow verdicts as they do in earnest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from paceline.protocol.errors import PacelineError
from paceline.rpc.link_kinds import LinkKind
from paceline.rpc.servicer import SessionServicer
from paceline.rpc.statuses import DETAILS_KEY, from_status
from tests.fuzz.cases import ACCEPTED, FuzzCase, Untyped, typed
from tests.fuzz.codec_surface import UNREADABLE
from tests.fuzz.link_scripts import FuzzedLink, failure_reasons
from tests.services.harness import RecordingEngine

STEP_S = 0.001
SETTLED_S = 45.0
"""What a service may take to work off what it was told: a step takes a millisecond, the first one is compiled."""


@dataclass
class ScriptedContext:
    """What a servicer sees of a gRPC stream: frames in their order, and where answers go."""

    kind: LinkKind[Any, Any]
    frames: list[bytes]
    settled: Callable[[ScriptedContext], Any]
    written: list[Any] = field(default_factory=list)
    refusal: PacelineError | None = None

    @property
    def events(self) -> list[Any]:
        return [self.kind.events.decode(event) for frame in self.written for event in frame.events]

    async def read(self) -> Any:
        """The next frame. One that is no protobuf ends the stream, as gRPC does."""
        await self.settled(self)
        if not self.frames:
            return grpc.aio.EOF
        try:
            request: Any = self.kind.request
            return request.FromString(self.frames.pop(0))
        except DecodeError:
            raise asyncio.CancelledError from None

    async def write(self, message: Any) -> None:
        response: Any = self.kind.response
        self.written.append(response.FromString(message.SerializeToString()))

    async def abort(self, code: Any, details: str, trailing_metadata: Any) -> None:
        self.refusal = from_status(status_pb2.Status.FromString(dict(trailing_metadata)[DETAILS_KEY]))
        raise grpc.aio.AbortError

    def peer(self) -> str:
        return "fuzz"

    def done(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False


@dataclass
class LinkedTarget:
    link: FuzzedLink
    servicer: SessionServicer[Any]
    engine: RecordingEngine

    async def run(self, case: FuzzCase) -> str:
        context = ScriptedContext(self.link.kind, [*self.link.mutated_script(case.rng)], self._worked_off)
        self.engine.plans.clear()
        kind = await self._served(context)
        await self._nothing_held()
        reasons = failure_reasons(context.events)
        return kind or next(iter(reasons), ACCEPTED)

    async def probe(self) -> None:
        context = ScriptedContext(self.link.kind, self.link.probe_frames, self._answered)
        assert await self._served(context) == "", "an ordinary link is accepted"
        self.link.check_answer(context.events)
        await self._nothing_held()

    def facts(self) -> dict[str, str]:
        return {"steps": str(self.servicer.scheduler.steps)}

    async def _served(self, context: ScriptedContext) -> str:
        try:
            await self.servicer.serve_link(context)
        except asyncio.CancelledError:
            return UNREADABLE
        except grpc.aio.AbortError:
            assert context.refusal is not None, "a refusal says why"
            return typed(context.refusal)
        return ""

    async def _answered(self, context: ScriptedContext) -> None:
        """Before the stream ends, return once the answer is there."""
        if not context.frames:
            await _until(lambda: self.link.is_answered(context.events), "it is answered")

    async def _worked_off(self, context: ScriptedContext) -> None:
        """Return once nothing waits for a step, and one that runs has had its time."""
        scheduler = self.servicer.scheduler
        await asyncio.sleep(STEP_S)
        await _until(
            lambda: not scheduler.queue_length or self.servicer.runner.done(), "it works off what it was told"
        )

    async def _nothing_held(self) -> None:
        if self.servicer.runner.done():
            raise Untyped("the scheduler has ended")
        scheduler, engine = self.servicer.scheduler, self.engine
        await _until(lambda: not scheduler.sessions and not engine.kv_rows, "no session and no row is left")


async def _until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(SETTLED_S):
            while not condition():  # noqa: ASYNC110  any condition
                await asyncio.sleep(0.0005)
    except TimeoutError:
        raise Untyped(f"not within {SETTLED_S:g} s: {what}") from None


@asynccontextmanager
async def open_sessions(
    serve: Callable[[RecordingEngine], Any], link: FuzzedLink, seed: int
) -> AsyncIterator[LinkedTarget]:
    engine = RecordingEngine()
    async with serve(engine) as (servicer, _):
        yield LinkedTarget(link, servicer, engine)
