"""Sessions as sequences of llama.cpp: every leaf of a session's rows is the end of one.

A cell of llama.cpp's cache is a position and the sequences that see it, of which there are 256 in all. So a tree's
row belongs to the sequences of all leaves below it. Where sequences run short some leaves have none: their rows are
computed in a later pass, and computed anew should they be kept. Tokens are remembered: rows may be dropped at will.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from paceline.engine.interface import StepItem
from paceline.engine.ledger import tree_depths
from paceline.protocol.proposal import ROOT


class SequenceMemory(Protocol):
    """llama.cpp's cache; positions are of a sequence's cells, ends are exclusive."""

    def remove(self, sequence: int, start: int = 0) -> None:
        """Remove a sequence from its cells from a position on; cells of no sequence are free."""

    def copy(self, source: int, sequence: int, start: int, end: int) -> None:
        """Have a sequence see cells of another one, too."""


@dataclass
class SessionSequences:
    """A session's rows: their tokens, and the sequences whose ends they are.

    The first `trunk` rows form a path and stand at their own positions. Those behind are a tree: `parents` are
    absolute, `positions` those in the text. `tips` has the last row of each of the session's sequences, `ROOT` for an
    empty one. A row is live if it is on the way to a tip.
    """

    tokens: list[int] = field(default_factory=list)
    trunk: int = 0
    parents: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    tips: dict[int, int] = field(default_factory=dict)
    _earlier: tuple[int, list[int], int, list[int], list[int]] = (0, [], 0, [], [])
    """What the latest step replaced: from which row on, these tokens, and the other fields."""

    def parent(self, row: int) -> int:
        """The row before a row; `ROOT` before the first."""
        return row - 1 if row < self.trunk else self.parents[row - self.trunk]

    def position(self, row: int) -> int:
        """A row's position in the text."""
        return row if row < self.trunk else self.positions[row - self.trunk]

    def tree_path(self, row: int) -> Iterator[int]:
        """A row and its ancestors in the tree, upwards; none for a row of the trunk."""
        while row >= self.trunk:
            yield row
            row = self.parent(row)

    def keep(self, item: StepItem, memory: SequenceMemory) -> list[int]:
        """Keep the rows that an item names and add its new ones, of which none is live.

        Returns:
            Sequences that the session needs no more, emptied.
        """
        start = item.base_length - len(item.kept_rows)
        places = {row: start + index for index, row in enumerate(item.kept_rows)}
        tips: dict[int, int] = {}
        for sequence, tip in self.tips.items():
            end = tip
            while end >= start and end not in places:
                end = self.parent(end)
            if end != tip:
                memory.remove(sequence, 0 if end == ROOT else self.position(end) + 1)
            tips[sequence] = places.get(end, end)
        self._earlier = (start, self.tokens[start:], self.trunk, self.parents, self.positions)
        self.tokens[start:] = (*(self.tokens[row] for row in item.kept_rows), *item.token_ids)
        self.trunk = item.trunk
        self.parents = [item.trunk + item.parent_of(row) for row in range(item.tree_rows)]
        self.positions = [item.trunk + depth - 1 for depth in tree_depths(item)]
        self.tips = tips
        return self.release(self._repeats(), memory)

    def take_back(self, memory: SequenceMemory) -> list[int]:
        """Undo the latest `keep`; no row is live then, since nobody knows how far its step has come.

        Returns:
            As `keep`.
        """
        start, tokens, self.trunk, self.parents, self.positions = self._earlier
        self.tokens[start:] = tokens
        sequence, *others = self.tips
        memory.remove(sequence)
        self.tips[sequence] = ROOT
        return self.release(others, memory)

    def release(self, sequences: Iterable[int], memory: SequenceMemory) -> list[int]:
        """Empty some of the sequences, which are returned; all of them: the session ends."""
        surplus = [*sequences]
        for sequence in surplus:
            memory.remove(sequence)
            del self.tips[sequence]
        return surplus

    def _repeats(self) -> list[int]:
        """Sequences whose rows are all rows of another one, too."""
        longest, *others = sorted(self.tips, key=lambda sequence: -self.tips[sequence])
        seen, repeats = set(self.tree_path(self.tips[longest])) if others else set(), []
        for sequence in others:
            tip = self.tips[sequence]
            if tip < self.trunk or tip in seen:
                repeats.append(sequence)
            seen.update(self.tree_path(tip))
        return repeats

    def leaves(self, new_rows: int) -> list[int]:
        """Rows without children among the last `new_rows`."""
        first = len(self.tokens) - new_rows
        inner = {self.parent(row) for row in range(first, len(self.tokens))}
        return [row for row in range(first, len(self.tokens)) if row not in inner]


