"""TargetService: the sessions of all links, on one scheduler."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from typing import Any

import grpc

from paceline.costs.cost_line import CostLine
from paceline.costs.service_costs import UNKNOWN_LINE
from paceline.engine.executor import Executor
from paceline.engine.interface import Engine
from paceline.grammars.sessions import Grammars
from paceline.protocol import codec
from paceline.protocol.handshake import ServiceStatus, Welcome
from paceline.protocol.target import LIFE_SIGN_MS, MAX_LEASE, MAX_PREFETCHED
from paceline.rpc.cost_messages import TARGET_COSTS
from paceline.rpc.link_kinds import TARGET
from paceline.rpc.servicer import SessionServicer
from paceline.rpc.statuses import typed_errors
from paceline.runtime import metrics
from paceline.runtime.config import TargetConfig
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from target_service.scheduler import TargetScheduler
from target_service.session import Session


class TargetServicer(SessionServicer[TargetScheduler], pb_grpc.TargetServiceServicer):
    """Serves a loaded engine; `line` is the cost line that was measured at load."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        config: TargetConfig,
        grammars: Grammars | None = None,
        line: CostLine = UNKNOWN_LINE,
    ) -> None:
        self._engine = engine
        welcome = Welcome(
            incarnation=secrets.token_hex(8),
            fingerprint=engine.info.fingerprint,
            max_length=engine.info.longest_session,
            max_sessions=config.engine.max_num_seqs,
            max_lease=MAX_LEASE,
            max_prefetched=MAX_PREFETCHED,
            mixed_leases=True,
            reports_prompts=True,
            features=engine.info.features,
        )
        super().__init__(TARGET, TargetScheduler(engine, executor, config, grammars, line), welcome)
        metrics.watch_service(self.scheduler, lambda: engine.kv_rows, engine.info.max_kv_rows)
        if grammars is not None:
            metrics.watch_grammars(lambda: grammars.size)
        self._life = asyncio.create_task(self._show_life(), name="target's signs of life")

    async def close(self) -> None:
        """As `SessionServicer.close`, and end the signs of life."""
        self._life.cancel()
        await super().close()

    async def Verify(  # noqa: N802
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one link."""
        await self.serve_link(context)

    async def _show_life(self) -> None:
        """Name to the coordinators those of their sessions that wait: in the queue, or for a long prompt or step.

        This shows that the event loop runs, that the engine's thread makes progress, and that the sessions are in
        one of the scheduler's collections.
        """

        def sign(sessions: Collection[Session]) -> pb.VerifyResponse:
            return pb.VerifyResponse(at_work=[each.id for each in sessions if self.scheduler.works_for(each)])

        while True:
            await asyncio.sleep(LIFE_SIGN_MS / 1e3)
            if self.scheduler.moves():
                self.show_life(sign)

    @typed_errors
    async def GetTargetStatus(  # noqa: N802
        self, request: pb.GetTargetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetTargetStatusResponse:
        """The service's load and costs now."""
        costs = TARGET_COSTS.encode(self.scheduler.costs)
        return pb.GetTargetStatusResponse(status=codec.encode_service_status(self.status()), costs=costs)

    def status(self) -> ServiceStatus:
        """The service's load now."""
        return self.status_with(self._engine.kv_rows, self._engine.info.max_kv_rows)
