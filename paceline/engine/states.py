"""States of recurrent layers: kept at a base that nothing rolls back, and advanced row by row from there.

A recurrent layer (a gated delta rule, a state space, a short convolution) folds all earlier rows into one state,
which can't be cut back as keys and values are. So a session keeps each layer's state behind its settled rows, and the
layer's inputs of the rows behind those. A step first moves the base to its trunk: to the state behind the last row
that was computed, where that one was kept, else by repeating the layer's rows on their inputs, the rest of the model
left out. Then it computes its rows one by one, each from its parent's state, in the layer's own recurrent form. So a
row has one result however its text was cut into steps, and a tree is a chain for each of its paths. Whole blocks of a
prompt are computed at once, in the layer's form for many rows, and are settled with that.

The layers are transformers' own modules. They are handed a cache that holds one row's state
(docs/decisions/2026-11-26-states-at-the-base.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch

from paceline.engine.blocks import BLOCK_ROWS
from paceline.engine.cpu.row_products import PanelLinear
from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.mixers import WINDOW, Mixer, RowState, bound_time_steps, replace_forward
from paceline.protocol.errors import InvalidInput, PrefixMismatch
from paceline.protocol.proposal import ROOT


class MixerRows:
    """Some rows of one layer: what products of them round alike are computed for all at once.

    Those are the layer's linear layers in panels that read its input or write its output.
    """

    def __init__(self, mixer: Mixer, rows: torch.Tensor, first: int = 0) -> None:
        """Begin with rows [n, width], of which those before `first` are seldom needed."""
        self._mixer, self._rows, self._first = mixer, rows, first
        panels = {name: mixer.module.get_submodule(name) for name in (*mixer.reading, mixer.writing) if name}
        panels = {name: linear for name, linear in panels.items() if isinstance(linear, PanelLinear)}
        self._products = {name: panels[name](rows[None, first:]) for name in mixer.reading if name in panels}
        self._linears, self._writer = panels, panels.get(mixer.writing)

    def compute(self, state: RowState, row: int, end: int) -> torch.Tensor:
        """As `Mixer.compute`, of rows [row, end); but for the last product, where that is left to `outputs`."""
        place, rows = row - self._first, self._rows[row:end]
        if place < 0:
            return self._mixer.compute(state, rows)
        for name, products in self._products.items():
            self._linears[name].forward = partial(_same, products[:, place : end - self._first])
        if self._writer is not None:
            self._writer.forward = _unchanged
        try:
            return self._mixer.compute(state, rows)
        finally:
            for linear in self._linears.values():
                linear.__dict__.pop("forward", None)

    def outputs(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the layer yields for rows that `compute` has returned: [rows, width]."""
        hidden = torch.cat([*rows])
        return hidden if self._writer is None else self._writer(hidden[None])[0]


def _same(output: torch.Tensor, _hidden: torch.Tensor) -> torch.Tensor:
    return output


