"""A service's open sessions: their deadlines, and their ids on each link."""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from paceline.protocol.codec import failure_of
from paceline.protocol.errors import (
    DeadlineExceeded,
    InternalError,
    Overloaded,
    PacelineError,
    PeerUnavailable,
    PrefixMismatch,
    UnknownSession,
)
from paceline.protocol.session import Close, SessionSpec
from paceline.rpc.frames import FrameWriter, Message
from paceline.runtime import logs, metrics
from paceline.runtime.process import end_if_device_lost

logger = logging.getLogger(__name__)

RETRY_AFTER_MS = 200
"""Hint sent with `Overloaded` when there is no room for a session now."""
DRAINING = "draining"
"""Fact in the error of a session that a draining service refuses: another service can take it at once."""
DRAINING_RETRY_MS = 500
"""Hint sent with it for callers that know no other service: the replacement of this one has to load first."""


class SessionOwner(Protocol):
    """The link that a session belongs to."""

    def send(self, event: Any, *, urgent: bool) -> None:
        """Queue an event for the other side; never blocks."""

    def forget(self, session_id: int) -> None:
        """Forget a session that the service has ended; later messages find no session."""


@dataclass(eq=False)
class ServedSession:
    """The base of every session of a service. `key` is its number within the service, `id` its number on the link.

    `closed` is set when it ends.
    """

    key: int
    id: int
    owner: SessionOwner
    facts: SessionSpec
    closed: bool = field(default=False, init=False)

    def defect(self, error: Exception) -> InternalError:
        """The error that the other side gets for an unexpected one; the log has the stack.

        One that says that the device is lost ends the process: the sessions are opened anew, elsewhere if possible.
        """
        end_if_device_lost(error)
        return InternalError(f"session {self.id}: unexpected {type(error).__name__}; the service's log has the stack")

    def _expect(self, name: str, own: object, theirs: object) -> None:
        if own != theirs:
            raise PrefixMismatch(
                f"session {self.id} {name}: expected {own}, got {theirs}",
                metadata={"field": name, "expected": str(own), "got": str(theirs)},
            )


Session = TypeVar("Session", bound=ServedSession)


