"""What the draft service is still to be told of committed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import Outcome

MAX_PENDING_TOKENS = 16
"""Committed tokens that are kept from the draft service during a lease; with more it would have to catch up."""


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
        """One commit of the tokens before these, and these."""
        return self if before is None else replace(self, token_ids=before.token_ids + self.token_ids)
