"""A service's side of its links: which session ids are open on each, and who works for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from paceline.protocol.codec import failure_of
from paceline.protocol.errors import InvalidInput, PacelineError, UnknownSession
from paceline.protocol.handshake import Welcome
from paceline.protocol.session import Close
from paceline.rpc.frames import FrameWriter
from paceline.rpc.link import LinkHandler

Session = TypeVar("Session")
Opening = TypeVar("Opening", contravariant=True)


class SessionOwner(Protocol):
    """The link that a session belongs to."""

    def send(self, event: Any, *, urgent: bool) -> None:
        """Queue an event for the other side; never blocks."""

    def forget(self, session_id: int) -> None:
        """The worker has ended the session: its messages find nothing from now on."""


class SessionWorker(Protocol[Session, Opening]):
    """What sessions are opened on: a scheduler or a speculator."""

    def open(self, owner: SessionOwner, facts: Opening) -> Session:
        """Begin a session; a `PacelineError` refuses it."""

    def close(self, session: Session) -> None:
        """End a session; closing it again is harmless."""


class LinkSessions(Generic[Session]):
    """The sessions of one link; its `LinkHandler`, and the `SessionOwner` of each of them.

    Args:
        open_kind: the class of the command that opens a session.
        worker: what it is opened on.
        handle: takes every command but opens and closes, with its session.
        writer: of the link.
    """

    def __init__(
        self,
        open_kind: type[Any],
        worker: SessionWorker[Session, Any],
        handle: Callable[[Session, Any], None],
        writer: FrameWriter[Any],
    ) -> None:
        self._open_kind = open_kind
        self._worker = worker
        self._handle = handle
        self._writer = writer
        self._sessions: dict[int, Session] = {}

    @property
    def frames_sent(self) -> int:
        """Frames written on the link so far."""
        return self._writer.frames_sent

    def on_command(self, command: Any) -> None:
        """Handle one command; an error that is raised leaves the session as it was."""
        if isinstance(command, Close):
            self._close(command)
        elif isinstance(command, self._open_kind):
            self._open(command)
        else:
            self._handle(self._session(command.session_id), command)

    def closed(self) -> None:
        """The link is gone, and its sessions with it."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            self._worker.close(session)

    def send(self, event: Any, *, urgent: bool) -> None:
        """Queue an event for the coordinator."""
        self._writer.send(event, urgent)

    def show_life(self) -> None:
        """Have a frame written, if the coordinator may be waiting for one: if a session of its is open."""
        if self._sessions:
            self._writer.show_life()

    def forget(self, session_id: int) -> None:
        """The worker has ended a session."""
        self._sessions.pop(session_id, None)

    def _open(self, command: Any) -> None:
        if command.session_id in self._sessions:
            raise InvalidInput.of("session_id", command.session_id, "new on the link; it is open")
        try:
            self._sessions[command.session_id] = self._worker.open(self, command)
        except PacelineError as error:
            self.send(failure_of(command.session_id, error, session_closed=True), urgent=False)

    def _close(self, command: Close) -> None:
        session = self._sessions.pop(command.session_id, None)
        if session is not None:
            self._worker.close(session)

    def _session(self, session_id: int) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession(f"session {session_id} is not open on this link")
        return session


Serve = Callable[[Any, Welcome, Callable[[FrameWriter[Any]], LinkHandler[Any]]], Any]


class Links(Generic[Session]):
    """All links of a service, and the frames that they have written since it started."""

    def __init__(self, serve: Serve, connect: Callable[[FrameWriter[Any]], LinkSessions[Session]]) -> None:
        self._serve = serve
        self._connect = connect
        self._standing: set[LinkSessions[Session]] = set()
        self._frames_of_past_links = 0

    @property
    def frames_sent(self) -> int:
        """Frames written on all links, past ones too."""
        return self._frames_of_past_links + sum(link.frames_sent for link in self._standing)

    def show_life(self) -> None:
        """Have every coordinator with open sessions see that the service is alive."""
        for link in self._standing:
            link.show_life()

    async def serve(self, context: Any, welcome: Welcome) -> None:
        """Serve one link until it ends."""
        opened: list[LinkSessions[Session]] = []

        def connect(writer: FrameWriter[Any]) -> LinkSessions[Session]:
            opened.append(self._connect(writer))
            self._standing.add(opened[0])
            return opened[0]

        try:
            await self._serve(context, welcome, connect)
        finally:
            for link in opened:
                self._standing.discard(link)
                self._frames_of_past_links += link.frames_sent
