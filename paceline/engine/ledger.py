"""The bookkeeping that every engine shares: budget of KV rows, session lengths, shared blocks, checks of a step.

All state is integers. A plan is checked as a whole before any session changes, so a refused step leaves every session
as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from paceline.engine.blocks import BlockChain, BlockKey, BlockStore, Rows, prefix_keys, sharing_of
from paceline.engine.interface import NO_PREFIX, EngineInfo, Prefix, StepItem, StepPlan
from paceline.protocol.errors import InvalidInput, Overloaded, PrefixMismatch, UnknownSession
from paceline.protocol.proposal import ROOT
from paceline.runtime.config import EngineSettings

RETRY_AFTER_MS = 100
"""Hint sent with `Overloaded`, chosen, not tuned: about one round of the sessions that hold the room."""


@dataclass
class _SessionRows:
    """`parents` are the absolute parents of the rows from `base` on; rows before it form a chain.

    A session that shares has a `chain`, the tokens of its rows, and the keys of
    the blocks that it counts as a user of.
    """

    max_rows: int
    prefix: Prefix = NO_PREFIX
    chain: BlockChain | None = None
    base: int = 0
    parents: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    block_keys: list[BlockKey] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.base + len(self.parents)

    def parent(self, row: int) -> int:
        return row - 1 if row < self.base else self.parents[row - self.base]


class Ledger(Generic[Rows]):
    """Sessions, their reserved and used rows, the blocks that they share, and the rules of a valid step.

    Invariant: `kv_rows` = sum of the open sessions' `max_rows` and of the room of their states, and
    `kv_rows` + `cached_rows` ≤ the engine's `max_kv_rows`.
    """

    def __init__(self, info: EngineInfo, settings: EngineSettings, blocks: BlockStore[Rows] | None = None) -> None:
        """Begin with no sessions; `blocks` is the store of shared blocks, if it needs other rules than its own."""
        self._info = info
        self._settings = settings
        self._sessions: dict[int, _SessionRows] = {}
        self._reserved_rows = 0
        self._blocks: BlockStore[Rows] = BlockStore() if blocks is None else blocks

    @property
    def kv_rows(self) -> int:
        """Rows reserved by open sessions."""
        return self._reserved_rows

    @property
    def cached_rows(self) -> int:
        """Rows of shared blocks."""
        return self._blocks.held_rows

    @property
    def _free(self) -> int:
        """Rows of the budget that no session has reserved."""
        return self._info.max_kv_rows - self._reserved_rows

    def rows(self, session: int) -> int:
        """Rows of a session, accepted or not."""
        return self._sessions[session].rows

    def open(self, session: int, max_rows: int, prefix: Prefix = NO_PREFIX) -> list[Rows]:
        """Reserve `max_rows` rows.

        Returns:
            The blocks that the session begins with, to be copied in, in order.

        Raises:
            InvalidInput: the session could never fit, or its id is in use.
            Overloaded: no room now.
        """
        self._check_room(session, max_rows)
        state = _SessionRows(max_rows, prefix)
        self._sessions[session] = state
        self._reserved_rows += max_rows + self._info.session_rows
        blocks = self._begin(state) if prefix.token_ids and self._settings.prefix_reuse else []
        self._blocks.evict_to(self._free)
        return blocks

    def close(self, session: int) -> None:
        """Give a session's rows back; unknown sessions are ignored."""
        state = self._sessions.pop(session, None)
        if state is not None:
            self._reserved_rows -= state.max_rows + self._info.session_rows
            self._blocks.release(state.block_keys)

    def share(self, plan: StepPlan, copy: Callable[[int, int, int], Rows]) -> None:
        """Store the blocks that a step has completed, while there is room that no session and no block in use takes.

        `copy` takes session, start and end, and returns a copy of these rows.
        """
        for item in plan.items:
            session = self._sessions[item.session]
            if session.chain is None:
                continue
            for key in session.chain.settle(session.tokens, _settled_rows(item, session)):
                self._share_block(item.session, session, key, copy)

    def _share_block(
        self, number: int, session: _SessionRows, key: BlockKey, copy: Callable[[int, int, int], Rows]
    ) -> None:
        hits = self._blocks.match([key])
        if hits:
            self._blocks.use(hits)
        elif self._blocks.evict_to(self._free - self._blocks.cost(key), idle_only=True):
            self._blocks.put(key, copy(number, key.start, key.end))
        else:
            return
        session.block_keys.append(key)

    def _begin(self, session: _SessionRows) -> list[Rows]:
        keys = prefix_keys(session.prefix, reproducible=self._settings.reproducible)
        hits = self._blocks.match([key for key in keys if key.end <= session.max_rows])
        session.chain = BlockChain(keys, hits, sharing_of(session.prefix, reproducible=self._settings.reproducible))
        session.base = hits[-1].end if hits else 0
        session.tokens = [*session.prefix.token_ids[: session.base]]
        session.block_keys = hits
        return self._blocks.use(hits)

    def _check_room(self, session: int, max_rows: int) -> None:
        if not 1 <= max_rows <= self._info.most_rows:
            raise InvalidInput.of("max_rows", max_rows, f"in [1, {self._info.most_rows}], the whole KV budget")
        if session in self._sessions:
            raise InvalidInput.of("session", session, "an id that is not open")
        if len(self._sessions) >= self._settings.max_num_seqs:
            raise Overloaded(f"{self._settings.max_num_seqs} sessions are open", retry_after_ms=RETRY_AFTER_MS)
        rows = max_rows + self._info.session_rows
        if rows > self._free:
            raise Overloaded(f"{rows} KV rows needed, {self._free} free", retry_after_ms=RETRY_AFTER_MS)

    def check(self, plan: StepPlan) -> None:
        """Refuse a plan unless every session can follow it; changes nothing.

        Raises:
            UnknownSession, PrefixMismatch, InvalidInput: naming session and field.
        """
        if not plan.items:
            raise InvalidInput.of("step items", 0, "at least 1")
        numbers: set[int] = set()
        for item in plan.items:
            if item.session in numbers:
                raise InvalidInput.of("step session", item.session, "named once in a step")
            numbers.add(item.session)
            self._check_item(item)

    def apply(self, plan: StepPlan) -> None:
        """Record a checked plan as done."""
        for item in plan.items:
            session = self._sessions[item.session]
            if session.chain is not None:
                start = item.base_length - len(item.kept_rows)
                session.chain.roll_back(start)
                session.tokens[start:] = (*(session.tokens[row] for row in item.kept_rows), *item.token_ids)
            session.parents = tuple(item.trunk + item.parent_of(row) for row in range(item.tree_rows))
            session.base = item.trunk

    def _check_item(self, item: StepItem) -> None:
        session = self._sessions.get(item.session)
        if session is None:
            raise UnknownSession(f"session {item.session} is not open")
        _check_shape(item, f"session {item.session}")
        _check_kept_rows(item, session)
        self._check_new_rows(item, session)

    def _check_new_rows(self, item: StepItem, session: _SessionRows) -> None:
        new, name = len(item.token_ids), f"session {item.session}"
        if item.base_length + new > session.max_rows:
            raise InvalidInput.of(f"{name} rows", item.base_length + new, f"at most {session.max_rows}")
        for token in (min(item.token_ids), max(item.token_ids)):
            if not 0 <= token < self._info.fingerprint.vocab_size:
                raise InvalidInput.of(f"{name} token id", token, f"in [0, {self._info.fingerprint.vocab_size})")
        length = item.trunk + (item.tree_rows if item.is_chain else max(depths(item)))
        if length > self._info.max_length:
            raise InvalidInput.of(f"{name} length", length, f"at most {self._info.max_length}, the model's context")


