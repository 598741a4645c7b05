"""Whether anything comes over a link while a round waits for its verdict."""

from __future__ import annotations

import asyncio

from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.target import Round, TargetCommand, TargetEvent
from paceline.rpc.peer_link import PeerLink

TargetLinkLike = PeerLink[TargetCommand, TargetEvent]


class SilenceWatch:
    """Gives a link up that is silent for `timeout_s` while a round waits.

    A target that is only busy (a full queue, a long prompt, a long step) isn't
    silent: it shows life as long as its event loop runs and its engine moves.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, link: TargetLinkLike, round_: Round) -> None:
        """Look from time to time, until `end`, whether anything came over the link."""
        if self._timer is not None and link.silent_s >= self._timeout_s:
            link.drop(self._silent(link, round_))
        else:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self.begin, link, round_)

    def end(self) -> None:
        """The round is answered, or nobody waits for it any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _silent(self, link: TargetLinkLike, round_: Round) -> PeerUnavailable:
        return PeerUnavailable(
            f"{link.name} at {link.address} sent nothing for {self._timeout_s:g} s "
            f"(session {round_.session_id}, base length {round_.base_length})",
            metadata={"peer": link.name, "address": link.address},
        )
