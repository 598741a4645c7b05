"""The n-gram drafter: what followed the same tokens before. No model, point-mass q."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.drafters.interface import DrafterManifest, DraftingContext
from draft_service.drafters.names import NGRAM
from draft_service.drafters.shape import TreeBuilder, shape_of
from paceline.ngram import NgramIndex
from paceline.types import Acceptance, DraftBudget, Proposal, SparseDistribution, Verifying


@dataclass
class _Session:
    index: NgramIndex
    context: DraftingContext


@dataclass(frozen=True)
class NgramDrafting:
    """A proposal that was made at once."""

    made: Proposal

    @property
    def done(self) -> bool:  # noqa: D102
        return True

    def proposal(self) -> Proposal:  # noqa: D102
        return self.made


class NgramDrafter:
    """Suffix matches over prompt and output, per session; `Drafter` says what its methods promise."""

    manifest = DrafterManifest(NGRAM, trees=True, deterministic=True)

    def __init__(self) -> None:
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, prefix: Sequence[int], context: DraftingContext) -> int:  # noqa: D102
        self._sessions[session] = _Session(NgramIndex(prefix), context)
        return 0

    def commit(self, session: int, token_ids: Sequence[int]) -> None:  # noqa: D102
        self._sessions[session].index.extend(token_ids)

    def begin(self, session: int, budget: DraftBudget, proposal_id: int) -> NgramDrafting:  # noqa: D102
        state = self._sessions[session]
        shape = shape_of(budget, state.context.acceptance)
        nodes = TreeBuilder(shape)
        for path in state.index.propose_many(shape.width(1), shape.max_depth):
            nodes.add_path(path)
        coupled = state.context.acceptance is Acceptance.COUPLED
        token_ids = tuple(nodes.token_ids)
        supports = () if coupled else tuple(SparseDistribution((token,), (1.0,)) for token in token_ids)
        return NgramDrafting(
            Proposal(proposal_id, token_ids, (1.0,) * len(token_ids), tuple(nodes.parents), supports, NGRAM)
        )

    def speculate(self, session: int, verifying: Verifying, next_id: Callable[[], int]) -> None:
        """A look-up after the commit is as fast as a proposal made ahead."""

    def advance(self, draftings: Sequence[NgramDrafting], speculations: Sequence[None] = ()) -> int:  # noqa: D102
        return 0

    def close(self, session: int) -> None:  # noqa: D102
        self._sessions.pop(session, None)
