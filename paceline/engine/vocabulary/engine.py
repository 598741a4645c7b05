"""A draft's engine seen in the target's vocabulary, though its tokenizer is another.

Rows go in as target ids and logits come out over target ids, -inf for tokens that the draft's vocabulary lacks.
Such a token is never drafted; the target may still emit it. Whoever drafts with the logits reports the q that it
sampled from, as with any engine, so the target's law holds (`exactness` §1). Underneath, the engine computes rows
of the draft's own tokens.

The contexts that a session of the draft's engine holds as rows, and the step that computes others. Pure.

The rows are a cache: a step computes the nodes that it needs and that have no row, wherever they branch off, and
drops those that it no longer needs.

From a draft's engine and two tokenizers to the draft's engine in the target's vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.engine.interface import NO_PREFIX, Engine, EngineInfo, Logits, Prefix, StepItem, StepPlan
from paceline.engine.ledger import LedgerEngine
from paceline.engine.vocabulary.shared import SharedVocabulary, refuse_strangers, shared_vocabulary
from paceline.engine.vocabulary.spelling import ContextNode, Contexts, Speller, Spelling
from paceline.models.token_texts import cutter, token_texts
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import Unsupported
from paceline.protocol.proposal import ROOT
from paceline.runtime.config import EngineSettings

logger = logging.getLogger(__name__)


Nodes = Sequence[ContextNode]


@dataclass(frozen=True)
class ContextStep:
    """The next step of a session: the rows that it will have, and where the logits of each context will be.

    Attributes:
        item: the step; None: nothing needs to be computed.
        start: rows before this one stay as they are.
        trunk: the first rows that will form a chain.
        rows: the nodes from `start` on: first those that have a row already, then the new ones.
        logits: for each context its place among the step's logit rows; None: there is no room for it.
    """

    item: StepItem | None
    start: int
    trunk: int
    rows: tuple[ContextNode, ...] = ()
    logits: tuple[int | None, ...] = ()


class ContextRows:
    """One session of the draft's engine.

    Invariant: engine row i holds `_rows[i]`, parents first; the first `_trunk` rows form a chain.
    """

    def __init__(self, session: int, max_rows: int, max_length: int) -> None:
        self._session, self._max_rows, self._max_length = session, max_rows, max_length
        self._rows: list[ContextNode] = []
        self._trunk = 0

    def plan(self, tips: Sequence[ContextNode | None], silent: Iterable[ContextNode]) -> ContextStep:
        """The step that gives the logits after `tips`, and keeps or computes rows for the `silent` contexts.

        Contexts without room are left out. Rows are cached and logits are not: a tip that has a row is computed
        again, and so are the nodes below it.
        """
        again = {tip for tip in tips if tip is not None and tip.row is not None}
        shared_rows = min((self._trunk, *(tip.row for tip in again if tip.row is not None)))
        contexts = _ContextSet(self._rows, shared_rows, self._max_rows, self._max_length)
        fitting = [tip if tip is not None and contexts.add(tip) else None for tip in tips]
        for tip in silent:
            contexts.add(tip)
        start, nodes = contexts.behind_trunk()
        kept_nodes = _kept_nodes(nodes, again, start)
        new_nodes = [node for node in nodes if node not in kept_nodes]
        trunk = start + _chain_length(self._rows[start - 1] if start else None, kept_nodes, new_nodes)
        logit_nodes = list(dict.fromkeys(tip for tip in fitting if tip is not None))
        item = self._item(start, trunk, kept_nodes, new_nodes, logit_nodes) if new_nodes else None
        places = {tip: place for place, tip in enumerate(logit_nodes)}
        logits = tuple(None if tip is None else places[tip] for tip in fitting)
        return ContextStep(item, start, trunk, (*kept_nodes, *new_nodes), logits)

    def apply(self, step: ContextStep) -> None:
        """Record a step as done; one without an item changes nothing."""
        if step.item is None:
            return
        for node in self._rows[step.start :]:
            node.row = None
        self._rows[step.start :] = step.rows
        self._trunk = step.trunk
        for row, node in enumerate(step.rows, start=step.start):
            node.row = row

    def _item(self, start: int, trunk: int, kept_nodes: Nodes, new_nodes: Nodes, logit_nodes: Nodes) -> StepItem:
        tree = [*kept_nodes[trunk - start :], *new_nodes]
        places = {node: place for place, node in enumerate(tree)}
        parents = tuple(ROOT if node.parent is None else places.get(node.parent, ROOT) for node in tree)
        kept_rows = tuple(node.row for node in kept_nodes if node.row is not None)
        base = start + len(kept_nodes)
        first = base - trunk
        return StepItem(
            session=self._session,
            base_length=base,
            token_ids=tuple(node.token for node in new_nodes),
            parents=() if parents == tuple(range(-1, len(tree) - 1)) else parents,
            kept_rows=() if kept_rows == tuple(range(start, base)) else kept_rows,
            logit_rows=tuple(places[tip] - first for tip in logit_nodes),
            trunk_length=trunk,
        )


class _ContextSet:
    """Contexts that a step needs, with their ancestors, while there is room; the first `trunk` rows are reused."""

    def __init__(self, rows: Sequence[ContextNode], trunk: int, max_rows: int, max_length: int) -> None:
        self._rows, self._trunk = rows, trunk
        self._max_rows, self._max_length = max_rows, max_length
        self._entries: set[int] = set()
        self._nodes: dict[ContextNode, None] = {}

    def add(self, tip: ContextNode) -> bool:
        """Add a context; returns whether there was room for it."""
        path: list[ContextNode] = []
        node: ContextNode | None = tip
        while node is not None and node not in self._nodes and not self._in_trunk(node):
            path.append(node)
            node = node.parent
        if self._trunk + len(self._nodes) + len(path) > self._max_rows or tip.length > self._max_length:
            return False
        if node not in self._nodes:
            self._entries.add(-1 if node is None or node.row is None else node.row)
        self._nodes.update(dict.fromkeys(path))
        return True

    def behind_trunk(self) -> tuple[int, list[ContextNode]]:
        """The number of trunk rows that all contexts share, and the nodes behind these, parents first."""
        low, high = min(self._entries, default=self._trunk - 1), max(self._entries, default=-1)
        nodes = [*self._rows[low + 1 : high + 1], *self._nodes]
        return low + 1, sorted(nodes, key=lambda node: node.length)

    def _in_trunk(self, node: ContextNode) -> bool:
        return node.row is not None and node.row < self._trunk


def _kept_nodes(nodes: Sequence[ContextNode], again: set[ContextNode], start: int) -> list[ContextNode]:
    """Nodes whose rows can be reused, in row order: each one's parent is reused too, or in the trunk."""
    kept_nodes: dict[ContextNode, None] = {}
    for node in nodes:
        parent = node.parent
        in_place = parent is None or parent in kept_nodes or (parent.row is not None and parent.row < start)
        if node.row is not None and node not in again and in_place:
            kept_nodes[node] = None
    return sorted(kept_nodes, key=lambda node: node.row or 0)


