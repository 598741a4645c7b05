"""What the schedulers of both services share: the end of sessions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from paceline.protocol.errors import InvalidInput
from paceline.protocol.session import Failure
from paceline.protocol.target import TargetOpen
from paceline.rpc.sessions import ServedSession, SessionOwner, SessionScheduler
from tests.services.harness import target_open


@dataclass
class Owner:
    """Notes what a session's link is told."""

    sent: list[Any] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)

    def send(self, event: Any, *, urgent: bool) -> None:
        self.sent.append(event)

    def forget(self, session_id: int) -> None:
        self.forgotten.append(session_id)


class Sessions(SessionScheduler[ServedSession]):
    """A scheduler that only notes what it releases."""

    opens = TargetOpen
    queue_length = 0
    costs = None

    def __init__(self) -> None:
        super().__init__(max_sessions_per_link=8)
        self.released: list[int] = []
        self.owner = Owner()

    def open(self, owner: SessionOwner, command: TargetOpen) -> ServedSession:
        session = ServedSession(next(self._keys), command.session_id, owner, command.spec)
        self._add(session)
        return session

    def opened(self, session_id: int, time_left_ms: int | None = None) -> ServedSession:
        return self.open(self.owner, target_open(session_id, (1, 2), time_left_ms=time_left_ms))

    def handle(self, session: ServedSession, command: Any) -> None:
        raise AssertionError(f"no command comes here: {command}")

    async def run(self) -> None:
        """It has no steps."""

    def _release(self, session: ServedSession) -> None:
        self.released.append(session.id)


async def test_a_session_is_released_once_and_the_service_is_idle_without_sessions() -> None:
    sessions = Sessions()
    first, second = sessions.opened(7), sessions.opened(8)
    assert first.key != second.key
    sessions.close(first)
    sessions.close(first)
    assert (sessions.released, sessions.sessions) == ([7], 1)
    waiting = asyncio.ensure_future(sessions.idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    sessions.close(second)
    await asyncio.wait_for(waiting, 1)
    assert not sessions.owner.sent, "the other side closed them"


async def test_a_session_fails_once_and_its_link_is_told() -> None:
    sessions = Sessions()
    session = sessions.opened(7)
    for _ in range(2):
        sessions._fail(session, InvalidInput.of("rows", 9, "at most 8"))
    (failure,) = sessions.owner.sent
    assert isinstance(failure, Failure)
    assert (failure.session_id, failure.reason, failure.session_closed) == (7, "INVALID_INPUT", True)
    assert (sessions.owner.forgotten, sessions.released) == ([7], [7])
