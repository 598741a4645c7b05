"""What target and draft service share: links of one kind, whose sessions are on one scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Generic, TypeVar

import grpc
import psutil

from paceline.protocol.errors import InternalError, PeerUnavailable
from paceline.protocol.handshake import ServiceStatus, Welcome
from paceline.rpc.exposure import warn_of_callers
from paceline.rpc.frames import FrameWriter, Message
from paceline.rpc.link import serve_link
from paceline.rpc.link_kinds import LinkKind
from paceline.rpc.server import run_server
from paceline.rpc.sessions import LinkSessions, SessionScheduler
from paceline.runtime.config import ServerSettings
from paceline.runtime.process import keep_loaded

Scheduler = TypeVar("Scheduler", bound=SessionScheduler[Any])


class SessionServicer(Generic[Scheduler]):
    """Serves links on a scheduler, which the task `runner` runs; `close` ends the scheduler, not the executor."""

    def __init__(self, kind: LinkKind[Any, Any], scheduler: Scheduler, welcome: Welcome) -> None:
        self.scheduler = scheduler
        self.runner = asyncio.create_task(scheduler.run(), name=f"scheduler of {kind.method}")
        self._kind = kind
        self._welcome = welcome
        self._links: set[LinkSessions[Any]] = set()
        self._frames_of_past_links = 0

    async def close(self) -> None:
        """Stop running steps.

        Raises:
            PeerUnavailable: the scheduler has ended because the engine is lost.
            InternalError: the scheduler has ended by itself, which is a defect.
        """
        has_ended = self.runner.done()
        self.runner.cancel()
        (outcome,) = await asyncio.gather(self.runner, return_exceptions=True)
        if isinstance(outcome, PeerUnavailable):
            raise outcome
        if has_ended:
            raise InternalError(f"the scheduler ended: {outcome!r}") from outcome

    def show_life(self, sign: Callable[[Collection[Any]], Message]) -> None:
        """Send every coordinator with open sessions a sign of life, made from its sessions."""
        for link in self._links:
            link.show_life(sign)

    async def serve_link(self, context: Any) -> None:
        """Serve one link until it ends."""
        links: list[LinkSessions[Any]] = []

        def connect(writer: FrameWriter[Any]) -> LinkSessions[Any]:
            links.append(LinkSessions(self.scheduler, writer))
            self._links.add(links[0])
            return links[0]

        try:
            await serve_link(self._kind, context, self._welcome, connect, lambda: self.scheduler.costs)
        finally:
            for link in links:
                self._links.discard(link)
                self._frames_of_past_links += link.frames_sent

    def status_with(self, kv_rows: int, max_kv_rows: int) -> ServiceStatus:
        """The service's status, with the KV rows that its engines hold and may hold."""
        return ServiceStatus(
            incarnation=self._welcome.incarnation,
            fingerprint=self._welcome.fingerprint,
            sessions=self.scheduler.sessions,
            kv_rows=kv_rows,
            max_kv_rows=max_kv_rows,
            queue_length=self.scheduler.queue_length,
            steps=self.scheduler.steps,
            resident_bytes=psutil.Process().memory_info().rss,
            frames_sent=self._frames_of_past_links + sum(link.frames_sent for link in self._links),
        )


Servicer = TypeVar("Servicer", bound=SessionServicer[Any])


async def serve_sessions(
    settings: ServerSettings,
    service_name: str,
    load: Callable[[], Awaitable[Servicer]],
    add: Callable[[Servicer, grpc.aio.Server], None],
    drain: Callable[[Servicer], Awaitable[Any]],
    *,
    stop: asyncio.Event,
    loading: str,
) -> None:
    """Start the server, load the servicer, and serve it until stopped.

    Args:
        settings: of the server.
        service_name: the service's full name.
        load: loads the model. It imports torch, too, which takes seconds: health answers meanwhile.
        add: the generated function that adds the servicer to the server.
        drain: returns when no session is left that may go on.
        stop: ends the server when set. It is set when the scheduler ends, since a service without steps must not
            look healthy.
        loading: says which service is loading what.

    Raises:
        PacelineError: the model can't be served, the port is taken, or the scheduler has ended.
    """
    serving: Servicer | None = None

    async def register(server: grpc.aio.Server) -> None:
        nonlocal serving
        serving = await load()
        serving.runner.add_done_callback(lambda _: stop.set())
        add(serving, server)
        keep_loaded()

    async def drain_sessions() -> None:
        if serving is not None:
            serving.scheduler.draining = True
            await drain(serving)

    warn_of_callers(settings)
    try:
        await run_server(settings, register, [service_name], stop, on_drain=drain_sessions, loading=loading)
    finally:
        if serving is not None:
            await serving.close()
