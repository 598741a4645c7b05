"""DraftService: the sessions of all links, on one scheduler."""

from __future__ import annotations

import secrets
from typing import Any

import grpc

from draft_service.drafters.catalogue import Catalogue
from draft_service.scheduler import DraftScheduler
from paceline.engine.executor import Executor
from paceline.protocol import codec
from paceline.protocol.handshake import ServiceStatus, Welcome
from paceline.rpc.cost_messages import DRAFT_COSTS
from paceline.rpc.link_kinds import DRAFT
from paceline.rpc.servicer import SessionServicer
from paceline.rpc.statuses import typed_errors
from paceline.runtime import metrics
from paceline.runtime.config import EngineSettings
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1 import draft_service_pb2_grpc as pb_grpc


class DraftServicer(SessionServicer[DraftScheduler], pb_grpc.DraftServiceServicer):
    """Serves a catalogue of drafters."""

    def __init__(self, catalogue: Catalogue, executor: Executor, settings: EngineSettings) -> None:
        self._catalogue = catalogue
        welcome = Welcome(
            incarnation=secrets.token_hex(8),
            fingerprint=catalogue.fingerprint,
            max_length=catalogue.max_length,
            max_sessions=settings.max_num_seqs,
            drafters=catalogue.names,
            drafter_needs=catalogue.needs,
            default_name=catalogue.default_name,
        )
        super().__init__(DRAFT, DraftScheduler(catalogue, executor, settings), welcome)
        metrics.watch_service(self.scheduler, lambda: catalogue.kv_rows, catalogue.max_kv_rows)
        if (grammars := catalogue.grammars) is not None:
            metrics.watch_grammars(lambda: grammars.size)

    async def Draft(  # noqa: N802
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one link."""
        await self.serve_link(context)

    @typed_errors
    async def GetDraftStatus(  # noqa: N802
        self, request: pb.GetDraftStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetDraftStatusResponse:
        """The service's load and costs now."""
        costs = DRAFT_COSTS.encode(self.scheduler.costs)
        return pb.GetDraftStatusResponse(status=codec.encode_service_status(self.status()), costs=costs)

    def status(self) -> ServiceStatus:
        """The service's load now."""
        return self.status_with(self._catalogue.kv_rows, self._catalogue.max_kv_rows)
