"""What target and draft service share: links of one kind, whose sessions are on one scheduler.

The service's side of a link greets the peer, and hands commands and the link's end to its sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Generic, Protocol, TypeVar

import grpc
import psutil

from paceline.protocol import codec
from paceline.protocol.errors import DeadlineExceeded, InternalError, PacelineError, PeerUnavailable, ProtocolMismatch
from paceline.protocol.handshake import Hello, ServiceStatus, Welcome
from paceline.protocol.session import Close
from paceline.rpc.cost_messages import CostsSender
from paceline.rpc.frames import FrameWriter, InSession, Message, check_frame, first_to_end
from paceline.rpc.link_kinds import (
    HANDSHAKE_TIMEOUT_S,
    Command,
    Event,
    LinkKind,
    check_fingerprint,
    check_version,
)
from paceline.rpc.server import run_server, warn_of_callers
from paceline.rpc.sessions import LinkSessions, SessionScheduler
from paceline.rpc.statuses import abort_with, unexpected_error
from paceline.runtime.config import ServerSettings
from paceline.runtime.process import keep_loaded

logger = logging.getLogger(__name__)
CommandIn = TypeVar("CommandIn", bound=InSession, contravariant=True)


class LinkHandler(Protocol[CommandIn]):
    """The sessions of one link on a service. Both methods run on the event loop and must not block."""

    def on_command(self, command: CommandIn) -> None:
        """Handle one command.

        A `PacelineError` becomes a `Failure` of the command's session, which
        stays as the handler left it. Any other exception is a defect: it is
        logged, the session gets a `Close`, then an `InternalError` failure.
        """

    def on_closed(self) -> None:
        """End the sessions of a link that is gone, and free what they hold. Called exactly once."""


OpenHandler = Callable[[FrameWriter[Event]], LinkHandler[Command]]


async def serve_link(
    kind: LinkKind[Command, Event],
    context: Any,
    welcome: Welcome,
    open_handler: OpenHandler[Event, Command],
    costs: Callable[[], Any] | None = None,
) -> None:
    """Serve one link on a grpc.aio stream until it ends; the whole body of the servicer's method.

    Args:
        context: the `grpc.aio.ServicerContext` of the stream; only its `read` and `write` are used for messages.
        welcome: the answer to the hello.
        open_handler: makes the link's handler from the writer of its events, once the handshake is done.
        costs: returns the service's current costs, of the type of the link's kind; None: it sends none.
    """
    peer = context.peer()
    sender = CostsSender(kind.costs, costs or kind.costs.domain)
    try:
        hello = await _accept(kind, context, welcome, sender)
        logger.info("link up: method=%s peer=%s incarnation=%s", kind.method, peer, hello.incarnation)
        await _serve_sessions(kind, context, open_handler, sender)
        logger.info("link closed: method=%s peer=%s", kind.method, peer)
    except PacelineError as error:
        logger.warning("link refused: method=%s peer=%s reason=%s error=%s", kind.method, peer, error.reason, error)
        await abort_with(context, error)
    except asyncio.CancelledError:
        logger.info("link broken: method=%s peer=%s", kind.method, peer)
        raise
    except Exception as error:
        if context.done() or context.cancelled():
            logger.info("link broken: method=%s peer=%s error=%s", kind.method, peer, error)
            return
        logger.exception("link failed: method=%s peer=%s", kind.method, peer)
        await abort_with(context, unexpected_error(error))


async def _accept(kind: LinkKind[Command, Event], context: Any, welcome: Welcome, sender: CostsSender[Any]) -> Hello:
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            frame = await context.read()
    except TimeoutError as error:
        raise DeadlineExceeded(f"no hello within {HANDSHAKE_TIMEOUT_S:g} s") from error
    if frame is grpc.aio.EOF or not frame.HasField("hello") or frame.commands:
        raise ProtocolMismatch("the first frame of a link must carry hello and nothing else")
    check_frame(frame, 0)
    hello = codec.decode_hello(frame.hello)
    check_version(hello.protocol_version)
    check_fingerprint(hello.fingerprint, welcome.fingerprint)
    await context.write(sender.add_to(kind.response(welcome=codec.encode_welcome(welcome))))
    return hello


async def _serve_sessions(
    kind: LinkKind[Command, Event],
    context: Any,
    open_handler: OpenHandler[Event, Command],
    sender: CostsSender[Any],
) -> None:
    def frame_of(events: list[Message]) -> Message:
        frame = kind.response(events=events)
        return sender.add_to(frame) if events else frame

    writer = FrameWriter[Event](kind.events.encode, frame_of)
    handler = open_handler(writer)

    def on_end() -> None:
        writer.close()
        handler.on_closed()

    reading = _read_commands(kind, context, writer, handler)
    await first_to_end(reading, writer.run(context.write), writer.overflow(), at_end=on_end)


async def _read_commands(
    kind: LinkKind[Command, Event], context: Any, writer: FrameWriter[Event], handler: LinkHandler[Command]
) -> None:
    """Hand the commands of each frame to the handler in one go; returns when the client ends the link."""
    while (frame := await context.read()) is not grpc.aio.EOF:
        check_frame(frame, len(frame.commands))
        if frame.HasField("hello"):
            raise ProtocolMismatch("a second hello on a link")
        for message in frame.commands:
            _handle(kind, message, writer, handler)


def _handle(
    kind: LinkKind[Command, Event], message: Message, writer: FrameWriter[Any], handler: LinkHandler[Command]
) -> None:
    session_id = codec.session_id_of(message)
    try:
        handler.on_command(kind.commands.decode(message))
    except PacelineError as error:
        writer.send(codec.failure_of(session_id, error, session_closed=False))
    except Exception as error:
        logger.exception("command failed: method=%s session=%d", kind.method, session_id)
        _close_failed(handler, session_id)
        writer.send(codec.failure_of(session_id, unexpected_error(error), session_closed=True))


def _close_failed(handler: LinkHandler[Any], session_id: int) -> None:
    try:
        handler.on_command(Close(session_id))
    except Exception:
        logger.exception("closing a failed session failed: session=%d", session_id)


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
