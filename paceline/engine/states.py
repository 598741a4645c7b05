"""States of recurrent layers: kept at a base that nothing rolls back, and advanced row by row from there.

A recurrent layer (a gated delta rule, a state space, a short convolution) folds all earlier rows into one state,
which can't be cut back as keys and values are. So a session keeps each layer's state behind its settled rows, and the
layer's inputs of the rows behind those. A step first moves the base to its trunk: to the state behind the last row
that was computed, where that one was kept, else by repeating the layer's rows on their inputs, the rest of the model
left out. Then it computes its rows one by one, each from its parent's state, in the layer's own recurrent form. So a
row has one result however its text was cut into steps, and a tree is a chain for each of its paths.

The layers are transformers' own modules. They are handed a cache that holds one row's state
(docs/decisions/2026-11-26-states-at-the-base.md).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DummyLayer, LinearAttentionLayer

from paceline.engine.interface import StepItem, StepPlan
from paceline.protocol.errors import InvalidInput, PrefixMismatch, Unsupported
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT

WINDOW = 4 * MAX_PROPOSAL_NODES
"""Rows behind the base, at most: the largest tree of a draft and what one step adds to it."""
_MOST_STATES = 4
"""States of a kind in one layer, at most: queries, keys and values have a convolution each in some."""


class RowState:
    """A layer's state behind one row, as transformers' layers read and write it: a cache of one row of one layer."""

    def __init__(self, windows: Mapping[int, torch.Tensor], memories: Mapping[int, torch.Tensor]) -> None:
        self._windows, self._memories = dict(windows), dict(memories)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that it holds."""
        return (*self._windows.values(), *self._memories.values())

    def copy(self) -> RowState:
        """One that changes by itself."""
        return RowState(
            {index: window.clone() for index, window in self._windows.items()},
            {index: memory.clone() for index, memory in self._memories.items()},
        )

    def is_recording_past(self, layer_idx: int) -> bool:
        """As transformers' caches: no, it is one row's."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As transformers' caches: yes. Before the first row a state is zero."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """The latest inputs of a convolution [1, channels, kernel], to be moved on in place."""
        return self._windows[state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """What a layer remembers [1, heads, …], to be moved on in place."""
        return self._memories[state_idx]

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Take in new inputs; returns all that a convolution over them reads."""
        window = self._windows[state_idx]
        inputs = torch.cat((window, conv_states), dim=-1)
        window.copy_(inputs[..., -window.shape[-1] :])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Take over a new state, which may be the old one, moved on in place."""
        return self._memories[state_idx].copy_(recurrent_states)


@dataclass(frozen=True, eq=False)
class Mixer:
    """A recurrent layer: transformers' own module, its state before the first row, and the width of its input."""

    module: nn.Module
    layer: int
    forward: Callable[..., Any]
    """The module's own, whatever has taken its place."""
    empty: RowState
    width: int

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return sum(tensor.nbytes for tensor in self.empty.tensors)

    def step(self, state: RowState, row: torch.Tensor) -> torch.Tensor:
        """The output [width] of a row [width], by the recurrent form; its state is moved on in place."""
        output = self.forward(row[None, None], cache=state)
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden[0, 0]


def state_bytes(mixers: Sequence[Mixer], itemsize: int) -> int:
    """Bytes of one session: each layer's state at the base and behind the last row, and its inputs in between."""
    return sum(2 * mixer.state_bytes + WINDOW * mixer.width * itemsize for mixer in mixers)


