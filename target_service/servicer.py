"""TargetService: the sessions of all links, on one scheduler."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import grpc
import psutil

from paceline.engine.executor import Executor
from paceline.engine.interface import Engine
from paceline.protocol import codec
from paceline.protocol.errors import InternalError, PeerUnavailable
from paceline.protocol.handshake import ServiceStatus, Welcome
from paceline.protocol.target import LIFE_SIGN_MS, MAX_LEASE, MAX_PREFETCHED, Prefetch, Round, TargetEvent, TargetOpen
from paceline.rpc.frames import FrameWriter
from paceline.rpc.link import serve_target_link
from paceline.rpc.sessions import Links, LinkSessions
from paceline.rpc.statuses import typed_errors
from paceline.runtime.config import EngineSettings
from paceline.sampling.grammar import Grammars
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from target_service.scheduler import TargetScheduler
from target_service.session import Session


class TargetServicer(pb_grpc.TargetServiceServicer):
    """Serves a loaded engine; `close` ends its scheduler, not the executor."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        settings: EngineSettings,
        max_queue: int,
        step_timeout_s: float,
        grammars: Grammars | None = None,
    ) -> None:
        self._engine = engine
        self.scheduler = TargetScheduler(engine, executor, settings, max_queue, step_timeout_s, grammars)
        self._welcome = Welcome(
            incarnation=secrets.token_hex(8),
            fingerprint=engine.info.fingerprint,
            max_length=engine.info.longest_session,
            max_sessions=settings.max_num_seqs,
            max_lease=MAX_LEASE,
            max_prefetched=MAX_PREFETCHED,
        )
        self._links = Links(serve_target_link, self._connect)
        self.runner = asyncio.create_task(self.scheduler.run(), name="target scheduler")
        self._life = asyncio.create_task(self._show_life(), name="target's signs of life")

    async def close(self) -> None:
        """Stop running steps.

        Raises:
            PeerUnavailable: the scheduler had ended because the engine is lost.
            InternalError: the scheduler had ended by itself, which is a defect.
        """
        ended = self.runner.done()
        self.runner.cancel()
        self._life.cancel()
        outcome, _ = await asyncio.gather(self.runner, self._life, return_exceptions=True)
        if isinstance(outcome, PeerUnavailable):
            raise outcome
        if ended:
            raise InternalError(f"the scheduler ended: {outcome!r}") from outcome

    async def Verify(  # noqa: N802
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one link."""
        await self._links.serve(context, self._welcome)

    def _connect(self, writer: FrameWriter[TargetEvent]) -> LinkSessions[Session]:
        def handle(session: Session, command: Round | Prefetch) -> None:
            if isinstance(command, Round):
                self.scheduler.submit(session, command)
            else:
                self.scheduler.prefetch(session, command)

        return LinkSessions(TargetOpen, self.scheduler, handle, writer)

    async def _show_life(self) -> None:
        """Show the coordinators that their sessions only wait: in the queue, or for a long prompt or step.

        This proves that the event loop is alive, which it runs on, and the engine's
        thread, which has been in no step beyond its timeout.
        """
        while True:
            await asyncio.sleep(LIFE_SIGN_MS / 1e3)
            if self.scheduler.moves:
                self._links.show_life()

    @typed_errors
    async def GetTargetStatus(  # noqa: N802
        self, request: pb.GetTargetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetTargetStatusResponse:
        """What the service is doing now."""
        return pb.GetTargetStatusResponse(status=codec.encode_service_status(self.status()))

    def status(self) -> ServiceStatus:
        """What the service is doing now."""
        return ServiceStatus(
            incarnation=self._welcome.incarnation,
            fingerprint=self._welcome.fingerprint,
            sessions=self.scheduler.sessions,
            kv_rows=self._engine.kv_rows,
            max_kv_rows=self._engine.info.max_kv_rows,
            queue_length=self.scheduler.queue_length,
            steps=self.scheduler.steps,
            resident_bytes=psutil.Process().memory_info().rss,
            frames_sent=self._links.frames_sent,
        )