class LedgerEngine(Generic[Rows]):
    """The base of all engines with sessions of their own: the model's info, and a ledger."""

    def __init__(self, info: EngineInfo, settings: EngineSettings, blocks: BlockStore[Rows] | None = None) -> None:
        self.info = info
        self._ledger = Ledger(info, settings, blocks)

    @property
    def kv_rows(self) -> int:  # noqa: D102
        return self._ledger.kv_rows

    @property
    def cached_rows(self) -> int:
        """Rows of shared blocks."""
        return self._ledger.cached_rows


def _settled_rows(item: StepItem, session: _SessionRows) -> int:
    """The number of first rows that can't be rolled back: the trunk, and the rows of the prefix that follow it."""
    chain_rows = next((row for row in range(item.tree_rows) if item.parent_of(row) != row - 1), item.tree_rows)
    return max(item.trunk, min(len(session.prefix.token_ids), item.trunk + chain_rows))


def _check_shape(item: StepItem, name: str) -> None:
    new = len(item.token_ids)
    if new < 1:
        raise InvalidInput.of(f"{name} new rows", new, "at least 1")
    if not 0 <= item.trunk <= item.base_length:
        raise InvalidInput.of(f"{name} trunk_length", item.trunk, f"in [0, {item.base_length}]")
    if item.parents and len(item.parents) != item.tree_rows:
        raise InvalidInput.of(f"{name} parents", len(item.parents), f"{item.tree_rows}, one for each tree row")
    for row, parent in enumerate(item.parents):
        if not ROOT <= parent < row:
            raise InvalidInput.of(f"{name} parent of row {row}", parent, f"in [-1, {row - 1}]")
    for row in item.logit_rows:
        if not 0 <= row < new:
            raise InvalidInput.of(f"{name} logit row", row, f"in [0, {new})")


