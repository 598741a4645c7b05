"""The link to one peer and the requests' sessions that travel on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from paceline.protocol.errors import PacelineError
from paceline.protocol.session import Close
from paceline.rpc.frames import InSession
from paceline.rpc.peer_link import PeerLink

Command = TypeVar("Command", bound=InSession)
Event = TypeVar("Event", bound=InSession)
Received = TypeVar("Received", bound=InSession, contravariant=True)


class PeerSession(Protocol[Received]):
    """One request's end of a session. Both methods run on the event loop and must not block."""

    def on_event(self, event: Received) -> None:
        """Handle what the peer sent for this session."""

    def on_lost(self, error: PacelineError) -> None:
        """The link broke, and this session with it."""


class Peer(Generic[Command, Event]):
    """Gives sessions their ids and hands them their events.

    `refuses_until`, on the monotonic clock: it is not asked to take a session before; `refusal` says why.
    `of_others`: sessions that other coordinators have there, as the service said last.
    """

    def __init__(self, link: PeerLink[Command, Event]) -> None:
        self.link = link
        self.refuses_until = 0.0
        self.refusal: PacelineError | None = None
        self.of_others = 0
        self.on_idle: Callable[[], None] = lambda: None
        """Called when the last session has gone."""
        self._sessions: dict[int, PeerSession[Event]] = {}
        link.on_event = self._on_event
        link.on_down = self._on_down

    @property
    def sessions(self) -> int:
        """Sessions of this coordinator."""
        return len(self._sessions)

    @property
    def load(self) -> int:
        """Open sessions of all coordinators there, those that wait among them, as far as is known."""
        return self.sessions + self.of_others

    def attach(self, session: PeerSession[Event]) -> int:
        """Give a session its id on the standing link."""
        session_id = self.link.next_session_id()
        self._sessions[session_id] = session
        return session_id

    def detach(self, session_id: int) -> None:
        """Forget a session and tell the peer, if it can be told."""
        self._sessions.pop(session_id, None)
        if self.link.is_up:
            self.link.send(Close(session_id))  # type: ignore[arg-type]  # every kind of link has Close
        if not self._sessions:
            self.on_idle()

    def _on_event(self, event: Event) -> None:
        session = self._sessions.get(event.session_id)
        if session is not None:
            session.on_event(event)

    def _on_down(self, error: PacelineError) -> None:
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.on_lost(error)
        self.on_idle()
