"""What a draft session is told of its request and of a round, and the proposal that it has for the next one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.drafting.redrawing import Mistake
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import Acceptance, Outcome, Proposal
from paceline.protocol.records import StepTimings
from paceline.protocol.sampling import NoiseKey
from paceline.protocol.session import SessionSpec

MAX_PENDING_TOKENS = 16
"""Most committed tokens that the draft service has not got yet during a lease; with more it would have to catch up. A
step of 16 rows takes the larger draft 5 ms a token, one of a single row 53 (`2026-11-23-a-draft-says-its-shadow`)."""


class DraftedRequest(Protocol):
    """What a draft session has to know of its request."""

    @property
    def noise(self) -> NoiseKey:
        """The key of the target's draws."""

    @property
    def acceptance(self) -> Acceptance:
        """The rule that decides its rounds."""

    @property
    def tenant(self) -> str:
        """As `SessionSpec.tenant`."""

    def spec(self, committed: Iterable[int], traceparent: str) -> SessionSpec:
        """The specification of a session that goes on behind the committed tokens."""


@dataclass(frozen=True)
class RoundDraft:
    """The proposal that a round gets to verify, if there is one.

    `hit`: it was drafted for this outcome before the outcome was known.
    `miss`: proposals were drafted for other outcomes, or came too late.
    `mistake`: its first token that was redrawn.
    `lease`: rounds after this one that the target may start by itself.
    `drafts_ahead`: the draft service prepares proposals for the round's outcomes.
    `mode`: as in `RoundRecord`.
    """

    proposal: Proposal | None = None
    hit: bool = False
    miss: bool = False
    mistake: Mistake | None = None
    timings: StepTimings = field(default_factory=StepTimings)
    lease: int = 0
    drafts_ahead: bool = False
    mode: str = ""


NOTHING = RoundDraft()


@dataclass(frozen=True)
class PendingCommit:
    """Committed tokens that the draft service does not know yet, the last ones of `committed`.

    `outcome` is that of their last round. `is_awaited` says that the service drafts for that round's outcomes: then
    the commit must be of that round alone.
    """

    outcome: Outcome
    token_ids: tuple[int, ...]
    committed: Sequence[int]
    budget: DraftBudget
    traceparent: str
    is_awaited: bool

    @property
    def must_leave(self) -> bool:
        """Whether it must be sent now, and not together with the tokens of the next rounds."""
        return self.is_awaited or len(self.token_ids) >= MAX_PENDING_TOKENS

    def join_to(self, earlier: PendingCommit | None) -> PendingCommit:
        """One commit of the tokens of an earlier one and of these; with their shadow if either asks for it."""
        if earlier is None:
            return self
        budget = replace(self.budget, shadow=self.budget.shadow or earlier.budget.shadow)
        return replace(self, token_ids=earlier.token_ids + self.token_ids, budget=budget)
