"""Proposals by the outcome that they answer, for one round: here, and those that were left with the target.

A key is exact: base length, accepted node and next token of the round that
ends. A commit drops every proposal for another outcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from paceline.protocol.errors import ProtocolMismatch
from paceline.protocol.proposal import Outcome, Proposal
from paceline.protocol.target import Round, SelfStarted

MAX_ENTRIES = 256
Entry = TypeVar("Entry")


class SpeculationCache(Generic[Entry]):
    """A bounded cache. When it is full new proposals are dropped, since the likeliest come first."""

    def __init__(self) -> None:
        self._entries: dict[Outcome | None, Entry] = {}
        self._expected_outcome: Outcome | None = None
        self._base_length = -1

    def expect(self, outcome: Outcome | None) -> None:
        """Keep only the proposal for the outcome that has come, if it is there."""
        self._expected_outcome = outcome
        self._base_length = -1 if outcome is None else outcome.base_length
        entry = self._entries.get(outcome)
        self._entries = {} if entry is None else {outcome: entry}

    def get(self, outcome: Outcome | None) -> Entry | None:
        """The entry for an outcome; it stays in the cache."""
        return self._entries.get(outcome)

    def put(self, outcome: Outcome | None, entry: Entry) -> bool:
        """Store a proposal in place of a shorter one for the same outcome.

        A proposal for a round before the expected outcome is stale and dropped. Returns whether it is the proposal
        for the expected outcome.
        """
        stale = outcome != self._expected_outcome and (outcome is None or outcome.base_length <= self._base_length)
        full = len(self._entries) >= MAX_ENTRIES and outcome not in self._entries
        if stale or full:
            return False
        self._entries[outcome] = entry
        return outcome == self._expected_outcome

    def entries_of(self, base_length: int) -> Iterator[tuple[Outcome, Entry]]:
        """The entries for outcomes of a round, in the order in which they began to come: the likeliest first.

        Entries that are dropped during the iteration are left out.
        """
        for outcome, entry in [*self._entries.items()]:
            if outcome is not None and outcome.base_length == base_length and outcome in self._entries:
                yield outcome, entry

    def clear(self) -> None:
        """Drop every proposal."""
        self._entries = {}

    def take(self) -> Entry | None:
        """Remove and return the proposal for the expected outcome, if it is there."""
        return self._entries.pop(self._expected_outcome, None)


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
        """The proposal of the round after `round_`, which the target has started by itself; None: it has none.

        Raises:
            ProtocolMismatch: no such proposal was left with the target.
        """
        own_proposal = self._proposals.get(outcome) if self_started.nodes else None
        subject = f"session {round_.session_id}: the target started round {self_started.base_length} by itself"
        if self_started.nodes > (nodes := len(own_proposal or ())):
            raise ProtocolMismatch(
                f"{subject} with {self_started.nodes} nodes for {outcome}, {nodes} were prefetched for it"
            )
        next_round = round_.behind(outcome, own_proposal and own_proposal.first(self_started.nodes))
        if next_round.base_length != self_started.base_length:
            raise ProtocolMismatch(f"{subject} behind {outcome}, expected {next_round.base_length}")
        return next_round.proposal
