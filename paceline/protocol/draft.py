"""Messages between coordinator and draft service."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.features import Features
from paceline.protocol.proposal import Outcome, Proposal
from paceline.protocol.records import StepTimings
from paceline.protocol.session import Close, Failure, SessionSpec

MAX_SHADOW_TOKENS = 1024
"""Of one message."""


@dataclass(frozen=True)
class DraftBudget:
    """What a proposal may cost; `max_tokens` 0 asks for none.

    `tree_widths` make a static tree. Without them more `max_nodes` than `max_tokens` make a dynamic one. `fan_out` is
    the number of outcomes to draft for behind each node while a round is verified. `shadow` asks the service to keep
    the session's rows current and to send the `Shadow` of the tokens that the commit brings. `least_chance` ends a
    chain or dynamic tree that is drafted just in time before the first node that is less likely to be reached. It has
    a meaning under coupled acceptance only.
    """

    max_tokens: int = 0
    tree_widths: tuple[int, ...] = ()
    max_nodes: int = 0
    fan_out: int = 0
    deadline_ms: int | None = None
    shadow: bool = False
    least_chance: float = 0.0


@dataclass(frozen=True)
class DraftOpen:
    """Opens a session on the draft service and asks for the first proposal.

    `takes_shadows`: whether the coordinator knows `Shadow`.
    """

    session_id: int
    spec: SessionSpec
    drafter: str = ""
    budget: DraftBudget = DraftBudget()
    takes_shadows: bool = False


@dataclass(frozen=True)
class Commit:
    """A round ended: `token_ids` follow the `committed_length` tokens before them."""

    session_id: int
    outcome: Outcome
    token_ids: tuple[int, ...]
    committed_length: int
    budget: DraftBudget = DraftBudget()
    traceparent: str = ""


@dataclass(frozen=True)
class Verifying:
    """The proposal that was sent to the target: by id and node count, inline, or none.

    `budget` holds for the proposal of each outcome.
    """

    session_id: int
    base_length: int
    proposal_id: int = 0
    node_count: int = 0
    proposal: Proposal | None = None
    budget: DraftBudget = DraftBudget()


@dataclass(frozen=True)
class DraftOpened:
    """The draft service serves the session with `drafter`."""

    session_id: int
    drafter: str
    reused_tokens: int = 0


@dataclass(frozen=True)
class DraftedProposal:
    """A proposal and the outcome that it answers; `outcome` None answers the open.

    A proposal for an outcome that is not known yet is sent again, longer, under the same id whenever it has grown.
    """

    session_id: int
    outcome: Outcome | None
    proposal: Proposal
    timings: StepTimings = StepTimings()


@dataclass(frozen=True)
class Shadow:
    """The ranks that the committed tokens from `first_position` on have in the drafter's own order.

    Rank 1 is its first choice, 0 a token that is not among those it ranked. Coupled acceptance: ranks in the race
    of q under the shared noise, and q of the first choice. Rejection and block acceptance: ranks by q alone, and q
    of the token itself.
    """

    session_id: int
    first_position: int
    ranks: tuple[int, ...]
    probabilities: tuple[float, ...]

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.first_position + len(self.ranks)


DraftCommand = DraftOpen | Commit | Verifying | Features | Close
DraftEvent = DraftOpened | DraftedProposal | Shadow | Failure
