"""DraftService: links of sessions in front of one speculator."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import grpc
import psutil

from draft_service.drafters.catalogue import Catalogue
from draft_service.session import DraftSession
from draft_service.speculator import Speculator
from paceline import codec
from paceline.codec import failure_of
from paceline.engine.executor import Executor
from paceline.errors import InternalError, InvalidInput, PacelineError, UnknownSession
from paceline.rpc.errors import typed_errors
from paceline.rpc.link import FrameWriter, serve_draft_link
from paceline.types import Close, Commit, DraftCommand, DraftEvent, DraftOpen, ServiceStatus, Verifying, Welcome
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1 import draft_service_pb2_grpc as pb_grpc


class DraftSessions:
    """The sessions of one link; a `LinkHandler` and the `SessionOwner` of each of them."""

    def __init__(self, speculator: Speculator, writer: FrameWriter[DraftEvent]) -> None:
        self._speculator = speculator
        self._writer = writer
        self._sessions: dict[int, DraftSession] = {}

    @property
    def frames_sent(self) -> int:
        """Frames written on the link so far."""
        return self._writer.frames_sent

    def on_command(self, command: DraftCommand) -> None:
        """Handle one command; an error that is raised leaves the session as it was."""
        if isinstance(command, Commit):
            self._speculator.commit(self._session(command.session_id), command)
        elif isinstance(command, Verifying):
            self._speculator.verifying(self._session(command.session_id), command)
        elif isinstance(command, DraftOpen):
            self._open(command)
        else:
            self._close(command)

    def closed(self) -> None:
        """The link is gone, and its sessions with it."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            self._speculator.close(session)

    def send(self, event: DraftEvent, *, urgent: bool) -> None:
        """Queue an event for the coordinator."""
        self._writer.send(event, urgent)

    def forget(self, session_id: int) -> None:
        """The speculator has ended a session."""
        self._sessions.pop(session_id, None)

    def _open(self, command: DraftOpen) -> None:
        if command.session_id in self._sessions:
            raise InvalidInput.of("session_id", command.session_id, "new on the link; it is open")
        try:
            self._sessions[command.session_id] = self._speculator.open(self, command)
        except PacelineError as error:
            self.send(failure_of(command.session_id, error, session_closed=True), urgent=False)

    def _close(self, command: Close) -> None:
        session = self._sessions.pop(command.session_id, None)
        if session is not None:
            self._speculator.close(session)

    def _session(self, session_id: int) -> DraftSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession(f"session {session_id} is not open on this link")
        return session


class DraftServicer(pb_grpc.DraftServiceServicer):
    """Serves a catalogue of drafters; `close` ends its speculator, not the executor."""

    def __init__(self, catalogue: Catalogue, executor: Executor, max_num_seqs: int) -> None:
        self._catalogue = catalogue
        self.speculator = Speculator(catalogue, executor, max_num_seqs)
        self._welcome = Welcome(
            incarnation=secrets.token_hex(8),
            fingerprint=catalogue.fingerprint,
            max_length=catalogue.max_length,
            max_sessions=max_num_seqs,
            drafters=catalogue.names,
        )
        self._links: set[DraftSessions] = set()
        self._frames_of_past_links = 0
        self.runner = asyncio.create_task(self.speculator.run(), name="draft speculator")

    async def close(self) -> None:
        """Stop drafting.

        Raises:
            InternalError: the speculator had ended by itself, which is a defect.
        """
        ended = self.runner.done()
        self.runner.cancel()
        (outcome,) = await asyncio.gather(self.runner, return_exceptions=True)
        if ended:
            raise InternalError(f"the speculator ended: {outcome!r}") from outcome

    async def Draft(  # noqa: N802
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one link."""
        opened: list[DraftSessions] = []

        def open_sessions(writer: FrameWriter[DraftEvent]) -> DraftSessions:
            opened.append(DraftSessions(self.speculator, writer))
            self._links.add(opened[0])
            return opened[0]

        try:
            await serve_draft_link(context, self._welcome, open_sessions)
        finally:
            for link in opened:
                self._links.discard(link)
                self._frames_of_past_links += link.frames_sent

    @typed_errors
    async def GetDraftStatus(  # noqa: N802
        self, request: pb.GetDraftStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetDraftStatusResponse:
        """What the service is doing now."""
        return pb.GetDraftStatusResponse(status=codec.encode_service_status(self.status()))

    def status(self) -> ServiceStatus:
        """What the service is doing now."""
        return ServiceStatus(
            incarnation=self._welcome.incarnation,
            fingerprint=self._welcome.fingerprint,
            sessions=self.speculator.sessions,
            kv_rows=self._catalogue.kv_rows,
            max_kv_rows=self._catalogue.max_kv_rows,
            queue_length=self.speculator.queue_length,
            steps=self.speculator.steps,
            resident_bytes=psutil.Process().memory_info().rss,
            frames_sent=self._frames_of_past_links + sum(link.frames_sent for link in self._links),
        )
