"""The proposals that were left with a target for outcomes of the round in flight."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.protocol.errors import ProtocolMismatch
from paceline.protocol.proposal import Outcome, Proposal
from paceline.protocol.target import Round, SelfStarted


class PrefetchedProposals:
    """The prefetched proposals of one round at a time.

    The proposal for an outcome may only grow, since the target may be about to start it and reports only how many of
    its nodes it started. So these nodes are known to be the ones that the target's draws belong to.
    """

    def __init__(self) -> None:
        self._proposals: dict[Outcome, Proposal] = {}

    def __bool__(self) -> bool:
        return bool(self._proposals)

    def clear(self) -> None:
        """Drop all proposals, since another round is in flight."""
        self._proposals = {}

    def grow(self, proposals: Mapping[Outcome, Proposal]) -> dict[Outcome, Proposal]:
        """Add the proposals that extend what was left for their outcomes, and return them."""
        new_proposals = {
            outcome: each for outcome, each in proposals.items() if each.extends(self._proposals.get(outcome))
        }
        self._proposals |= new_proposals
        return new_proposals

    def find_started(self, round_: Round, outcome: Outcome, self_started: SelfStarted) -> Proposal | None:
        """The proposal of the round after `round_`, which the target has started by itself.

        Raises:
            ProtocolMismatch: no such proposal was left with the target.
        """
        own_proposal = self._proposals.get(outcome)
        subject = f"session {round_.session_id}: the target started round {self_started.base_length} by itself"
        if own_proposal is None or self_started.nodes > len(own_proposal):
            nodes = len(own_proposal or ())
            raise ProtocolMismatch(
                f"{subject} with {self_started.nodes} nodes for {outcome}, {nodes} were prefetched for it"
            )
        next_round = round_.behind(outcome, own_proposal.first(self_started.nodes))
        if next_round.base_length != self_started.base_length:
            raise ProtocolMismatch(f"{subject} behind {outcome}, expected {next_round.base_length}")
        return next_round.proposal
