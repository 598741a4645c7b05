"""DraftService: the sessions of all links, on one scheduler."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import grpc
import psutil

from draft_service.drafters.catalogue import Catalogue
from draft_service.scheduler import DraftScheduler
from draft_service.session import DraftingSession
from paceline.engine.executor import Executor
from paceline.protocol import codec
from paceline.protocol.draft import Commit, DraftEvent, DraftOpen, Verifying
from paceline.protocol.errors import InternalError
from paceline.protocol.handshake import ServiceStatus, Welcome
from paceline.rpc.frames import FrameWriter
from paceline.rpc.link import serve_draft_link
from paceline.rpc.sessions import Links, LinkSessions
from paceline.rpc.statuses import typed_errors
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1 import draft_service_pb2_grpc as pb_grpc


class DraftServicer(pb_grpc.DraftServiceServicer):
    """Serves a catalogue of drafters; `close` ends its scheduler, not the executor."""

    def __init__(self, catalogue: Catalogue, executor: Executor, max_num_seqs: int) -> None:
        self._catalogue = catalogue
        self.scheduler = DraftScheduler(catalogue, executor, max_num_seqs)
        self._welcome = Welcome(
            incarnation=secrets.token_hex(8),
            fingerprint=catalogue.fingerprint,
            max_length=catalogue.max_length,
            max_sessions=max_num_seqs,
            drafters=catalogue.names,
        )
        self._links = Links(serve_draft_link, self._connect)
        self.runner = asyncio.create_task(self.scheduler.run(), name="draft scheduler")

    async def close(self) -> None:
        """Stop drafting.

        Raises:
            InternalError: the scheduler had ended by itself, which is a defect.
        """
        ended = self.runner.done()
        self.runner.cancel()
        (outcome,) = await asyncio.gather(self.runner, return_exceptions=True)
        if ended:
            raise InternalError(f"the scheduler ended: {outcome!r}") from outcome

    async def Draft(  # noqa: N802
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one link."""
        await self._links.serve(context, self._welcome)

    def _connect(self, writer: FrameWriter[DraftEvent]) -> LinkSessions[DraftingSession]:
        return LinkSessions(DraftOpen, self.scheduler, self._handle, writer)

    def _handle(self, session: DraftingSession, command: Commit | Verifying) -> None:
        if isinstance(command, Commit):
            self.scheduler.commit(session, command)
        else:
            self.scheduler.verifying(session, command)

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
            sessions=self.scheduler.sessions,
            kv_rows=self._catalogue.kv_rows,
            max_kv_rows=self._catalogue.max_kv_rows,
            queue_length=self.scheduler.queue_length,
            steps=self.scheduler.steps,
            resident_bytes=psutil.Process().memory_info().rss,
            frames_sent=self._links.frames_sent,
        )
