"""A draft's engine seen in the target's vocabulary, though its tokenizer is another.

Rows go in as target ids and logits come out over target ids, -inf for tokens that the draft's vocabulary lacks.
Such a token is never drafted; the target may still emit it. Whoever drafts with the logits reports the q that it
sampled from, as with any engine, so the target's law holds (`exactness` §1). Underneath, the engine computes rows
of the draft's own tokens (`paceline.engine.vocabulary.rows`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.engine.interface import NO_PREFIX, Engine, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.ledger import LedgerEngine
from paceline.engine.vocabulary.rows import ContextRows, ContextStep
from paceline.engine.vocabulary.shared import SharedVocabulary
from paceline.engine.vocabulary.spelling import Contexts, Speller, Spelling
from paceline.runtime.config import EngineSettings

ROWS_PER_ROW = 1.5
"""Rows of the draft's tokens that are reserved for one of the target's. Vocabularies of 49,152 and 151,936 need fewer
of one another in English and code (`tests/engine/vocabulary/test_real_pair.py`). A text that needs more is drafted
until the rows are used up."""


@dataclass(frozen=True)
class _SessionStep:
    """The changes of one step in a session: the spellings behind its first `kept_rows` rows, and the draft's rows."""

    session: _TranslatedSession
    kept_rows: int
    rows: tuple[Spelling, ...]
    step: ContextStep

    def apply(self) -> None:
        self.session.spellings[self.kept_rows :] = self.rows
        self.session.rows.apply(self.step)


class _TranslatedSession:
    """`spellings[i]` is what the draft reads up to row i."""

    def __init__(self, speller: Speller, rows: ContextRows) -> None:
        self.spellings: list[Spelling] = []
        self.rows = rows
        self._speller, self._contexts = speller, Contexts()
        self._beginning = speller.begin(self._contexts)

    def plan(self, item: StepItem) -> _SessionStep:
        """The changes that a checked step makes; makes none yet."""
        start = item.base_length - len(item.kept_rows)
        first = min(start, item.trunk)
        rows = [*self.spellings[first:start], *(self.spellings[row] for row in item.kept_rows)]

        def spelling_at(place: int) -> Spelling:
            if place < first:
                return self.spellings[place] if place >= 0 else self._beginning
            return rows[place - first]

        for row, token in enumerate(item.token_ids, start=item.kept_tree):
            rows.append(self._speller.follow(spelling_at(item.trunk + item.parent_of(row)), token, self._contexts))
        new = rows[item.base_length - first :]
        logit_tips = [new[row].tip for row in item.logit_rows]
        kept_spellings = [spelling_at(place) for place in range(max(0, item.trunk - 1), item.base_length)]
        kept_tips = [each.tip for each in kept_spellings if each.tip is not None and each.tip.row is not None]
        leaf_tips = [new[row].tip for row in _ends(item) - {*item.logit_rows}]
        step = self.rows.plan(logit_tips, [*(tip for tip in leaf_tips if tip is not None), *kept_tips])
        return _SessionStep(self, first, tuple(rows), step)


def _ends(item: StepItem) -> set[int]:
    """New rows without children."""
    parents = {item.parent_of(row) - item.kept_tree for row in range(item.kept_tree, item.tree_rows)}
    return set(range(len(item.token_ids))) - parents


class TranslatedEngine(LedgerEngine[None]):
    """`Engine` says what its methods promise. Prefixes are not shared.

    A row whose context is empty, or has no room in the draft, has the same logit for every token in common.
    """

    def __init__(
        self, inner: Engine, speller: Speller, vocabulary: SharedVocabulary, tokenizer: str, settings: EngineSettings
    ) -> None:
        """Wrap an engine; `tokenizer` is the fingerprint of the target's."""
        fingerprint = replace(inner.info.fingerprint, tokenizer=tokenizer, vocab_size=vocabulary.target_size)
        rows = max(1, math.floor(inner.info.max_kv_rows / ROWS_PER_ROW))
        super().__init__(EngineInfo(fingerprint, inner.info.max_length, rows), settings)
        self._inner, self._speller, self._vocabulary = inner, speller, vocabulary
        self._sessions: dict[int, _TranslatedSession] = {}

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        self._ledger.open(session, max_rows)
        draft_rows = min(math.ceil(max_rows * ROWS_PER_ROW), self._inner.info.max_kv_rows)
        try:
            self._inner.open(session, draft_rows)
        except BaseException:
            self._ledger.close(session)
            raise
        rows = ContextRows(session, draft_rows, self._inner.info.max_length)
        self._sessions[session] = _TranslatedSession(self._speller, rows)
        return 0

    def close(self, session: int) -> None:  # noqa: D102
        self._ledger.close(session)
        self._inner.close(session)
        self._sessions.pop(session, None)

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._ledger.check(plan)
        steps = [self._sessions[item.session].plan(item) for item in plan.items]
        items = tuple(each.step.item for each in steps if each.step.item is not None)
        outputs = iter(self._inner.step(StepPlan(items)) if items else ())
        self._ledger.apply(plan)
        for each in steps:
            each.apply()
        return [self._logits(each.step, None if each.step.item is None else next(outputs)) for each in steps]

    def _logits(self, step: ContextStep, logits: Logits | None) -> Logits:
        """The draft's logits over the target's vocabulary, in the order of the item's logit rows."""
        if logits is not None and step.logits == tuple(range(len(logits))):
            return self._vocabulary.scatter(logits)
        width = self._inner.info.fingerprint.vocab_size
        rows = np.zeros((len(step.logits), width), np.float32)
        for row, place in enumerate(step.logits):
            if place is not None:
                assert logits is not None, "only a step gives a place"
                rows[row] = logits[place]
        return self._vocabulary.scatter(rows)