def _chain_length(
    parent: ContextNode | None, kept_nodes: Sequence[ContextNode], new_nodes: Sequence[ContextNode]
) -> int:
    """The number of kept nodes that all others descend from: they join the trunk."""
    branches: dict[ContextNode | None, int] = {}
    for node in (*kept_nodes, *new_nodes):
        branches[node.parent] = branches.get(node.parent, 0) + 1
    for count, node in enumerate(kept_nodes):
        if node.parent is not parent or branches[parent] > 1:
            return count
        parent = node
    return len(kept_nodes)


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
        if inner.info.session_rows:
            raise Unsupported(f"{inner.info.fingerprint.model}: recurrent layers in a draft of another vocabulary")
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


def translate_engine(
    inner: Engine, own: Tokenizer, target: Tokenizer, settings: EngineSettings, target_name: str
) -> Engine:
    """Make a draft's engine one of the target's vocabulary.

    Args:
        inner: the draft's engine.
        own: its tokenizer.
        target: the target's.
        settings: of the engine; sessions and their rows are counted by them.
        target_name: for messages.

    Raises:
        VocabularyMismatch: the vocabularies have too little in common.
        Unsupported: a vocabulary whose texts are not known in bytes.
    """
    name = inner.info.fingerprint.model
    draft_texts, target_texts = token_texts(own), token_texts(target)
    vocabulary = shared_vocabulary(target_texts, draft_texts)
    refuse_strangers(vocabulary, target_texts, (name, target_name))
    logger.info(
        "drafter %s has another vocabulary: %d tokens in common, of its own %d and %s's %d",
        name,
        vocabulary.size,
        draft_texts.vocab_size,
        target_name,
        target_texts.vocab_size,
    )
    speller = Speller(target_texts, draft_texts, vocabulary, cutter(own))
    return TranslatedEngine(inner, speller, vocabulary, target.fingerprint, settings)
