"""Rounds through a target service on loopback: sessions that answer every verdict with their next round at once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from paceline.engine.executor import Executor
from paceline.engine.interface import Engine
from paceline.protocol.errors import InternalError
from paceline.protocol.handshake import Hello
from paceline.protocol.proposal import ROOT, Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import Close, Failure, SessionSpec
from paceline.protocol.target import Round, TargetOpen, Verdict
from paceline.rpc.peer_link import TargetLink
from paceline.rpc.server import run_server
from paceline.runtime.config import EngineSettings, PeerSettings, ServerSettings, TargetConfig
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from target_service.servicer import TargetServicer

WARM_UP_ROUNDS = 3
LINK_SECONDS = 10.0


@dataclass(frozen=True)
class RoundTimes:
    """Medians: from a round's sending to its verdict, and the service's own time for its step."""

    round_ms: float
    step_ms: float


@dataclass
class _Sender:
    """Sessions 1 … n of one link; `done` once each has had its verdicts."""

    link: TargetLink
    rows: int
    length: int
    rounds: int
    sent_s: dict[int, float] = field(default_factory=dict)
    rounds_left: dict[int, int] = field(default_factory=dict)
    round_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Failure | None = None

    def begin(self, sessions: int) -> None:
        """Open every session and send its first round."""
        for session in range(1, sessions + 1):
            self.rounds_left[session] = self.rounds + WARM_UP_ROUNDS
            spec = SessionSpec(
                (1,) * self.length,
                self.length,
                SamplingParams(),
                NoiseKey(session),
                Acceptance.COUPLED,
                max_length=self.length + self.rows + self.rounds + WARM_UP_ROUNDS,
            )
            self.link.send(TargetOpen(session, spec))
            self._send(session, self.length - 1, 1)

    def on_event(self, event: Any) -> None:
        """Take a verdict in, and send the session's next round."""
        if isinstance(event, Failure):
            self.failure = event
            self.done.set()
        if not isinstance(event, Verdict):
            return
        session = event.session_id
        self.rounds_left[session] -= 1
        if self.rounds_left[session] < self.rounds:
            self.round_ms.append((time.perf_counter() - self.sent_s[session]) * 1e3)
            self.step_ms.append(event.timings.forward_ms + event.timings.sample_ms)
        if self.rounds_left[session]:
            self._send(session, event.base_length + 1, event.token_ids[0])
        else:
            self.link.send(Close(session))
        if not any(self.rounds_left.values()):
            self.done.set()

    def _send(self, session: int, base: int, token: int) -> None:
        """Send a round whose proposal is taken to be wrong from its first token on."""
        k = self.rows - 1
        proposal = Proposal(1 + self.rounds_left[session], tuple(range(2, k + 2)), (1.0,) * k) if k else None
        self.sent_s[session] = time.perf_counter()
        self.link.send(Round(session, base, ROOT, (token,), proposal), urgent=True)


async def through_the_service(
    engine: Engine,
    executor: Executor,
    settings: EngineSettings,
    sessions: int,
    rows: int,
    length: int,
    rounds: int,
) -> RoundTimes:
    """Run a target service and so many sessions of so many rounds through it, all in this process.

    `executor` is the caller's, who closes it.

    Raises:
        InternalError: the service failed a session.
    """
    servicer = TargetServicer(engine, executor, TargetConfig(engine=settings, max_queue=sessions))
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    def register(server: grpc.aio.Server) -> None:
        pb_grpc.add_TargetServiceServicer_to_server(servicer, server)

    server = asyncio.create_task(
        run_server(
            ServerSettings(drain_seconds=1),
            register,
            ["paceline.v1.TargetService"],
            stop,
            on_drain=servicer.scheduler.idle,
            on_serving=lambda running: address.set_result(f"127.0.0.1:{running.port}"),
        )
    )
    try:
        return await _rounds(await address, sessions, rows, length, rounds)
    finally:
        stop.set()
        await server
        await servicer.close()
        # What the scheduler had no turn left to close; it numbers its sessions from 1.
        for session in range(1, sessions + 1):
            engine.close(session)


async def _rounds(address: str, sessions: int, rows: int, length: int, rounds: int) -> RoundTimes:
    link = TargetLink(PeerSettings(address=address), Hello("benchmark"))
    sender = _Sender(link, rows, length, rounds)
    link.on_event = sender.on_event
    await link.start()
    try:
        await link.wait_up(LINK_SECONDS)
        sender.begin(sessions)
        await sender.done.wait()
    finally:
        await link.close()
    if sender.failure is not None:
        raise InternalError(f"session {sender.failure.session_id}: {sender.failure.message}")
    return RoundTimes(float(np.median(sender.round_ms)), float(np.median(sender.step_ms)))
