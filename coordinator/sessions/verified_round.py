"""A round with its verdict, and what the target does next."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.sessions.target_pool import TargetPeer
from paceline.protocol.proposal import Proposal
from paceline.protocol.target import Round, Verdict


@dataclass(frozen=True)
class VerifiedRound:
    """A round, its verdict, and whether the target started it by itself."""

    round_: Round
    verdict: Verdict
    self_started: bool


@dataclass(frozen=True)
class TargetNext:
    """What the target does after the round that was decided last.

    Attributes:
        leased_rounds: the number of next rounds that it may have started by itself; they can't carry a proposal.
        self_started: the proposal with which it has started the next round.
        can_prefetch: whether it takes prefetched proposals.
        peer: the target.
    """

    leased_rounds: int = 0
    self_started: Proposal | None = None
    can_prefetch: bool = False
    peer: TargetPeer | None = None