class SessionScheduler(ABC, Generic[Session]):
    """The base of every scheduler: its open sessions on all links, and how each of them ends."""

    opens: ClassVar[type[Any]]
    """The command that opens a session."""

    def __init__(self, max_sessions_per_link: int) -> None:
        self.draining = False
        """Whether the service is about to stop: open sessions go on, new ones are refused."""
        self.steps = 0
        self.max_sessions_per_link = max_sessions_per_link
        self._keys = itertools.count(1)
        self._open: dict[Session, asyncio.TimerHandle | None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def sessions(self) -> int:
        """Sessions that are open."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Open sessions that no step serves yet."""
        return 0

    @abstractmethod
    def open(self, owner: SessionOwner, command: Any) -> Session:
        """Open a session; a `PacelineError` refuses it."""

    @abstractmethod
    def handle(self, session: Session, command: Any) -> None:
        """Handle a command that neither opens nor closes; a `PacelineError` refuses it."""

    @property
    @abstractmethod
    def queue_length(self) -> int:
        """Number of sessions, rounds or proposals that wait for a step."""

    @property
    @abstractmethod
    def costs(self) -> Any:
        """Current costs and counts of steps: `TargetCosts` or `DraftCosts`."""

    @abstractmethod
    async def run(self) -> None:
        """Run steps until cancelled."""

    def close(self, session: Session) -> None:
        """End a session; closing it again is harmless. Its memory is free when the running step ends."""
        if session.closed:
            return
        session.closed = True
        expiry = self._open.pop(session)
        if expiry is not None:
            expiry.cancel()
        if not self._open:
            self._idle.set()
        self._release(session)

    def check_admits(self) -> None:
        """Raise `PeerUnavailable` while the service drains."""
        if self.draining:
            message = f"the service is draining and takes no new session ({self.sessions} still run)"
            raise PeerUnavailable(message, metadata={DRAINING: "true"}, retry_after_ms=DRAINING_RETRY_MS)

    async def idle(self) -> None:
        """Return once no session is open."""
        await self._idle.wait()

    @abstractmethod
    def _release(self, session: Session) -> None:
        """Free what an ended session held; called once."""

    def _add(self, session: Session) -> None:
        """Add a session, which fails when its time runs out."""
        self._idle.clear()
        left_ms = session.facts.time_left_ms
        loop = asyncio.get_running_loop()
        self._open[session] = None if left_ms is None else loop.call_later(left_ms / 1e3, self._expire, session)

    def _fail(self, session: Session, error: PacelineError) -> None:
        """Send the error to the other side and end the session."""
        if session.closed:
            return
        logger.warning(
            "session failed: session=%d trace=%s reason=%s error=%s",
            session.id, logs.trace_of(session.facts.traceparent), error.reason, error.for_log,
        )  # fmt: skip
        metrics.session_failed(error)
        self.close(session)
        session.owner.forget(session.id)
        session.owner.send(failure_of(session.id, error, session_closed=True), urgent=False)

    def _expire(self, session: Session) -> None:
        limit = session.facts.time_left_ms
        self._fail(session, DeadlineExceeded(f"session {session.id}: its time_left_ms = {limit} ran out"))


class LinkSessions(Generic[Session]):
    """The sessions of one link; its `LinkHandler`, and the `SessionOwner` of each of them.

    Args:
        scheduler: opens and runs the sessions.
        writer: the link's writer.
    """

    def __init__(self, scheduler: SessionScheduler[Session], writer: FrameWriter[Any]) -> None:
        self._scheduler = scheduler
        self._writer = writer
        self._sessions: dict[int, Session] = {}

    @property
    def frames_sent(self) -> int:
        """Frames written on the link so far."""
        return self._writer.frames_sent

    def on_command(self, command: Any) -> None:
        """Handle one command; an error leaves the session as it was."""
        if isinstance(command, Close):
            self._close(command)
        elif isinstance(command, self._scheduler.opens):
            self._open(command)
        else:
            self._scheduler.handle(self._session(command.session_id), command)

    def on_closed(self) -> None:
        """End all sessions of a link that is gone."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            self._scheduler.close(session)

    def send(self, event: Any, *, urgent: bool) -> None:
        """Queue an event for the coordinator."""
        self._writer.send(event, urgent)

    def show_life(self, sign: Callable[[Collection[Session]], Message]) -> None:
        """Send the sign of life of the open sessions, if there are any; otherwise the coordinator waits for none."""
        if self._sessions:
            self._writer.show_life(sign(self._sessions.values()))

    def forget(self, session_id: int) -> None:
        """Forget a session that the service has ended."""
        self._sessions.pop(session_id, None)

    def _open(self, command: Any) -> None:
        if command.session_id in self._sessions:
            raise PrefixMismatch(f"session {command.session_id} is open on this link and can't be opened again")
        try:
            self._scheduler.check_admits()
            self._check_room()
            self._sessions[command.session_id] = self._scheduler.open(self, command)
        except PacelineError as error:
            metrics.session_refused(error)
            self.send(failure_of(command.session_id, error, session_closed=True), urgent=False)

    def _check_room(self) -> None:
        """Refuse a session beyond the limit of one link, which leaves room for other links."""
        limit = self._scheduler.max_sessions_per_link
        if len(self._sessions) >= limit:
            message = f"engine.max_sessions_per_link = {limit} sessions of this link are open"
            raise Overloaded(message, retry_after_ms=RETRY_AFTER_MS)

    def _close(self, command: Close) -> None:
        session = self._sessions.pop(command.session_id, None)
        if session is not None:
            self._scheduler.close(session)

    def _session(self, session_id: int) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession(f"session {session_id} is not open on this link")
        return session