def depths(item: StepItem) -> tuple[int, ...]:
    """Depth of each new row in the tree; a child of `ROOT` has depth 1."""
    return tree_depths(item)[item.kept_tree :]


def tree_depths(item: StepItem) -> tuple[int, ...]:
    """Depth of each row of the tree, kept and new."""
    if not item.parents:
        return tuple(range(1, item.tree_rows + 1))
    row_depths: list[int] = []
    for parent in item.parents:
        row_depths.append(1 if parent == ROOT else row_depths[parent] + 1)
    return tuple(row_depths)


def key_positions(item: StepItem) -> NDArray[np.int64]:  # [base + new]
    """Position of every row that a session holds once the item's new rows are there."""
    return np.concatenate((np.arange(item.trunk), np.array(tree_depths(item), np.int64) + (item.trunk - 1)))


def _check_kept_rows(item: StepItem, session: _SessionRows) -> None:
    """Kept rows must exist and be each other's parents as stated: a row's keys depend on its own ancestors."""
    start = item.base_length - len(item.kept_rows)
    if start < 0 or item.base_length > session.rows:
        raise PrefixMismatch(
            f"session {item.session} base_length = {item.base_length}: must be in "
            f"[{len(item.kept_rows)}, {session.rows}], the session's rows"
        )
    # Rows before `first` stay where they are, each behind the one before it.
    first = min(session.base, start, item.trunk)
    kept_rows = (*range(first, start), *item.kept_rows)
    previous = first - 1
    for place, row in enumerate(kept_rows, start=first):
        parent_place = _kept_parent(item, place)
        parent = parent_place if parent_place < first else kept_rows[parent_place - first]
        if not previous < row < session.rows or session.parent(row) != parent:
            raise PrefixMismatch(
                f"session {item.session} kept row {row}: must come after row {previous} as a child of row {parent}"
            )
        previous = row


def _kept_parent(item: StepItem, place: int) -> int:
    """The place, among the rows kept, of the parent of the row that is kept at `place`."""
    return place - 1 if place < item.trunk else item.trunk + item.parent_of(place - item.trunk)
