"""TargetService: links of sessions in front of one scheduler."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import grpc
import psutil

from paceline import codec
from paceline.codec import failure_of
from paceline.config import EngineSettings
from paceline.engine.executor import Executor
from paceline.engine.interface import Engine
from paceline.errors import InternalError, InvalidInput, PacelineError, UnknownSession
from paceline.rpc.errors import typed_errors
from paceline.rpc.link import FrameWriter, serve_target_link
from paceline.types import Close, Round, ServiceStatus, TargetCommand, TargetEvent, TargetOpen, Welcome
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from target_service.scheduler import Scheduler
from target_service.session import Session


class TargetSessions:
    """The sessions of one link; a `LinkHandler` and the `SessionOwner` of each of them."""

    def __init__(self, scheduler: Scheduler, writer: FrameWriter[TargetEvent]) -> None:
        self._scheduler = scheduler
        self._writer = writer
        self._sessions: dict[int, Session] = {}

    @property
    def frames_sent(self) -> int:
        """Frames written on the link so far."""
        return self._writer.frames_sent

    def on_command(self, command: TargetCommand) -> None:
        """Handle one command; an error that is raised leaves the session as it was."""
        if isinstance(command, Round):
            self._scheduler.submit(self._session(command.session_id), command)
        elif isinstance(command, TargetOpen):
            self._open(command)
        else:
            self._close(command)

    def closed(self) -> None:
        """The link is gone, and its sessions with it."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            self._scheduler.close(session)

    def send(self, event: TargetEvent, *, urgent: bool) -> None:
        """Queue an event for the coordinator."""
        self._writer.send(event, urgent)

    def forget(self, session_id: int) -> None:
        """The scheduler has ended a session."""
        self._sessions.pop(session_id, None)

    def _open(self, command: TargetOpen) -> None:
        if command.session_id in self._sessions:
            raise InvalidInput.of("session_id", command.session_id, "new on the link; it is open")
        try:
            self._sessions[command.session_id] = self._scheduler.open(self, command)
        except PacelineError as error:
            self.send(failure_of(command.session_id, error, session_closed=True), urgent=False)

    def _close(self, command: Close) -> None:
        session = self._sessions.pop(command.session_id, None)
        if session is not None:
            self._scheduler.close(session)

    def _session(self, session_id: int) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession(f"session {session_id} is not open on this link")
        return session


class TargetServicer(pb_grpc.TargetServiceServicer):
    """Serves a loaded engine; `close` ends its scheduler, not the executor."""

    def __init__(self, engine: Engine, executor: Executor, settings: EngineSettings, max_queue: int) -> None:
        self._engine = engine
        self.scheduler = Scheduler(engine, executor, settings, max_queue)
        self._welcome = Welcome(
            incarnation=secrets.token_hex(8),
            fingerprint=engine.info.fingerprint,
            max_length=engine.info.max_length,
            max_sessions=settings.max_num_seqs,
        )
        self._links: set[TargetSessions] = set()
        self._frames_of_past_links = 0
        self.runner = asyncio.create_task(self.scheduler.run(), name="target scheduler")

    async def close(self) -> None:
        """Stop running steps.

        Raises:
            InternalError: the scheduler had ended by itself, which is a defect.
        """
        ended = self.runner.done()
        self.runner.cancel()
        (outcome,) = await asyncio.gather(self.runner, return_exceptions=True)
        if ended:
            raise InternalError(f"the scheduler ended: {outcome!r}") from outcome

    async def Verify(  # noqa: N802
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one link."""
        opened: list[TargetSessions] = []

        def open_sessions(writer: FrameWriter[TargetEvent]) -> TargetSessions:
            opened.append(TargetSessions(self.scheduler, writer))
            self._links.add(opened[0])
            return opened[0]

        try:
            await serve_target_link(context, self._welcome, open_sessions)
        finally:
            for link in opened:
                self._links.discard(link)
                self._frames_of_past_links += link.frames_sent

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
            frames_sent=self._frames_of_past_links + sum(link.frames_sent for link in self._links),
        )