@dataclass
class Wave:
    """Rows of one session that are computed in one pass: each with the sequences that it belongs to."""

    rows: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    """The leaf that each sequence will end at."""


class WavePlanner:
    """Chooses sequences for a session's leaves, pass by pass."""

    def __init__(
        self, rows: SessionSequences, new_rows: int, memory: SequenceMemory, take: Callable[[], int | None]
    ) -> None:
        """Plan for the last `new_rows` rows; `take` gives a free sequence, or None."""
        self._rows = rows
        self._memory = memory
        self._take = take
        self._pending = rows.leaves(new_rows)

    @property
    def is_done(self) -> bool:
        """Whether every leaf has been in a wave."""
        return not self._pending

    def next_wave(self) -> Wave:
        """As many of the leaves as there are sequences for, one at least; cells that they go on from are copied."""
        wave = Wave()
        self._find_live()
        while self._pending:
            path = []
            row = leaf = self._pending[0]
            while row >= self._live_trunk and row not in self._owners:
                path.append(row)
                row = self._rows.parent(row)
            sequence = self._sequence_at(row, wave)
            if sequence is None:
                break
            wave.ends[sequence] = leaf
            for each in path:
                wave.rows.setdefault(each, []).append(sequence)
            self._pending.pop(0)
        return wave

    def finish(self, wave: Wave) -> None:
        """Note that a wave has been computed."""
        self._rows.tips |= wave.ends

    def _find_live(self) -> None:
        """Note which rows are live, and a sequence that has each."""
        tips = self._rows.tips
        self._owners = {row: sequence for sequence, tip in tips.items() for row in self._rows.tree_path(tip)}
        self._trunk_owner = max(tips, key=lambda sequence: tips[sequence])
        self._live_trunk = min(tips[self._trunk_owner] + 1, self._rows.trunk)

    def _sequence_at(self, row: int, wave: Wave) -> int | None:
        """A sequence for another leaf of the wave, brought to end at a live row; None: all are taken."""
        idle = [sequence for sequence in self._rows.tips if sequence not in wave.ends]
        at_row = [sequence for sequence in idle if self._rows.tips[sequence] == row]
        if at_row:
            return at_row[0]
        free, owner = self._take(), self._owners.get(row, self._trunk_owner)
        if free is not None:
            self._extend(free, owner, ROOT, row)
            return free
        if not idle:
            return None
        self._move(idle[0], owner, row)
        self._find_live()
        return idle[0]

    def _extend(self, sequence: int, owner: int, end: int, row: int) -> None:
        """Have a sequence that ends at a row end at another one, which is behind it."""
        if row != end:
            start = 0 if end == ROOT else self._rows.position(end) + 1
            self._memory.copy(owner, sequence, start, self._rows.position(row) + 1)
        self._rows.tips[sequence] = row

    def _move(self, sequence: int, owner: int, row: int) -> None:
        """Have a sequence end at a live row that may be on another path."""
        ancestors = set(self._rows.tree_path(row))
        end = self._rows.tips[sequence]
        while end >= self._rows.trunk and end not in ancestors:
            end = self._rows.parent(end)
        end = min(end, row)
        self._memory.remove(sequence, 0 if end == ROOT else self._rows.position(end) + 1)
        self._extend(sequence, owner, end, row)
