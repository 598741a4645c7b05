"""The model drafter: a causal language model that shares the target's tokenizer.

Coupled: it races the same noise as the target (`exactness` §1a), so its best
guesses are the best of its own perturbed ranking, and a node's children are the
m best of one race. Rejection and block: it draws from exactly the float32
values that it sends, with the round key of the round that will carry them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.interface import DrafterManifest, DraftingContext
from draft_service.drafters.kv import DraftKV
from draft_service.drafters.names import MODEL
from draft_service.drafters.shape import Shape, TreeBuilder, shape_of
from paceline.engine.interface import Engine, Logits, StepItem, StepPlan
from paceline.errors import InvalidInput
from paceline.noise import Stream, race, race_best
from paceline.sampling import probabilities, processed_scores, sparse_support, support_scores
from paceline.types import (
    MAX_PROPOSAL_NODES,
    ROOT,
    Acceptance,
    DraftBudget,
    Proposal,
    SparseDistribution,
)

SHORT_LAG = MAX_PROPOSAL_NODES + 1
"""A lag that one round can leave is caught up at once; prefixes and longer ones wait their turn."""

Scores = NDArray[np.float32]


class ModelDrafting:
    """A proposal in the making; grows one depth with each row of logits that it is given."""

    def __init__(
        self, name: str, proposal_id: int, kv: DraftKV, context: DraftingContext, shape: Shape, vocab_size: int
    ) -> None:
        self.kv = kv
        self._name = name
        self._proposal_id = proposal_id
        self._context = context
        self._shape = shape
        self._vocab_size = vocab_size
        self._first_position = len(kv.committed)
        self._tree = TreeBuilder(shape)
        self._probabilities: list[float] = []
        self._supports: list[SparseDistribution] = []
        self._depth = 0
        self._frontier = [ROOT]

    @property
    def done(self) -> bool:
        """Whether no node can be added."""
        return not self._frontier or self._depth >= self._shape.max_depth or self._tree.full

    def proposal(self) -> Proposal:
        """What is drafted so far."""
        tree = self._tree
        return Proposal(
            self._proposal_id,
            tuple(tree.token_ids),
            tuple(self._probabilities),
            tuple(tree.parents),
            tuple(self._supports),
            self._name,
        )

    @property
    def lag(self) -> int:
        """Committed rows to compute before the root's children can be drawn; 0 once they are being drawn."""
        return 0 if self._depth else self.kv.lag

    def next_item(self, rows: int) -> StepItem:
        """What to compute next: `rows` of the lag, or the frontier's rows."""
        lag = self.lag
        if lag:
            return self.kv.catch_up(rows, logits=rows == lag)
        return self.kv.extend(self._tree.token_ids, self._tree.parents, self._frontier)

    def grow(self, logits: Logits) -> None:
        """Add the children of every frontier node; logits [len(frontier), V]."""
        scores = processed_scores(logits, self._context.sampling)
        self._depth += 1
        grown: list[int] = []
        for node, row in zip(self._frontier, scores, strict=True):
            grown.extend(self._add_children(node, row))
        self._frontier = grown

    def _add_children(self, parent: int, scores: Scores) -> list[int]:
        if self._context.acceptance is not Acceptance.COUPLED:
            support = sparse_support(scores)
            drawn = self._draw_from(support)
            self._supports.append(support)
            return self._add(parent, (drawn,), (support.probability(drawn),))
        width = self._shape.width(self._depth)
        position = self._first_position + self._depth - 1
        drawn_ids = race_best(scores, width, self._context.noise, Stream.DRAFT, position)
        q = probabilities(scores)
        return self._add(parent, drawn_ids, [_as_sent(q[token]) for token in drawn_ids])

    def _draw_from(self, support: SparseDistribution) -> int:
        """Draw from exactly the values that are sent; base length of the round to come = committed - 1."""
        scores = support_scores(support, self._vocab_size)
        position = self._first_position + self._depth - 1
        return race(scores, self._context.noise, Stream.DRAFT, position, self._first_position - 1)

    def _add(self, parent: int, token_ids: Sequence[int], q: Sequence[float]) -> list[int]:
        added = []
        for token_id, probability in zip(token_ids, q, strict=True):
            node = self._tree.add(parent, token_id)
            if node is not None:
                self._probabilities.append(probability)
                added.append(node)
        return added


@dataclass(frozen=True)
class _Session:
    """`longest` is the number of tokens up to which it drafts."""

    kv: DraftKV
    context: DraftingContext
    longest: int


class ModelDrafter:
    """Drafts with an engine of its own; `Drafter` says what its methods promise."""

    def __init__(
        self, engine: Engine, prefill_chunk: int, name: str = MODEL, *, reduced_vocabulary: bool = False
    ) -> None:
        self.manifest = DrafterManifest(name, reduced_vocabulary=reduced_vocabulary, trees=True)
        self._engine = engine
        self._prefill_chunk = prefill_chunk
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, prefix: Sequence[int], context: DraftingContext) -> int:
        """Reserve the session's rows; the first drafting computes the prefix, in chunks.

        Raises:
            InvalidInput: the prefix is longer than the drafter's context.
            Overloaded: the KV budget has no room now.
        """
        info = self._engine.info
        if len(prefix) > info.max_length:
            raise InvalidInput.of("prefix length", len(prefix), f"at most {info.max_length}, the drafter's context")
        max_length = min(context.max_length or info.max_length, info.max_length)
        max_rows = min(max_length + MAX_PROPOSAL_NODES, info.max_kv_rows)
        self._engine.open(session, max_rows)
        # A drafting near the end of its rows is cut short; the largest one always fits behind `longest`.
        longest = max_rows - MAX_PROPOSAL_NODES
        self._sessions[session] = _Session(DraftKV(session, list(prefix)), context, longest)
        return 0

    def commit(self, session: int, token_ids: Sequence[int]) -> None:  # noqa: D102
        self._sessions[session].kv.committed.extend(token_ids)

    def begin(self, session: int, budget: DraftBudget, proposal_id: int) -> ModelDrafting:  # noqa: D102
        held = self._sessions[session]
        shape = shape_of(budget, held.context.acceptance, held.longest - len(held.kv.committed))
        vocab_size = self._engine.info.fingerprint.vocab_size
        return ModelDrafting(self.manifest.name, proposal_id, held.kv, held.context, shape, vocab_size)

    def advance(self, draftings: Sequence[ModelDrafting]) -> int:
        """One batched step; long prefixes share `prefill_chunk` rows of it, so that they delay nobody for longer."""
        items: list[StepItem] = []
        stepped: list[ModelDrafting] = []
        room = self._prefill_chunk
        for drafting in draftings:
            rows = drafting.lag
            if rows > SHORT_LAG or (rows and drafting.kv.in_prefix):
                rows = min(rows, room)
                room -= rows
                if not rows:
                    continue
            items.append(drafting.next_item(rows))
            stepped.append(drafting)
        plan = StepPlan(tuple(items))
        for drafting, item, logits in zip(stepped, items, self._engine.step(plan), strict=True):
            if item.logit_rows:
                drafting.grow(logits)
        return plan.rows

    def close(self, session: int) -> None:  # noqa: D102
        self._engine.close(session)
        self._sessions.pop(session, None)


def _as_sent(probability: float) -> float:
    """A probability as float32, inside (0, 1]."""
    tiny = float(np.finfo(np.float32).tiny)
    return min(1.0, max(tiny, float(np.float32(probability))))
