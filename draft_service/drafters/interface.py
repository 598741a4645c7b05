"""One interface for every way to draft.

The speculator drives drafters on the executor thread: it begins a drafting for
each session that wants a proposal, then advances all unfinished draftings
together, one token deeper a call, until each is done or no longer wanted. A
drafting can be read at any time, so a late commit costs one step at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from paceline.types import Acceptance, DraftBudget, NoiseKey, Proposal, SamplingParams


@dataclass(frozen=True)
class DrafterManifest:
    """What a drafter offers and needs."""

    name: str
    needs: str = "nothing"
    feature_layers: tuple[int, ...] = ()
    reduced_vocabulary: bool = False
    trees: bool = False
    deterministic: bool = False
    """Whether q is a point mass (an n-gram match)."""


@dataclass(frozen=True)
class DraftingContext:
    """What a session's draws depend on, and how long it may become; constant while the session is open.

    `max_length` counts tokens, prompt and output; 0: as long as the drafter can hold.
    """

    sampling: SamplingParams
    noise: NoiseKey
    acceptance: Acceptance
    max_length: int = 0


class Drafting(Protocol):
    """A proposal in the making."""

    @property
    def done(self) -> bool:
        """Whether advancing would change nothing."""

    def proposal(self) -> Proposal:
        """What is drafted so far, whole nodes only; may be empty."""


D = TypeVar("D", bound=Drafting)


class Drafter(Protocol[D]):
    """A way to draft; `D` is its own kind of drafting.

    All calls come from one thread; sessions are the speculator's integers.
    """

    @property
    def manifest(self) -> DrafterManifest:
        """Constant."""

    def open(self, session: int, prefix: Sequence[int], context: DraftingContext) -> int:
        """Begin a session; returns how many prefix tokens were reused.

        Raises:
            Overloaded: the KV budget has no room now.
        """

    def commit(self, session: int, token_ids: Sequence[int]) -> None:
        """Append committed tokens; ends the session's drafting, if any."""

    def begin(self, session: int, budget: DraftBudget, proposal_id: int) -> D:
        """Start a proposal that hangs from the last committed token."""

    def advance(self, draftings: Sequence[D]) -> int:
        """Take every drafting at least one node deeper in one batched step; returns the rows computed."""

    def close(self, session: int) -> None:
        """Forget a session; unknown sessions are ignored."""


AnyDrafter = Drafter[Any]
"""A drafter whose kind of drafting the caller need not know; it hands back to each what it began."""
