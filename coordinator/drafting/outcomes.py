"""What may be prefetched for the outcomes of the round in flight: as much of each proposal as is worth verifying."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from coordinator.drafting.settings import RequestedDrafting
from coordinator.policy.plan import Plan
from coordinator.policy.planner import RequestPlanner
from coordinator.text.matches import Matches
from paceline.protocol.proposal import COPYING, MAX_PROPOSAL_NODES, Outcome, Proposal
from paceline.protocol.target import Round
from paceline.sampling.match import Match

PreparedProposals = Callable[[Round], Iterator[tuple[Outcome, Proposal]]]
"""Proposals that were drafted for the outcomes of a round, the likeliest first."""


@dataclass(frozen=True)
class PrefetchCandidate:
    """A proposal that may be prefetched for an outcome of the round in flight; `grows`: it may become longer."""

    outcome: Outcome
    proposal: Proposal
    grows: bool


@dataclass(frozen=True)
class OutcomeProposals:
    """The proposals for the outcomes of one round in flight.

    Attributes:
        round_: the round.
        plan: its plan.
        proposal_id: of a proposal that copies a match.
        was_sent: whether the coordinator sent the round; else the target started it.
        room, rows_left: tokens that the text may still have, and rows that the target has for it.
        settings, planner, matches: of the request.
        list_prepared: lists the draft service's proposals.
    """

    round_: Round
    plan: Plan
    proposal_id: int
    was_sent: bool
    room: int
    rows_left: int
    settings: RequestedDrafting
    planner: RequestPlanner
    matches: Matches
    list_prepared: PreparedProposals

    @property
    def most(self) -> int:
        """Most proposals to prefetch; 0: there are none."""
        return self.settings.max_prefetched if self.copies or self.drafts_ahead else 0

    @property
    def drafts_ahead(self) -> bool:
        """Whether the draft service prepares proposals."""
        return self.plan.ahead.fan_out > 0

    @property
    def copies(self) -> bool:
        """Whether the round copies a match, or the next one may: then there is something to prefetch at once."""
        proposal = self.round_.proposal
        return self.matches.best is not None and (proposal is None or proposal.drafter in COPYING)

    def due_ms(self, since_verdict_ms: float) -> float:
        """Milliseconds until a message to the target is expected to miss the verdict of the round.

        The others of the step are taken to propose nothing: what comes too late is lost where the target goes on.
        Called when the round has left, or `since_verdict_ms` after the verdict with which the target started it.
        """
        proposal = self.round_.proposal
        if (target := self.planner.target) is None:
            return 0.0
        step_ms = target.steps()(target.sessions + (len(proposal) if proposal else 0))
        return step_ms if self.was_sent else max(0.0, step_ms - target.send_ms.value) - since_verdict_ms

    def candidates(self, *, growing: bool) -> Iterator[PrefetchCandidate]:
        """The proposals that are worth verifying, the likeliest first; `growing`: those that may yet grow, too."""
        match = self._match_candidate()
        if match is not None:
            yield match
        longest = max(self.plan.ahead.max_tokens, self.plan.ahead.max_nodes)
        for outcome, prepared in islice(self.list_prepared(self.round_), self.settings.max_prefetched):
            grows = len(prepared) < longest
            if (grows and not growing) or (match is not None and outcome == match.outcome):
                continue
            proposal = prepared.within(self._room(outcome)).first(self.rows_left - self._accepted(outcome) - 1)
            fixed = self.settings.tokens is not None
            nodes = len(proposal) if fixed else self.planner.worth_verifying(proposal)
            if nodes:
                yield PrefetchCandidate(outcome, proposal.first(nodes), grows)

    def _match_candidate(self) -> PrefetchCandidate | None:
        """The match's continuation after the round, for the outcome that follows the match."""
        if not self.copies:
            return None
        candidate = self.matches.prefetch_proposal(self.proposal_id, self.round_, self._match_nodes)
        return None if candidate is None else PrefetchCandidate(*candidate, grows=False)

    def _match_nodes(self, match: Match, k: int, outcome: Outcome) -> int:
        """How far to follow a match after a round that has its first k tokens."""
        room = self._room(outcome)
        if self.settings.tokens is not None:
            return min(room, self.settings.tokens) if k else 0
        return self.planner.worth_copying(match.advance(k + 1), room, ends_lease=not k)

    def _room(self, outcome: Outcome) -> int:
        """Most tokens of a proposal for an outcome."""
        return max(0, min(self.room - self._accepted(outcome) - 2, MAX_PROPOSAL_NODES))

    def _accepted(self, outcome: Outcome) -> int:
        """Nodes that an outcome accepts."""
        return len(self.round_.proposal.path(outcome.node)) if self.round_.proposal else 0