class SessionStates:
    """The states of one session: those behind rows [0, base), and what it takes to reach the rows behind those.

    A step calls `begin`, then `advance` for each layer, then `end`.
    """

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self._mixers = mixers
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
                for row in inputs[:moves]:
                    mixer.step(state, row)
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
        next_base = self._beyond_window - 1
        outputs = []
        for row in range(item.kept_tree, item.tree_rows):
            parent = item.parent_of(row)
            self._reach(parent, states, mixer, inputs)
            is_heir = heirs[parent] == row and parent not in (ROOT, next_base)
            state = states[row] = states.pop(parent) if is_heir else states[parent].copy()
            outputs.append(mixer.step(state, inputs[row]))
        self._next_last.append(states[item.tree_rows - 1])
        if next_base >= 0:
            self._reach(next_base, states, mixer, inputs)
            self._next_base.append(states[next_base])
        return torch.stack(outputs)

    def end(self) -> None:
        """Settle what has been computed."""
        beyond = self._beyond_window
        self._behind_last, self._last_row = self._next_last, self.base + self._item.tree_rows - 1
        if beyond:
            self._at_base = self._next_base
            self._inputs = [inputs[beyond:].clone() for inputs in self._inputs]
            self.base += beyond

    @property
    def _beyond_window(self) -> int:
        """Rows behind the base that are too many to be rolled back: the first ones of a long chain."""
        return max(0, self._item.tree_rows - WINDOW)

    def _reach(self, row: int, states: dict[int, RowState], mixer: Mixer, inputs: torch.Tensor) -> None:
        """Have the state behind a row of the tree, by repeating the kept rows on the way."""
        path = []
        while row not in states:
            path.append(row)
            row = self._item.parent_of(row)
        for each in reversed(path):
            state = states[each] = states[row].copy()
            mixer.step(state, inputs[each])
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
        _bound_time_steps(mixer.module)
        _replace(mixer.module, partial(_advance, layer))


def _advance(layer: int, hidden: torch.Tensor) -> torch.Tensor:
    return _STEP.get().advance(layer, hidden)


def _bound_time_steps(module: Any) -> None:
    """Bound the time steps of Mamba-2 layers that bound them: transformers' recurrent form leaves that out.

    The time step of a head is softplus(x + bias), x from the last columns of the layer's input projection.
    """
    low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    if low <= 0 and high == math.inf:
        return
    heads, bias = module.num_heads, module.dt_bias.detach().float()
    least, most = (torch.tensor(limit).expm1().log() - bias for limit in (low, high))

    def bound(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        steps = output[..., -heads:]
        steps.copy_(steps.clamp(least.to(steps), most.to(steps)))
        return output

    module.in_proj.register_forward_hook(bound)


def _replace(module: nn.Module, compute: Callable[[torch.Tensor], Any]) -> None:
    """Have a module compute its output from its first argument alone."""

    def forward(*arguments: Any, **others: Any) -> Any:
        return compute(arguments[0] if arguments else others["hidden_states"])

    module.forward = forward


@contextmanager
def noting_mixers(model: PreTrainedModel, others: Callable[[nn.Module], bool]) -> Iterator[list[Mixer]]:
    """Note the recurrent layers that run within: modules that take a cache and read or write states in it.

    `others`: which modules are known to be something else.
    """
    mixers: list[Mixer] = []
    modules = [module for module in model.modules() if _takes_cache(module) and not others(module)]
    for module in modules:
        if any(_takes_cache(each) for each in module.modules() if each is not module):
            continue
        _replace(module, partial(_note, module, mixers))
    try:
        yield mixers
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def _takes_cache(module: nn.Module) -> bool:
    is_layer = isinstance(getattr(module, "layer_idx", None), int)
    return is_layer and "cache" in inspect.signature(type(module).forward).parameters


def _note(module: Any, mixers: list[Mixer], hidden: torch.Tensor) -> Any:
    """Run a module on one row, in a cache of transformers, and once more from there in its recurrent form."""
    forward = type(module).forward.__get__(module)
    layer = LinearAttentionLayer(number_of_states=_MOST_STATES)
    cache = Cache(layers=[*(DummyLayer() for _ in range(module.layer_idx)), layer])
    try:
        output = forward(hidden, cache=cache)
        empty = RowState(*(_zeros(tensors) for tensors in (layer.conv_states, layer.recurrent_states)))
        mixer = Mixer(module, module.layer_idx, forward, empty, hidden.shape[-1])
        mixer.step(empty.copy(), hidden[0, 0])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unsupported(f"{type(module).__name__}: keeps a state in a way of its own ({error})") from error
    if empty.tensors:
        mixers.append(mixer)
    return output


def _zeros(states: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    return {index: torch.zeros_like(state) for index, state in states.items() if state is not None}
