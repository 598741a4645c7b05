"""The proposals that were left with a target for outcomes of the round in flight, and which of them it started."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.protocol.errors import ProtocolMismatch
from paceline.protocol.proposal import Outcome, Proposal
from paceline.protocol.target import Round, SelfStarted


class LeftProposals:
    """Of one round at a time.

    What was left for an outcome may only grow: the target may be about to start any of it, and tells of it no more
    than how many nodes it started. What it then draws behind them was drawn for no other tokens.
    """

    def __init__(self) -> None:
        self._proposals: dict[Outcome, Proposal] = {}

    def __bool__(self) -> bool:
        return bool(self._proposals)

    def clear(self) -> None:
        """Another round is in flight."""
        self._proposals = {}

    def grow(self, proposals: Mapping[Outcome, Proposal]) -> dict[Outcome, Proposal]:
        """Take in those that begin with what was left for their outcomes, and return them."""
        grown = {outcome: each for outcome, each in proposals.items() if each.extends(self._proposals.get(outcome))}
        self._proposals |= grown
        return grown

    def started(self, round_: Round, outcome: Outcome, self_started: SelfStarted) -> Proposal | None:
        """What a target verifies that started the round behind `round_` by itself.

        Raises:
            ProtocolMismatch: nothing of the kind was left with it.
        """
        left = self._proposals.get(outcome)
        begun = f"session {round_.session_id}: the target started round {self_started.base_length} by itself"
        if left is None or self_started.nodes > len(left):
            raise ProtocolMismatch(
                f"{begun} with {self_started.nodes} nodes for {outcome}, {len(left or ())} were prefetched for it"
            )
        followed = round_.behind(outcome, left.first(self_started.nodes))
        if followed.base_length != self_started.base_length:
            raise ProtocolMismatch(f"{begun} behind {outcome}, expected {followed.base_length}")
        return followed.proposal
