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
from paceline.engine.vocabulary.spelling import Contexts, Spelled, Speller
from paceline.runtime.config import EngineSettings

ROWS_PER_ROW = 1.5
"""Rows of the draft's tokens that are reserved for one of the target's. Above what vocabularies of 49,152 and 151,936
need of one another in English and code (`tests/engine/vocabulary/test_real_pair.py`); a text that needs more is
drafted for as long as they last."""


@dataclass(frozen=True)
class _SessionStep:
    """What becomes of a session in one step: its rows, and those of the engine underneath."""

    session: _TranslatedSession
    kept: int
    rows: tuple[Spelled, ...]
    step: ContextStep

    def apply(self) -> None:
        self.session.spelled[self.kept :] = self.rows
        self.session.rows.apply(self.step)


class _TranslatedSession:
    """`spelled[i]` is what the draft reads up to row i."""

    def __init__(self, speller: Speller, rows: ContextRows) -> None:
        self.spelled: list[Spelled] = []
        self.rows = rows
        self._speller, self._contexts = speller, Contexts()
        self._beginning = speller.begin(self._contexts)

    def plan(self, item: StepItem) -> _SessionStep:
        """What a step that has been checked does; changes nothing."""
        start = item.base_length - len(item.kept_rows)
        first = min(start, item.trunk)
        rows = [*self.spelled[first:start], *(self.spelled[row] for row in item.kept_rows)]

        def at(place: int) -> Spelled:
            if place < first:
                return self.spelled[place] if place >= 0 else self._beginning
            return rows[place - first]

        for row, token in enumerate(item.token_ids, start=item.kept_tree):
            rows.append(self._speller.follow(at(item.trunk + item.parent_of(row)), token, self._contexts))
        new = rows[item.base_length - first :]
        asked = [new[row].tip for row in item.logit_rows]
        above = [at(place) for place in range(max(0, item.trunk - 1), item.base_length)]
        held = [each.tip for each in above if each.tip is not None and each.tip.row is not None]
        ends = [new[row].tip for row in _ends(item) - {*item.logit_rows}]
        step = self.rows.plan(asked, [*(tip for tip in ends if tip is not None), *held])
        return _SessionStep(self, first, tuple(rows), step)


def _ends(item: StepItem) -> set[int]:
    """New rows from which no other hangs."""
    above = {item.parent_of(row) - item.kept_tree for row in range(item.kept_tree, item.tree_rows)}
    return set(range(len(item.token_ids))) - above


class TranslatedEngine(LedgerEngine[None]):
    """`Engine` says what its methods promise. A row whose context the draft has no room for, or that is empty, says
    nothing: all tokens in common are equal. Prefixes are not shared.
    """

    def __init__(
        self, inner: Engine, speller: Speller, shared: SharedVocabulary, tokenizer: str, settings: EngineSettings
    ) -> None:
        """Wrap an engine; `tokenizer` is the fingerprint of the target's."""
        fingerprint = replace(inner.info.fingerprint, tokenizer=tokenizer, vocab_size=shared.target_size)
        rows = max(1, math.floor(inner.info.max_kv_rows / ROWS_PER_ROW))
        super().__init__(EngineInfo(fingerprint, inner.info.max_length, rows), settings)
        self._inner, self._speller, self._shared = inner, speller, shared
        self._translated: dict[int, _TranslatedSession] = {}

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> int:  # noqa: D102
        self._ledger.open(session, max_rows)
        most = min(math.ceil(max_rows * ROWS_PER_ROW), self._inner.info.max_kv_rows)
        try:
            self._inner.open(session, most)
        except BaseException:
            self._ledger.close(session)
            raise
        rows = ContextRows(session, most, self._inner.info.max_length)
        self._translated[session] = _TranslatedSession(self._speller, rows)
        return 0

    def close(self, session: int) -> None:  # noqa: D102
        self._ledger.close(session)
        self._inner.close(session)
        self._translated.pop(session, None)

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._ledger.check(plan)
        steps = [self._translated[item.session].plan(item) for item in plan.items]
        items = tuple(each.step.item for each in steps if each.step.item is not None)
        found = iter(self._inner.step(StepPlan(items)) if items else ())
        self._ledger.apply(plan)
        for each in steps:
            each.apply()
        return [self._logits(each.step, None if each.step.item is None else next(found)) for each in steps]

    def _logits(self, step: ContextStep, found: Logits | None) -> Logits:
        """The draft's logits, in the order that they were asked for, over the target's vocabulary."""
        if found is not None and step.logits == tuple(range(len(found))):
            return self._shared.scatter(found)
        width = self._inner.info.fingerprint.vocab_size
        ordered = np.zeros((len(step.logits), width), np.float32)
        for row, place in enumerate(step.logits):
            if place is not None:
                assert found is not None, "there is a place only where there was a step"
                ordered[row] = found[place]
        return self._shared.scatter(ordered)
