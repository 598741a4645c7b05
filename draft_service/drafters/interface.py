"""One interface for every way to draft.

The scheduler drives drafters on the executor's thread. A session waits for a
proposal (a draft), or prepares for the outcomes of the round that is being
verified (a speculation), or rests. All unfinished work advances together, one
step per call, until it is done or dropped. A proposal can be read at any time, so
a late commit costs one step at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from draft_service.drafters.shadow import ShadowRun
from paceline.costs.cost_line import CostLine
from paceline.engine.features import FeatureRows
from paceline.protocol.draft import DraftBudget, Verifying
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline.protocol.proposal import Proposal
from paceline.protocol.session import SessionSpec
from paceline.sampling.processors import Follower


@dataclass(frozen=True)
class DrafterManifest:
    """A drafter's name, and the hidden states of the target that it reads; with a need it is a `FeatureDrafter`."""

    name: str
    need: FeatureNeed = NO_FEATURES


@dataclass(frozen=True)
class PreparedProposal:
    """A proposal for the outcome (`node`, `next_token`) of the round that is being verified."""

    node: int
    next_token: int
    proposal: Proposal


class Draft(Protocol):
    """A proposal in the making."""

    @property
    def done(self) -> bool:
        """Whether advancing would change nothing."""

    def proposal(self) -> Proposal:
        """The proposal as far as it is drafted, in whole nodes; may be empty."""


class Speculating(Protocol):
    """The proposals for one round's outcomes, in the making."""

    @property
    def done(self) -> bool:
        """Whether advancing would change nothing."""

    def take_grown(self) -> list[PreparedProposal]:
        """The proposals that have grown since the last call, at least one node each.

        A proposal keeps its id as it grows, and the earlier nodes are a prefix
        of the later ones. Its tokens are those that `begin` would give after
        the outcome, up to its length.
        """


class CatchingUp(Protocol):
    """The rows of committed tokens, in the making."""

    @property
    def done(self) -> bool:
        """Whether advancing would change nothing."""


D = TypeVar("D", bound=Draft)
S = TypeVar("S", bound=Speculating)
C = TypeVar("C", bound=CatchingUp)


class Drafter(Protocol[D, S, C]):
    """A way to draft; `D`, `S` and `C` are its own kinds of draft, speculation and catching up.

    All calls come from one thread; sessions are numbered by the scheduler.
    """

    @property
    def manifest(self) -> DrafterManifest:
        """Constant."""

    @property
    def line(self) -> CostLine:
        """The cost line of steps that are waited for, without rows of prefixes; may be read on any thread."""

    @property
    def line_beside(self) -> CostLine:
        """The same of steps that draft for outcomes, beside the target's; unknown until there were any."""

    def open(self, session: int, spec: SessionSpec, follower: Follower | None = None) -> int:
        """Begin a session, and return how many prefix tokens were reused.

        Args:
            session: its number.
            spec: of the session, as the target has it.
            follower: of its grammar; None: it has none, or none that can be followed here.

        Raises:
            Overloaded: the KV budget has no room now.
        """

    def commit(self, session: int, token_ids: Sequence[int], *, shadow: bool = False) -> None:
        """Append committed tokens; ends the session's draft, speculation or catching up, if any.

        `shadow`: rows of them that are computed from now on get a shadow, too.
        """

    def take_shadow(self, session: int) -> Sequence[ShadowRun]:
        """The shadow of committed tokens that has become known since the last call; empty for an unknown session."""

    def begin(self, session: int, budget: DraftBudget, proposal_id: int) -> D:
        """Start a proposal that hangs from the last committed token."""

    def speculate(self, session: int, verifying: Verifying, next_id: Callable[[], int]) -> S | None:
        """Start to prepare for the outcomes of a round; ends the session's draft, if any.

        A `proposal_id` in `verifying` names the proposal begun after the last
        commit or, if none was, the one prepared for that commit's outcome.
        `next_id` makes ids for the new ones. None: the drafter prepares nothing.
        """

    def catch_up(self, session: int) -> C | None:
        """Start to compute the rows of committed tokens that are missing. None: the drafter computes none."""

    def advance(self, drafts: Sequence[D], speculations: Sequence[S] = (), catching_up: Sequence[C] = ()) -> int:
        """Take every draft at least one node deeper in one batched step, and return the number of rows computed.

        Rows that the step has to spare go to the sessions that catch up, in their order, and to the most
        probable nodes of all speculations.
        """

    def close(self, session: int) -> None:
        """Forget a session; unknown sessions are ignored."""


@runtime_checkable
class FeatureDrafter(Protocol):
    """A drafter that reads the target's hidden states, which come after the commits of their tokens."""

    def take_features(self, session: int, first_position: int, rows: FeatureRows) -> None:
        """Take the features of committed tokens from `first_position` on, as the manifest's need says.

        They come in order. Some rows may never come, and those of a session may end at any time.

        Raises:
            InvalidInput: rows of another width; the session fails.
        """


AnyDrafter = Drafter[Any, Any, Any]
"""A drafter of any kind. Its callers hand drafts, speculations and catch-ups back without looking into them."""