def _unchanged(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


class SessionStates:
    """The states of one session: those behind rows [0, base), and what it takes to reach the rows behind those.

    A step calls `begin`, then `advance` for each layer, then `end`.
    """

    def __init__(self, mixers: Sequence[Mixer], prompt_rows: int = 0) -> None:
        """Begin with nothing; the first `prompt_rows` rows will be a prompt's."""
        self._mixers = mixers
        self._prompt_rows = prompt_rows
        self._behind_last: list[RowState] = []
        self._inputs: list[torch.Tensor] = []  # each [rows - base, width]
        self._item = StepItem(0, 0, ())
        self._next_base: list[RowState] = []
        self._next_last: list[RowState] = []
        self._restart()

    def _restart(self) -> None:
        self.base = 0
        """Rows that can't be rolled back, unless all are."""
        self._at_base = [mixer.empty.copy() for mixer in self._mixers]
        self._last_row: int | None = None
        """The row whose states are `_behind_last`; None: it is gone, or at the base."""

    def check(self, item: StepItem) -> None:
        """Refuse an item that goes back behind the base but not to the beginning, or has too large a tree.

        Raises:
            PrefixMismatch, InvalidInput: naming session and field.
        """
        name, start = f"session {item.session}", item.base_length - len(item.kept_rows)
        below = item.kept_rows[: max(0, self.base - start)]
        if item.base_length and (item.trunk < self.base or below != tuple(range(start, start + len(below)))):
            limit = f"0 or at least {self.base}, with the same rows: states of recurrent layers don't go back"
            raise PrefixMismatch(f"{name} trunk_length = {item.trunk}: must be {limit}")
        if not item.is_chain and item.tree_rows > WINDOW:
            raise InvalidInput.of(f"{name} tree rows", item.tree_rows, f"at most {WINDOW} beside recurrent layers")

    def begin(self, item: StepItem) -> None:
        """Keep an item's kept rows, and move the base to its trunk."""
        if not item.base_length:
            self._restart()
        start = item.base_length - len(item.kept_rows)
        rows = [*range(self.base, start), *item.kept_rows[max(0, self.base - start) :]]
        moves = item.trunk - self.base
        last = rows.index(self._last_row) if self._last_row in rows else None
        self._inputs = [inputs[[row - self.base for row in rows]] for inputs in self._inputs]
        if moves and last == moves - 1:
            self._at_base, last = self._behind_last, None
        else:
            for mixer, state, inputs in zip(self._mixers, self._at_base, self._inputs, strict=False):
                rows_again = MixerRows(mixer, inputs[:moves])
                for row in range(moves):
                    rows_again.compute(state, row, row + 1)
        self._inputs = [inputs[moves:] for inputs in self._inputs]
        self.base = item.trunk
        self._last_row = None if last is None else last + item.trunk - moves
        self._item, self._next_base, self._next_last = item, [], []

    def advance(self, layer: int, new: torch.Tensor) -> torch.Tensor:
        """Compute the item's new rows [new rows, width] in one of the layers that have states."""
        item, mixer = self._item, self._mixers[layer]
        inputs = torch.cat((*self._inputs[layer : layer + 1], new))
        self._inputs[layer : layer + 1] = [inputs]
        states = {ROOT: self._at_base[layer]}
        if self._last_row is not None:
            states[self._last_row - self.base] = self._behind_last[layer]
        heirs = {item.parent_of(row): row for row in range(item.kept_tree, item.tree_rows)}
        next_base = self._firm_rows - 1
        rows, outputs = MixerRows(mixer, inputs, item.kept_tree), []
        for row, end in self._pieces(in_blocks=mixer.in_blocks):
            parent = item.parent_of(row)
            self._reach(parent, states, rows)
            is_heir = heirs[parent] == row and parent not in (ROOT, next_base)
            state = states[end - 1] = states.pop(parent) if is_heir else states[parent].copy()
            outputs.append(rows.compute(state, row, end))
        self._next_last.append(states[item.tree_rows - 1])
        if next_base >= 0:
            self._reach(next_base, states, rows)
            self._next_base.append(states[next_base])
        return rows.outputs(outputs)

    def end(self) -> None:
        """Settle what has been computed."""
        firm_rows, rows = self._firm_rows, self._item.tree_rows
        self._behind_last, self._last_row = self._next_last, self.base + rows - 1 if firm_rows < rows else None
        if firm_rows:
            self._at_base = self._next_base
            self._inputs = [inputs[firm_rows:].clone() for inputs in self._inputs]
            self.base += firm_rows

    @property
    def _blocks(self) -> range:
        """Where the blocks of the prompt begin that the item computes whole, in rows of its tree.

        They begin at multiples of `BLOCK_ROWS` of the prompt, so a row's bits don't depend on where prompts are cut.
        """
        item = self._item
        if not item.is_chain:
            return range(0)
        end = min(item.tree_rows, self._prompt_rows - self.base) - BLOCK_ROWS + 1
        return range(item.kept_tree + -(self.base + item.kept_tree) % BLOCK_ROWS, end, BLOCK_ROWS)

    def _pieces(self, *, in_blocks: bool) -> Iterator[tuple[int, int]]:
        """The item's new rows in order, as [first, end): blocks, and single rows."""
        blocks, row = self._blocks if in_blocks else range(0), self._item.kept_tree
        while row < self._item.tree_rows:
            end = row + (BLOCK_ROWS if row in blocks else 1)
            yield row, end
            row = end

    @property
    def _firm_rows(self) -> int:
        """Rows behind the base that can't be rolled back any more: a prompt's blocks, and those beyond the window."""
        blocks = self._blocks
        return max(blocks[-1] + BLOCK_ROWS if blocks else 0, self._item.tree_rows - WINDOW)

    def _reach(self, row: int, states: dict[int, RowState], rows: MixerRows) -> None:
        """Have the state behind a row of the tree, by repeating the kept rows on the way."""
        path = []
        while row not in states:
            path.append(row)
            row = self._item.parent_of(row)
        for each in reversed(path):
            state = states[each] = states[row].copy()
            rows.compute(state, each, each + 1)
            row = each


@dataclass(frozen=True)
class StepStates:
    """The sessions of a running step, and the packed rows [low, high) of each."""

    parts: tuple[tuple[SessionStates, int, int], ...]

    @classmethod
    def begin(cls, plan: StepPlan, sessions: Mapping[int, SessionStates]) -> StepStates:
        """Prepare the sessions of a checked plan; none where no layer has states."""
        if not sessions:
            return cls(())
        parts, low = [], 0
        for item in plan.items:
            states, high = sessions[item.session], low + len(item.token_ids)
            states.begin(item)
            parts.append((states, low, high))
            low = high
        return cls(tuple(parts))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the recurrent layers of what runs within compute these sessions' rows."""
        token = _STEP.set(self)
        try:
            yield
        finally:
            _STEP.reset(token)
        for states, _, _ in self.parts:
            states.end()

    def advance(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """A layer's output [1, rows, width] for the packed rows [1, rows, width]."""
        return torch.cat([states.advance(layer, hidden[0, low:high]) for states, low, high in self.parts])[None]


_STEP: ContextVar[StepStates] = ContextVar("paceline_states")


def serve_mixers(mixers: Sequence[Mixer]) -> None:
    """Have a model's recurrent layers compute the rows of the running step."""
    for layer, mixer in enumerate(mixers):
        bound_time_steps(mixer.module)
        replace_forward(mixer.module, partial(_advance, layer, (None,) * mixer.others))


def _advance(
    layer: int, others: tuple[None, ...], hidden: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    output = _STEP.get().advance(layer, hidden)
    return (output, *others) if others else output
