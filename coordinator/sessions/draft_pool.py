"""The draft services of a coordinator."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.sessions.peer import Peer
from coordinator.sessions.pool import Pool
from paceline.costs.service_costs import DraftCosts
from paceline.protocol.draft import Commit, DraftCommand, DraftEvent, Verifying


class DraftPeer(Peer[DraftCommand, DraftEvent]):
    """The link to a draft service."""

    @property
    def costs(self) -> DraftCosts:
        """What the draft service's steps take, as it said last; an unknown line where it said nothing."""
        costs: DraftCosts = self.link.costs
        return costs

    def send(self, command: DraftCommand) -> None:
        """Queue a command; raises `PeerUnavailable` when the link is down."""
        self.link.send(command, urgent=isinstance(command, Commit | Verifying))


class DraftPool(Pool[DraftPeer]):
    """The draft services, of one or several drafters, and how long a round may wait for one."""

    def __init__(self, peers: Iterable[DraftPeer] = (), *, timeout_s: float, vocab_size: int) -> None:
        super().__init__("draft", peers)
        self.timeout_s = timeout_s
        self.vocab_size = vocab_size
