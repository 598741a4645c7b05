"""The coordinator's side of a link, to a target or a draft service: connects, greets, reconnects with back-off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Generic

import grpc

from paceline.protocol import codec
from paceline.protocol.draft import DraftCommand, DraftEvent
from paceline.protocol.errors import (
    InvalidInput,
    PacelineError,
    PeerUnavailable,
    ProtocolMismatch,
    VocabularyMismatch,
    fresh,
)
from paceline.protocol.handshake import Hello, ServiceStatus, Welcome
from paceline.protocol.session import Failure
from paceline.protocol.target import TargetCommand, TargetEvent
from paceline.rpc.channel import KEEPALIVE, Keepalive, open_channel
from paceline.rpc.cost_messages import PeerCosts
from paceline.rpc.frames import FrameWriter, Message, check_frame, first_to_end
from paceline.rpc.link_kinds import (
    DRAFT,
    HANDSHAKE_TIMEOUT_S,
    TARGET,
    Command,
    Event,
    LinkKind,
    check_fingerprint,
    check_version,
)
from paceline.rpc.retries import Backoff
from paceline.rpc.statuses import from_rpc_error, is_of_the_call, unexpected_error
from paceline.runtime import clock
from paceline.runtime.config import PeerSettings

logger = logging.getLogger(__name__)

RECONNECT_MIN_MS = 50.0
RECONNECT_MAX_MS = 2_000.0
MAX_SESSION_ID = (1 << 32) - 1


class PeerLink(Generic[Command, Event]):
    """Keeps one link to one peer: connects, greets, reconnects with back-off.

    Set the callbacks before `start`. They are called on the event loop and must
    not block; their exceptions are logged and go no further.

    - `on_change()`: the link is up, or down, or a handshake was refused.
    - `on_event(event)`: for each event, all of a frame in one go, before any write.
      An event that can't be decoded reaches its session as a `Failure`.
    - `on_down(error)`: once for each link that was up, before `on_change()`; a `PeerUnavailable`.

    A refused handshake is kept as `last_error`, and retried with the longest back-off.

    Args:
        settings: the peer's address and TLS files.
        hello: our hello, with the fingerprint that the peer has to fit.
    """

    kind: LinkKind[Command, Event]
    name: str
    """The peer's role in messages and logs."""

    def __init__(
        self,
        settings: PeerSettings,
        hello: Hello,
        *,
        reconnect_min_ms: float = RECONNECT_MIN_MS,
        reconnect_max_ms: float = RECONNECT_MAX_MS,
        keepalive: Keepalive = KEEPALIVE,
    ) -> None:
        self.address = settings.address
        self._settings = settings
        self._where = f"{self.name} at {settings.address}"
        self._facts = {"peer": self.name, "address": settings.address}
        self._hello = hello
        self._backoff = Backoff(reconnect_min_ms / 1e3, reconnect_max_ms / 1e3)
        self._keepalive = keepalive
        self.on_event: Callable[[Event], None] = _ignore
        self.on_down: Callable[[PacelineError], None] = _ignore
        self.on_change: Callable[[], None] = _ignore
        self.last_error: PacelineError | None = None
        self.welcome: Welcome | None = None
        """The last welcome, kept after the link is down; None: there was no link yet."""
        self._costs = PeerCosts(self.kind.costs, self._where)
        self._channel: grpc.aio.Channel | None = None
        self._writer: FrameWriter[Command] | None = None
        self._ignored_kinds = set[str]()
        self._up = asyncio.Event()
        self._refusal_event = asyncio.Event()
        self._drop_future: asyncio.Future[None] | None = None
        self._runner: asyncio.Task[None] | None = None
        self._last_session_id = 0
        self._last_frame = clock.now()

    @property
    def is_up(self) -> bool:
        """Whether the link is up now."""
        return self._writer is not None

    @property
    def is_refused(self) -> bool:
        """Whether the peer answered the last handshake and doesn't fit."""
        return self._refusal_event.is_set()

    @property
    def costs(self) -> Any:
        """The peer's last `TargetCosts` or `DraftCosts`, kept after the link is down."""
        return self._costs.costs

    @property
    def silent_s(self) -> float:
        """Seconds since the last frame arrived (or the link came up)."""
        return clock.now() - self._last_frame

    def open_channel(self) -> grpc.aio.Channel:
        """Open a channel to the peer: the one place where a link meets the network."""
        return open_channel(self._settings, self._keepalive, section=f"{self.name}.")

    async def start(self) -> None:
        """Start to connect; returns at once."""
        if self._runner is None:
            self._runner = asyncio.create_task(self._run(), name=f"link to {self.name} at {self.address}")

    async def close(self) -> None:
        """End the link for good; calls `on_down` if it was up."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
        self._set_down(PeerUnavailable(f"the link to {self._where} was closed", metadata=self._facts))

    def send(self, command: Command, urgent: bool = False) -> None:
        """Queue a command for the next frame; rounds and commits, for example, are urgent.

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
            # Only a new link may use its ids again.
            self.drop(PeerUnavailable(f"the link to {self._where} is out of session ids", metadata=self._facts))
        return self._last_session_id

    def drop(self, error: PacelineError) -> None:
        """End the current link, for example because the peer is silent: `on_down(error)` now, then reconnect."""
        self._set_down(error)
        if self._drop_future is not None and not self._drop_future.done():
            self._drop_future.set_exception(error)

    async def wait_up(self, timeout_s: float) -> Welcome:
        """Wait until the link is up.

        Raises:
            VocabularyMismatch, ProtocolMismatch: the peer answers and doesn't fit; raised at once.
            PeerUnavailable: the link is not up in time; names peer, address and the last error.
        """
        if not self.is_up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await first_to_end(self._up.wait(), self._refusal_event.wait())
        if self.is_up and self.welcome is not None:
            return self.welcome
        raise self.why_down()

    def why_down(self) -> PacelineError:
        """The error of a missing link: the peer doesn't fit, or it can't be reached."""
        if self.is_refused and self.last_error is not None:
            return fresh(self.last_error)
        return self._unavailable()

    async def status(self, timeout_s: float) -> ServiceStatus:
        """The service's status, by a call beside the link's stream.

        Raises:
            PeerUnavailable: there is no link, or it ended meanwhile.
            PacelineError: the service did not answer in time.
        """
        if self._channel is None:
            raise self._unavailable()
        try:
            reply = await self.kind.ask_status(self.kind.stub(self._channel), timeout_s)
            return codec.decode_service_status(reply.status)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._where) from error
        except asyncio.CancelledError as error:
            if not is_of_the_call():
                raise
            raise self._unavailable() from error

    async def _run(self) -> None:
        while True:
            try:
                error = await self._link()
            except Exception as defect:  # the sessions get it as an error, and the link is opened again
                logger.exception("link failed: peer=%s address=%s", self.name, self.address)
                error = unexpected_error(defect)
            if self._runner is None:
                return  # closed, though gRPC has answered our cancellation with the call's status
            self._note(error)
            self._set_down(error)
            await asyncio.sleep(self._backoff.next_s(error.retry_after_ms, longest=self._refusal_event.is_set()))

    async def _link(self) -> PacelineError:
        """Run one link to its end, and return the reason. An exception is a defect."""
        channel: grpc.aio.Channel | None = None
        try:
            channel = self._channel = self.open_channel()
            call = getattr(self.kind.stub(channel), self.kind.method)()
            welcome = await self._greet(call)
            await self._use_or_lose(call, welcome)
        except PacelineError as error:
            return error
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, self._where)
        except asyncio.CancelledError:
            if not is_of_the_call():
                raise
            return PeerUnavailable(f"the call to {self._where} was cancelled", metadata=self._facts)
        finally:
            self._channel = None
            if channel is not None:
                await channel.close()
        return PeerUnavailable(f"{self._where} ended the link", metadata=self._facts)

    async def _greet(self, call: Any) -> Welcome:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await call.write(self.kind.request(hello=codec.encode_hello(self._hello)))
                frame = await call.read()
        except TimeoutError as error:
            message = f"{self._where} did not answer within {HANDSHAKE_TIMEOUT_S:g} s"
            raise PeerUnavailable(message, metadata=self._facts) from error
        if frame is grpc.aio.EOF or not frame.HasField("welcome") or frame.events:
            raise ProtocolMismatch(f"the first frame from {self._where} must carry welcome and nothing else")
        check_version(frame.welcome.protocol_version)
        welcome = self._read(frame)
        check_fingerprint(self._hello.fingerprint, welcome.fingerprint)
        self._costs.begin(frame)
        return welcome

    def _read(self, frame: Message) -> Welcome:
        """The welcome of a first frame. A malformed one is a misfit, since the next try would bring the same."""
        try:
            check_frame(frame, 0)
            return codec.decode_welcome(frame.welcome)
        except InvalidInput as error:
            message, facts = f"{self._where} sent a malformed welcome: {error.message}", self._facts | error.metadata
            raise ProtocolMismatch(message, metadata=facts) from error

    async def _use_or_lose(self, call: Any, welcome: Welcome) -> None:
        """Use the link, and raise `PeerUnavailable` whatever ends it: a peer that fitted once may fit again."""
        try:
            await self._use(call, welcome)
        except PacelineError as error:
            raise self._broken_link(error) from error

    async def _use(self, call: Any, welcome: Welcome) -> None:
        writer = FrameWriter[Command](self.kind.commands.encode, lambda batch: self.kind.request(commands=batch))
        self._drop_future = asyncio.get_running_loop().create_future()
        self._set_up(writer, welcome)
        try:
            bodies = self._read_events(call), writer.run(call.write), writer.overflow(), self._drop_future
            await first_to_end(*bodies, at_end=writer.close)
        except asyncio.InvalidStateError:
            # A write to a call that has just ended; a read raises the reason.
            await call.read()
        finally:
            self._drop_future.cancel()
            call.cancel()

    async def _read_events(self, call: Any) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            self._last_frame = clock.now()
            check_frame(frame, len(frame.events))
            if frame.HasField("welcome"):
                raise ProtocolMismatch(f"a second welcome from {self._where}")
            self._costs.update(frame)
            for message in frame.events:
                self._deliver(message)
            for sign in self.kind.signs(frame):
                _call_back(self.on_event, sign)

    def _deliver(self, message: Message) -> None:
        session_id = codec.session_id_of(message)
        try:
            event: Any = self.kind.events.decode(message)
        except PacelineError as error:
            if (kind := message.WhichOneof("event")) in self.kind.dispensable:
                self._ignore_event(kind, session_id, error)
                return
            event = self._failure_of(session_id, error)
        if event.session_id:
            _call_back(self.on_event, event)
        else:
            kind = type(event).__name__
            logger.warning("event without a session: peer=%s address=%s kind=%s", self.name, self.address, kind)

    def _ignore_event(self, kind: str, session_id: int, error: PacelineError) -> None:
        if kind not in self._ignored_kinds:  # once for each link, since its peer goes on sending them
            facts = f"peer={self.name} address={self.address} session={session_id} error={error.for_log}"
            logger.warning("malformed %s, left out here and on: %s", kind, facts)
        self._ignored_kinds.add(kind)

    def _failure_of(self, session_id: int, error: PacelineError) -> Failure:
        logger.warning("malformed event: peer=%s session=%d error=%s", self.name, session_id, error.for_log)
        message = f"{self._where} sent a malformed event: {error.message}"
        return codec.failure_of(session_id, PeerUnavailable(message, metadata={**self._facts, **error.metadata}))

    def _set_up(self, writer: FrameWriter[Command], welcome: Welcome) -> None:
        self._writer, self.welcome = writer, welcome
        self._ignored_kinds.clear()
        self._last_frame = clock.now()
        self.last_error = None
        self._refusal_event.clear()
        self._backoff.reset()
        self._up.set()
        logger.info("link up: peer=%s address=%s incarnation=%s", self.name, self.address, welcome.incarnation)
        _call_back(self.on_change)

    def _set_down(self, error: PacelineError) -> None:
        """End the current link, if there is one; safe to call again."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        writer.close()
        self._up.clear()
        self.last_error = error
        level = logging.INFO if self._runner is None else logging.WARNING  # closed by its owner, or lost
        where = f"peer={self.name} address={self.address}"
        logger.log(level, "link down: %s reason=%s error=%s", where, error.reason, error)
        _call_back(self.on_down, self._broken_link(error))
        _call_back(self.on_change)

    def _note(self, error: PacelineError) -> None:
        """Keep the reason for a missing link, and log a new one."""
        is_refusal = isinstance(error, VocabularyMismatch | ProtocolMismatch)
        news = self.last_error is None or self.last_error.reason != error.reason
        self.last_error = error
        if is_refusal:
            self._refusal_event.set()
            _call_back(self.on_change)
        else:
            self._refusal_event.clear()
        if news and not self.is_up:
            where = f"peer={self.name} address={self.address}"
            logger.warning("no link: %s reason=%s error=%s", where, error.reason, error)

    def _broken_link(self, error: PacelineError) -> PeerUnavailable:
        """The error of a broken link for its sessions, whatever broke it."""
        if isinstance(error, PeerUnavailable):
            return error
        message, facts = f"the link to {self._where} broke: {error.message}", {**self._facts, "cause": error.reason}
        return PeerUnavailable(message, metadata=facts)

    def _unavailable(self) -> PeerUnavailable:
        error = self.last_error
        cause, pause_ms = (f" ({error.message})", error.retry_after_ms) if error else ("", None)
        return PeerUnavailable(f"no link to {self._where}{cause}", metadata=self._facts, retry_after_ms=pause_ms)


class TargetLink(PeerLink[TargetCommand, TargetEvent]):
    """A `PeerLink` to a target service."""

    kind, name = TARGET, "target"


class DraftLink(PeerLink[DraftCommand, DraftEvent]):
    """A `PeerLink` to a draft service."""

    kind, name = DRAFT, "draft"


def _ignore(*_: Any) -> None:
    """The default callback."""


def _call_back(callback: Callable[..., None], *values: Any) -> None:
    try:
        callback(*values)
    except Exception:
        logger.exception("callback of a link failed: callback=%s", getattr(callback, "__qualname__", callback))
