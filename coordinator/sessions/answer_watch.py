"""A watch over a round in flight: it notices a target that no longer works for the session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.target import Round, TargetCommand, TargetEvent
from paceline.rpc.peer_link import PeerLink
from paceline.runtime import clock

TargetLinkLike = PeerLink[TargetCommand, TargetEvent]


class AnswerWatch:
    """Gives a round up when its target has sent nothing for the session for `timeout_s`.

    A busy target (a full queue, a long prompt, a long step) names the session in each of its signs of life, however
    long that lasts. A target that hangs, has lost the round or withholds the verdict does not. Where the whole link
    is silent, the target is dead and the link is dropped. Otherwise only this session is lost.

    Args:
        timeout_s: longest silence about a session, seconds.
        on_lost: called with an error when the session is lost and the link is not.
    """

    def __init__(self, timeout_s: float, on_lost: Callable[[PeerUnavailable], None]) -> None:
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._began_at = self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, link: TargetLinkLike, round_: Round) -> None:
        """Watch a round until `end`."""
        self._began_at = self._heard_at = clock.now()
        self._look_in(self._timeout_s, link, round_)

    def note_sign(self) -> None:
        """Note that the target sent something for the session, or named it in a sign of life."""
        self._heard_at = clock.now()

    def take_worked_s(self) -> float:
        """Seconds up to the latest sign in which the target worked on the round. A second call counts from there."""
        worked_s, self._began_at = self._heard_at - self._began_at, self._heard_at
        return worked_s

    def end(self) -> None:
        """Stop watching: the round is answered, or nobody waits for it any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, pause_s: float, link: TargetLinkLike, round_: Round) -> None:
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look, link, round_)

    def _look(self, link: TargetLinkLike, round_: Round) -> None:
        left_s = self._timeout_s - self._silence_s(link)
        if left_s > 0:
            self._look_in(left_s, link, round_)
        elif link.silent_s >= self._timeout_s:
            link.drop(self._error("sent nothing", link, round_))
        else:
            self._on_lost(self._error("is not at work on the session and sent nothing for it", link, round_))

    def _silence_s(self, link: TargetLinkLike) -> float:
        return clock.now() - self._heard_at

    def _error(self, what: str, link: TargetLinkLike, round_: Round) -> PeerUnavailable:
        waited_s = clock.now() - self._began_at
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
