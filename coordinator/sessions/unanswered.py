"""Whether a target is at work on what a request waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.target import Round, TargetCommand, TargetEvent
from paceline.rpc.peer_link import PeerLink

TargetLinkLike = PeerLink[TargetCommand, TargetEvent]


class AnswerWatch:
    """Gives a round up when its target has said nothing of the session for `timeout_s`.

    A target that is only busy (a full queue, a long prompt, a long step) names the session in each of its signs of
    life, however long that lasts. One that has hung, has lost the round or withholds the verdict does not.
    Where the whole link is silent, the target is dead, and the link is dropped; else only this session is lost.

    Args:
        timeout_s: of a session's silence.
        lost: called with the error of a session that is lost on a link that stands.
    """

    def __init__(self, timeout_s: float, lost: Callable[[PeerUnavailable], None]) -> None:
        self._timeout_s = timeout_s
        self._lost = lost
        self._began = self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, link: TargetLinkLike, round_: Round) -> None:
        """Look, until `end`, whether the session is heard of."""
        self._began = self._heard = time.monotonic()
        self._look_in(self._timeout_s, link, round_)

    def heard(self) -> None:
        """The target sent something for the session, or named it."""
        self._heard = time.monotonic()

    def take_worked_s(self) -> float:
        """For how long the target was seen at work on the round, up to the last that was heard; once for each."""
        worked_s, self._began = self._heard - self._began, self._heard
        return worked_s

    def end(self) -> None:
        """The round is answered, or nobody waits for it any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, pause_s: float, link: TargetLinkLike, round_: Round) -> None:
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look, link, round_)

    def _look(self, link: TargetLinkLike, round_: Round) -> None:
        left_s = self._timeout_s - self._unheard_s(link)
        if left_s > 0:
            self._look_in(left_s, link, round_)
        elif link.silent_s >= self._timeout_s:
            link.drop(self._error("sent nothing", link, round_))
        else:
            self._lost(self._error("is not at work on the session and sent nothing for it", link, round_))

    def _unheard_s(self, link: TargetLinkLike) -> float:
        return time.monotonic() - self._heard

    def _error(self, what: str, link: TargetLinkLike, round_: Round) -> PeerUnavailable:
        waited_s = time.monotonic() - self._began
        return PeerUnavailable(
            f"{link.name} at {link.address} {what} for {self._timeout_s:g} s (session {round_.session_id}, "
            f"base length {round_.base_length}, unanswered for {waited_s:.1f} s)",
            metadata={
                "peer": link.name,
                "address": link.address,
                "session": str(round_.session_id),
                "base_length": str(round_.base_length),
                "unanswered_s": f"{waited_s:.1f}",
            },
        )
