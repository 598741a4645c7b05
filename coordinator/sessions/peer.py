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
ReceivedEvent = TypeVar("ReceivedEvent", bound=InSession, contravariant=True)


class PeerSession(Protocol[ReceivedEvent]):
    """One request's end of a session. Both methods run on the event loop and must not block."""

    def on_event(self, event: ReceivedEvent) -> None:
        """Handle what the peer sent for this session."""

    def on_lost(self, error: PacelineError) -> None:
        """The link broke, and this session with it."""


class Peer(Generic[Command, Event]):
    """Gives sessions their ids and hands them their events.

    `refuses_until`: until then, on the monotonic clock, the peer gets no new session; `refusal` is the reason.
    `foreign_sessions`: the number of sessions of other coordinators, as the service stated last.
    """

    def __init__(self, link: PeerLink[Command, Event]) -> None:
        self.link = link
        self.refuses_until = 0.0
        self.refusal: PacelineError | None = None
        self.foreign_sessions = 0
        self.on_idle: Callable[[], None] = lambda: None
        """Called when the last session has gone."""
        self._sessions: dict[int, PeerSession[Event]] = {}
        link.on_event = self._on_event
        link.on_down = self._on_down

    @property
    def sessions(self) -> int:
        """The number of this coordinator's sessions."""
        return len(self._sessions)

    @property
    def load(self) -> int:
        """The number of all coordinators' sessions as far as it is known, including those that wait."""
        return self.sessions + self.foreign_sessions

    def attach(self, session: PeerSession[Event]) -> int:
        """Give a session its id on the standing link."""
        session_id = self.link.next_session_id()
        self._sessions[session_id] = session
        return session_id

    def detach(self, session_id: int) -> None:
        """Forget a session, and close it on the peer if the link is up."""
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
