"""A link: one bidirectional stream between two processes that carries many sessions in frames.

The coordinator's side is a `PeerLink`, the service's side `serve_link`; both
write through a `FrameWriter`. A link has keepalive and no deadline. When it
breaks, in whatever way, the server's handler is told once (`closed`) and so is
the client's (`on_down`): all its sessions are over.

A malformed message costs its session a `Failure`; a malformed frame (too
large, a second hello, none at all) ends the link with a typed status.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import grpc

from paceline import codec
from paceline.config import PeerSettings
from paceline.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    PacelineError,
    PeerUnavailable,
    ProtocolMismatch,
    VocabularyMismatch,
    from_wire,
)
from paceline.rpc.channel import KEEPALIVE, Keepalive, open_channel
from paceline.rpc.errors import abort_with, from_rpc_error, unexpected
from paceline.types import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Close,
    DraftCommand,
    DraftEvent,
    Failure,
    Fingerprint,
    Hello,
    TargetCommand,
    TargetEvent,
    Welcome,
)
from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import draft_service_pb2_grpc as draft_grpc
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import target_service_pb2_grpc as target_grpc

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
RECONNECT_MIN_MS = 50.0
RECONNECT_MAX_MS = 2_000.0
MAX_SESSION_ID = (1 << 32) - 1
MESSAGE_OVERHEAD_BYTES = 8
"""Tag and length of one message in its frame, from above."""

Message = Any  # a generated protobuf message


class InSession(Protocol):
    """Every message of a link but the handshake names its session."""

    @property
    def session_id(self) -> int:
        """The session that the message belongs to."""


M = TypeVar("M", bound=InSession)
Command = TypeVar("Command", bound=InSession)
Event = TypeVar("Event", bound=InSession)
CommandIn = TypeVar("CommandIn", bound=InSession, contravariant=True)


class FrameWriter(Generic[M]):
    """Gathers messages into frames; one write is in flight at a time, and none waits to be filled.

    Belongs to one event loop; `send` never blocks. Urgent messages leave before
    the others, but never before an earlier message of their own session.
    """

    def __init__(self, encode: Callable[[M], Message], frame: Callable[[list[Message]], Message]) -> None:
        self._encode = encode
        self._frame = frame
        self._urgent: deque[tuple[Message, int]] = deque()
        self._others: deque[tuple[Message, int, int]] = deque()
        self._waiting_sessions: dict[int, int] = {}
        self._filled = asyncio.Event()
        self._closed = False
        self.frames_sent = 0
        """Frames that carried messages."""

    def send(self, message: M, urgent: bool = False) -> None:
        """Queue a message; dropped in silence once the writer is closed (the link's end is told elsewhere).

        Raises:
            InvalidInput: the message alone is larger than a frame.
        """
        if self._closed:
            return
        encoded = self._encode(message)
        size = encoded.ByteSize() + MESSAGE_OVERHEAD_BYTES
        if size > MAX_FRAME_BYTES:
            raise InvalidInput.of(f"bytes of {type(message).__name__}", size, f"at most {MAX_FRAME_BYTES}")
        session = message.session_id
        if urgent and session not in self._waiting_sessions:
            self._urgent.append((encoded, size))
        else:
            self._others.append((encoded, size, session))
            self._waiting_sessions[session] = self._waiting_sessions.get(session, 0) + 1
        self._filled.set()

    def show_life(self) -> None:
        """Have a frame written now, an empty one if nothing is pending: its reader sees that the writer is alive."""
        if not self._closed:
            self._filled.set()

    async def run(self, write: Callable[[Message], Awaitable[None]]) -> NoReturn:
        """Write whatever is pending, all at once, until cancelled or until `write` raises."""
        while True:
            await self._filled.wait()
            messages = self._take()
            await write(self._frame(messages))
            self.frames_sent += bool(messages)

    def close(self) -> None:
        """Forget what is pending and what will be sent."""
        self._closed = True
        self._urgent.clear()
        self._others.clear()
        self._waiting_sessions.clear()
        self._filled.clear()

    def _take(self) -> list[Message]:
        """What fits into one frame; at least one message if any is pending, as each fits alone."""
        taken: list[Message] = []
        room = MAX_FRAME_BYTES
        while self._urgent and self._urgent[0][1] <= room:
            message, size = self._urgent.popleft()
            taken.append(message)
            room -= size
        while not self._urgent and self._others and self._others[0][1] <= room:
            message, size, session = self._others.popleft()
            taken.append(message)
            room -= size
            self._forget(session)
        if not self._urgent and not self._others:
            self._filled.clear()
        return taken

    def _forget(self, session: int) -> None:
        left = self._waiting_sessions[session] - 1
        if left:
            self._waiting_sessions[session] = left
        else:
            del self._waiting_sessions[session]


@dataclass(frozen=True)
class LinkKind(Generic[Command, Event]):
    """What distinguishes the two kinds of link: their messages and how they are encoded."""

    method: str
    stub: Callable[[Any], Any]
    request: Callable[..., Message]
    response: Callable[..., Message]
    encode_command: Callable[[Command], Message]
    decode_command: Callable[[Message], Command]
    encode_event: Callable[[Any], Message]
    decode_event: Callable[[Message], Event]


TARGET: LinkKind[TargetCommand, TargetEvent] = LinkKind(
    method="Verify",
    stub=target_grpc.TargetServiceStub,
    request=target_pb.VerifyRequest,
    response=target_pb.VerifyResponse,
    encode_command=codec.encode_target_command,
    decode_command=codec.decode_target_command,
    encode_event=codec.encode_target_event,
    decode_event=codec.decode_target_event,
)
DRAFT: LinkKind[DraftCommand, DraftEvent] = LinkKind(
    method="Draft",
    stub=draft_grpc.DraftServiceStub,
    request=draft_pb.DraftRequest,
    response=draft_pb.DraftResponse,
    encode_command=codec.encode_draft_command,
    decode_command=codec.decode_draft_command,
    encode_event=codec.encode_draft_event,
    decode_event=codec.decode_draft_event,
)


def check_fingerprint(expected: Fingerprint, found: Fingerprint) -> None:
    """Compare what a coordinator expects with what a service runs; fields empty on either side fit.

    Raises:
        VocabularyMismatch: tokenizer or vocab_size differ.
        ProtocolMismatch: model or numeric differ, when the coordinator pins them.
    """
    for field in ("tokenizer", "vocab_size", "model", "numeric"):
        wanted, value = getattr(expected, field), getattr(found, field)
        if wanted and value and wanted != value:
            kind = VocabularyMismatch if field in ("tokenizer", "vocab_size") else ProtocolMismatch
            raise kind(
                f"fingerprint.{field} = {value!r} (model {found.model!r}): must be {wanted!r}, the coordinator's",
                metadata={"field": f"fingerprint.{field}", "value": str(value), "limit": str(wanted)},
            )


def check_version(version: int) -> None:
    """Raise `ProtocolMismatch` unless the peer speaks our protocol version."""
    if version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"protocol_version = {version}: must be {PROTOCOL_VERSION}",
            metadata={"field": "protocol_version", "value": str(version), "limit": str(PROTOCOL_VERSION)},
        )


# --- the service's side ------------------------------------------------------


class LinkHandler(Protocol[CommandIn]):
    """The sessions of one link on a service. Both methods run on the event loop and must not block."""

    def on_command(self, command: CommandIn) -> None:
        """Handle one command.

        A `PacelineError` becomes a `Failure` of the command's session, which
        stays as the handler left it. Any other exception is a defect: it is
        logged, the session gets a `Close`, then an `InternalError` failure.
        """

    def closed(self) -> None:
        """The link is gone: end its sessions and free what they hold. Called exactly once."""


OpenHandler = Callable[[FrameWriter[Event]], LinkHandler[Command]]


async def serve_target_link(
    context: Any, welcome: Welcome, open_handler: OpenHandler[TargetEvent, TargetCommand]
) -> None:
    """`serve_link` for `TargetService.Verify`."""
    await serve_link(TARGET, context, welcome, open_handler)


async def serve_draft_link(
    context: Any, welcome: Welcome, open_handler: OpenHandler[DraftEvent, DraftCommand]
) -> None:
    """`serve_link` for `DraftService.Draft`."""
    await serve_link(DRAFT, context, welcome, open_handler)


async def serve_link(
    kind: LinkKind[Command, Event],
    context: Any,
    welcome: Welcome,
    open_handler: OpenHandler[Event, Command],
) -> None:
    """Serve one link on a grpc.aio stream until it ends; the whole body of the servicer's method.

    Args:
        context: the `grpc.aio.ServicerContext` of the stream; only its `read` and `write` are used for messages.
        welcome: what to answer the hello with.
        open_handler: makes the link's handler once the handshake is done, given the writer of its events.
    """
    peer = context.peer()
    try:
        hello = await _accept(kind, context, welcome)
        logger.info("link up: method=%s peer=%s incarnation=%s", kind.method, peer, hello.incarnation)
        await _serve_sessions(kind, context, open_handler)
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
        await abort_with(context, unexpected(error))


async def _accept(kind: LinkKind[Command, Event], context: Any, welcome: Welcome) -> Hello:
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            frame = await context.read()
    except TimeoutError as error:
        raise DeadlineExceeded(f"no hello within {HANDSHAKE_TIMEOUT_S:g} s") from error
    if frame is grpc.aio.EOF or not frame.HasField("hello") or frame.commands:
        raise ProtocolMismatch("the first frame of a link must carry hello and nothing else")
    hello = codec.decode_hello(frame.hello)
    check_version(hello.protocol_version)
    check_fingerprint(hello.fingerprint, welcome.fingerprint)
    await context.write(kind.response(welcome=codec.encode_welcome(welcome)))
    return hello


async def _serve_sessions(
    kind: LinkKind[Command, Event], context: Any, open_handler: OpenHandler[Event, Command]
) -> None:
    writer = FrameWriter[Event](kind.encode_event, lambda events: kind.response(events=events))
    handler = open_handler(writer)

    def closed() -> None:
        writer.close()
        handler.closed()

    await _first_to_end(_read_commands(kind, context, writer, handler), writer.run(context.write), at_end=closed)


async def _read_commands(
    kind: LinkKind[Command, Event], context: Any, writer: FrameWriter[Event], handler: LinkHandler[Command]
) -> None:
    """Hand over every frame's commands in one go; returns when the client ends the link."""
    while (frame := await context.read()) is not grpc.aio.EOF:
        _check_frame(frame)
        if frame.HasField("hello"):
            raise ProtocolMismatch("a second hello on a link")
        for message in frame.commands:
            _handle(kind, message, writer, handler)


def _handle(
    kind: LinkKind[Command, Event], message: Message, writer: FrameWriter[Event], handler: LinkHandler[Command]
) -> None:
    session_id = codec.session_id_of(message)
    try:
        handler.on_command(kind.decode_command(message))
    except PacelineError as error:
        _fail(writer, session_id, error, closed=False)
    except Exception as error:
        logger.exception("command failed: method=%s session=%d", kind.method, session_id)
        _close_failed(handler, session_id)
        _fail(writer, session_id, unexpected(error), closed=True)


def _close_failed(handler: LinkHandler[Any], session_id: int) -> None:
    try:
        handler.on_command(Close(session_id))
    except Exception:
        logger.exception("closing a failed session failed: session=%d", session_id)


def _fail(writer: FrameWriter[Any], session_id: int, error: PacelineError, *, closed: bool) -> None:
    writer.send(codec.failure_of(session_id, error, session_closed=closed))


def _check_frame(frame: Message) -> None:
    size = frame.ByteSize()
    if size > MAX_FRAME_BYTES:
        raise InvalidInput.of("frame bytes", size, f"at most {MAX_FRAME_BYTES}")


async def _first_to_end(*bodies: Any, at_end: Callable[[], None]) -> None:
    """Run bodies side by side until one ends; the others are cancelled, its exception is raised.

    If several end at once the first one's exception counts: a reader knows why
    a stream ended, a writer only that it did. `at_end` is called exactly once,
    before anything else is waited for.
    """
    tasks = [asyncio.ensure_future(body) for body in bodies]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        try:
            at_end()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


# --- the coordinator's side --------------------------------------------------


class PeerLink(Generic[Command, Event]):
    """Keeps one link to one peer: connects, greets, reconnects with back-off.

    Set the callbacks before `start`; they are called on the event loop, must
    not block, and an exception of theirs is logged and goes no further:
    `on_up(welcome)` once a link stands, `on_event(event)` for each event (all
    those of a frame in one go, before anything is written), `on_down(error)`
    exactly once for each `on_up`, always with a `PeerUnavailable`. An event that can't be decoded reaches its
    session as a `Failure`.

    A refused handshake (`VocabularyMismatch`, `ProtocolMismatch`) is kept as
    `last_error` and tried again with the longest back-off.

    Args:
        name: the peer's role in messages and logs: "target", "draft".
        settings: where it is.
        hello: what we expect to find.
    """

    def __init__(
        self,
        kind: LinkKind[Command, Event],
        name: str,
        settings: PeerSettings,
        hello: Hello,
        *,
        reconnect_min_ms: float = RECONNECT_MIN_MS,
        reconnect_max_ms: float = RECONNECT_MAX_MS,
        keepalive: Keepalive = KEEPALIVE,
    ) -> None:
        self._kind = kind
        self.name = name
        self.address = settings.address
        self._settings = settings
        self._hello = hello
        self._backoff = _Backoff(reconnect_min_ms / 1e3, reconnect_max_ms / 1e3)
        self._keepalive = keepalive
        self.on_up: Callable[[Welcome], None] = _ignore
        self.on_event: Callable[[Event], None] = _ignore
        self.on_down: Callable[[PacelineError], None] = _ignore
        self.last_error: PacelineError | None = None
        self._welcome: Welcome | None = None
        self._writer: FrameWriter[Command] | None = None
        self._up = asyncio.Event()
        self._refused = asyncio.Event()
        self._dropped: asyncio.Future[None] | None = None
        self._runner: asyncio.Task[None] | None = None
        self._last_session_id = 0
        self._last_frame = time.monotonic()

    @property
    def is_up(self) -> bool:
        """Whether a link stands now."""
        return self._writer is not None

    @property
    def welcome(self) -> Welcome | None:
        """The last welcome; it stays after the link is down. None: there was no link yet."""
        return self._welcome

    @property
    def silent_s(self) -> float:
        """Seconds since the last frame arrived (or the link came up)."""
        return time.monotonic() - self._last_frame

    @property
    def frames_sent(self) -> int:
        """Frames written on the standing link; 0 when there is none."""
        return self._writer.frames_sent if self._writer else 0

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        if self._runner is None:
            self._runner = asyncio.create_task(self._run(), name=f"link to {self.name} at {self.address}")

    async def close(self) -> None:
        """End the link for good; `on_down` is called if it stood."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
        self._set_down(PeerUnavailable(f"the link to {self._where} was closed", metadata=self._facts))

    def send(self, command: Command, urgent: bool = False) -> None:
        """Queue a command for the next frame; rounds, commits and the like are urgent.

        Raises:
            PeerUnavailable: the link is down.
            InvalidInput: the command alone is larger than a frame.
        """
        if self._writer is None:
            raise self._unavailable()
        self._writer.send(command, urgent)

    def next_session_id(self) -> int:
        """A session id that no session of this link has had."""
        self._last_session_id += 1
        if self._last_session_id > MAX_SESSION_ID:
            self._last_session_id = 1
            # Only a new link may use an id again.
            self.drop(PeerUnavailable(f"the link to {self._where} is out of session ids", metadata=self._facts))
        return self._last_session_id

    def drop(self, error: PacelineError) -> None:
        """Give the standing link up, say because the peer is silent: `on_down(error)` now, then reconnect."""
        self._set_down(error)
        if self._dropped is not None and not self._dropped.done():
            self._dropped.set_exception(error)

    async def wait_up(self, timeout_s: float) -> Welcome:
        """Wait until a link stands.

        Raises:
            VocabularyMismatch, ProtocolMismatch: the peer is there and doesn't fit; raised at once.
            PeerUnavailable: it did not come up in time; names peer, address and the last error.
        """
        if self.is_up and self._welcome is not None:
            return self._welcome
        waiters = [asyncio.ensure_future(event.wait()) for event in (self._up, self._refused)]
        try:
            await asyncio.wait(waiters, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
        if self.is_up and self._welcome is not None:
            return self._welcome
        if self._refused.is_set() and self.last_error is not None:
            raise _fresh(self.last_error)
        raise self._unavailable()

    async def _run(self) -> None:
        while True:
            error = await self._link()
            self._note(error)
            self._set_down(error)
            await asyncio.sleep(self._backoff.next_s(longest=self._refused.is_set()))

    async def _link(self) -> PacelineError:
        """Live through one link; returns why it ended."""
        channel: grpc.aio.Channel | None = None
        try:
            channel = open_channel(self._settings, self._keepalive, section=f"{self.name}.")
            call = getattr(self._kind.stub(channel), self._kind.method)()
            welcome = await self._greet(call)
            await self._use(call, welcome)
        except PacelineError as error:
            return error
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, self._where)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC cancels a read of a call that it has cancelled itself.
            return PeerUnavailable(f"the call to {self._where} was cancelled", metadata=self._facts)
        except Exception as error:
            logger.exception("link failed: peer=%s address=%s", self.name, self.address)
            return unexpected(error)
        finally:
            if channel is not None:
                await channel.close()
        return PeerUnavailable(f"{self._where} ended the link", metadata=self._facts)

    async def _greet(self, call: Any) -> Welcome:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await call.write(self._kind.request(hello=codec.encode_hello(self._hello)))
                frame = await self._read(call)
        except TimeoutError as error:
            raise PeerUnavailable(
                f"{self._where} did not answer within {HANDSHAKE_TIMEOUT_S:g} s", metadata=self._facts
            ) from error
        if frame is None or not frame.HasField("welcome") or frame.events:
            raise ProtocolMismatch(f"the first frame from {self._where} must carry welcome and nothing else")
        check_version(frame.welcome.protocol_version)
        welcome = codec.decode_welcome(frame.welcome)
        check_fingerprint(self._hello.fingerprint, welcome.fingerprint)
        return welcome

    async def _use(self, call: Any, welcome: Welcome) -> None:
        writer = FrameWriter[Command](
            self._kind.encode_command, lambda commands: self._kind.request(commands=commands)
        )
        self._dropped = asyncio.get_running_loop().create_future()
        self._set_up(writer, welcome)
        try:
            await _first_to_end(self._read_events(call), writer.run(call.write), self._dropped, at_end=writer.close)
        except asyncio.InvalidStateError:
            # A write to a call that has just ended; reading tells why it ended.
            await self._read(call)
        finally:
            self._dropped.cancel()
            call.cancel()

    async def _read_events(self, call: Any) -> None:
        while (frame := await self._read(call)) is not None:
            self._last_frame = time.monotonic()
            _check_frame(frame)
            if frame.HasField("welcome"):
                raise ProtocolMismatch(f"a second welcome from {self._where}")
            for message in frame.events:
                self._deliver(message)

    async def _read(self, call: Any) -> Message | None:
        """The next frame; None at the end of the stream. Raises the status of a failed one."""
        frame = await call.read()
        return None if frame is grpc.aio.EOF else frame

    def _deliver(self, message: Message) -> None:
        session_id = codec.session_id_of(message)
        try:
            event: Any = self._kind.decode_event(message)
        except PacelineError as error:
            event = self._malformed(session_id, error)
        if event.session_id == 0:
            logger.warning("event without a session: peer=%s address=%s event=%s", self.name, self.address, event)
            return
        _call_back(self.on_event, event)

    def _malformed(self, session_id: int, error: PacelineError) -> Failure:
        logger.warning("malformed event: peer=%s session=%d error=%s", self.name, session_id, error)
        wrapped = InternalError(f"{self._where} sent a malformed event: {error.message}", metadata=error.metadata)
        return codec.failure_of(session_id, wrapped)

    def _set_up(self, writer: FrameWriter[Command], welcome: Welcome) -> None:
        self._writer, self._welcome = writer, welcome
        self._last_frame = time.monotonic()
        self.last_error = None
        self._refused.clear()
        self._backoff.reset()
        self._up.set()
        logger.info("link up: peer=%s address=%s incarnation=%s", self.name, self.address, welcome.incarnation)
        _call_back(self.on_up, welcome)

    def _set_down(self, error: PacelineError) -> None:
        """End the standing link, if there is one; safe to call again."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        writer.close()
        self._up.clear()
        self.last_error = error
        logger.warning(
            "link down: peer=%s address=%s reason=%s error=%s", self.name, self.address, error.reason, error
        )
        _call_back(self.on_down, self._lost(error))

    def _note(self, error: PacelineError) -> None:
        """Keep why there is no link; log what is new."""
        refused = isinstance(error, VocabularyMismatch | ProtocolMismatch)
        news = self.last_error is None or self.last_error.reason != error.reason
        self.last_error = error
        if refused:
            self._refused.set()
        else:
            self._refused.clear()
        if news and not self.is_up:
            logger.warning(
                "no link: peer=%s address=%s reason=%s error=%s", self.name, self.address, error.reason, error
            )

    def _lost(self, error: PacelineError) -> PeerUnavailable:
        """What a broken link means to its sessions, whatever broke it."""
        if isinstance(error, PeerUnavailable):
            return error
        return PeerUnavailable(
            f"the link to {self._where} broke: {error.message}", metadata={**self._facts, "cause": error.reason}
        )

    @property
    def _where(self) -> str:
        return f"{self.name} at {self.address}"

    @property
    def _facts(self) -> dict[str, str]:
        return {"peer": self.name, "address": self.address}

    def _unavailable(self) -> PeerUnavailable:
        cause = f" ({self.last_error.message})" if self.last_error else ""
        return PeerUnavailable(f"no link to {self._where}{cause}", metadata=self._facts)


class TargetLink(PeerLink[TargetCommand, TargetEvent]):
    """A `PeerLink` to a target service."""

    def __init__(self, settings: PeerSettings, hello: Hello, *, name: str = "target", **options: Any) -> None:
        super().__init__(TARGET, name, settings, hello, **options)


class DraftLink(PeerLink[DraftCommand, DraftEvent]):
    """A `PeerLink` to a draft service."""

    def __init__(self, settings: PeerSettings, hello: Hello, *, name: str = "draft", **options: Any) -> None:
        super().__init__(DRAFT, name, settings, hello, **options)


class _Backoff:
    """Doubling pauses between `min_s` and `max_s`, each shortened by up to half at random."""

    def __init__(self, min_s: float, max_s: float) -> None:
        self._min_s = min_s
        self._max_s = max(min_s, max_s)
        self._next_s = min_s

    def reset(self) -> None:
        self._next_s = self._min_s

    def next_s(self, *, longest: bool) -> float:
        pause = self._max_s if longest else self._next_s
        self._next_s = min(self._max_s, 2 * self._next_s)
        return pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads reconnects, no secret


def _fresh(error: PacelineError) -> PacelineError:
    """A copy to raise: one exception raised many times would gather tracebacks."""
    return from_wire(error.reason, error.message, metadata=error.metadata, retry_after_ms=error.retry_after_ms)


def _ignore(_: Any) -> None:
    """The callback that isn't set."""


def _call_back(callback: Callable[[Any], None], value: Any) -> None:
    try:
        callback(value)
    except Exception:
        logger.exception("callback of a link failed: callback=%s", getattr(callback, "__qualname__", callback))
