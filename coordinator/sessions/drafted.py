"""What a request's draft session gives to a round, and what it is told behind one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.sessions.redrawing import Mistake
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import Outcome, Proposal
from paceline.protocol.records import StepTimings

MAX_PENDING_TOKENS = 16
"""Committed tokens that are kept from the draft service during a lease; with more it would have to catch up. A step
of 16 rows takes the larger draft 5 ms a token, one of a single row 53 (`2026-11-23-a-draft-says-its-shadow`)."""


@dataclass(frozen=True)
class Drafted:
    """What a round gets to verify.

    `hit`: it was drafted for this outcome before the outcome was known.
    `miss`: outcomes were drafted for, but not this one, or not in time.
    `first`: it is the first one of its session, which had to compute the text before it.
    `mistake`: a token of it that was redrawn.
    """

    proposal: Proposal | None = None
    hit: bool = False
    miss: bool = False
    first: bool = False
    mistake: Mistake | None = None
    timings: StepTimings = field(default_factory=StepTimings)


NOTHING = Drafted()


@dataclass(frozen=True)
class PendingCommit:
    """Committed tokens that the draft service does not know yet, the last ones of `committed`.

    `outcome` is that of their last round. `awaited`: the service drafts for that round's outcomes, so the commit must
    be of that round alone.
    """

    outcome: Outcome
    token_ids: tuple[int, ...]
    committed: Sequence[int]
    budget: DraftBudget
    traceparent: str
    awaited: bool

    @property
    def must_leave(self) -> bool:
        """Whether it must not wait for what the next rounds commit."""
        return self.awaited or len(self.token_ids) >= MAX_PENDING_TOKENS

    def after(self, before: PendingCommit | None) -> PendingCommit:
        """One commit of the tokens before these, and these; with their shadow if it was wanted of any."""
        if before is None:
            return self
        budget = replace(self.budget, shadow=self.budget.shadow or before.budget.shadow)
        return replace(self, token_ids=before.token_ids + self.token_ids, budget=budget)
