"""Recurrent layers of a decoder: transformers' own modules, told by what they do, and the state of one row in one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DummyLayer, LinearAttentionLayer

from paceline.engine.blocks import BLOCK_ROWS
from paceline.protocol.errors import Unsupported
from paceline.protocol.proposal import MAX_PROPOSAL_NODES

WINDOW = 4 * MAX_PROPOSAL_NODES
"""Rows behind a session's base, at most: the largest tree of a draft and what one step adds to it."""
_MOST_STATES = 4
"""States of a kind in one layer, at most: queries, keys and values have a convolution each in some."""
_TRIAL_ROWS = 4
"""Enough for a state that the last two rows leave their mark on, and that leaves its on them."""


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

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor:
        """As MiniMax's cache, which has a layer's one memory."""
        return self._memories[0]

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """As MiniMax's cache."""
        self._memories[0].copy_(linear_cache)

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
    others: int = 0
    """How many things it returns behind its output, of which its model makes no use."""
    reading: tuple[str, ...] = ()
    """Its linear layers that read its input."""
    writing: str = ""
    """The one whose output is its own; empty: none."""
    in_blocks: bool = False
    """Whether several rows at once, from a state, are what one by one they are, but for rounding."""

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return sum(tensor.nbytes for tensor in self.empty.tensors)

    def compute(self, state: RowState, rows: torch.Tensor) -> torch.Tensor:
        """The output of a chain of rows [rows, width], of one in the recurrent form; moves the state on in place."""
        output = self.forward(rows[None], cache=state)
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden[0]


class _TrialCache(Cache):
    """transformers' own, with what MiniMax's adds to it."""

    def get_linear_cache(self, layer_idx: int) -> None:
        return None

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        layer: Any = self.layers[layer_idx]
        layer.lazy_initialization(recurrent_states=linear_cache)


def state_bytes(mixers: Sequence[Mixer], itemsize: int) -> int:
    """Bytes of one session: each layer's state at the base and behind the last row, and its inputs in between."""
    return sum(2 * mixer.state_bytes + WINDOW * mixer.width * itemsize for mixer in mixers)


def replace_forward(module: nn.Module, compute: Callable[[torch.Tensor], Any]) -> None:
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
        replace_forward(module, partial(_note, module, mixers))
    try:
        yield mixers
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def _takes_cache(module: nn.Module) -> bool:
    is_layer = isinstance(getattr(module, "layer_idx", None), int)
    return is_layer and "cache" in inspect.signature(type(module).forward).parameters


def _other_parameters(module: nn.Module) -> list[str]:
    """What a module must be told beside rows and cache, and makes no use of: masks and rotations of attention."""
    parameters = [*inspect.signature(type(module).forward).parameters.values()][2:]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needs = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]
    return [name for name in needs if name != "cache"]


def _note(module: Any, mixers: list[Mixer], hidden: torch.Tensor) -> Any:
    """Run a module on one row, in a cache of transformers, and once more from there in its recurrent form."""
    forward = type(module).forward.__get__(module)
    if getattr(module, "chunk_size", 0) > BLOCK_ROWS:  # a block is filled up to it
        module.chunk_size = BLOCK_ROWS
    layer = LinearAttentionLayer(number_of_states=_MOST_STATES)
    forward = partial(forward, **dict.fromkeys(_other_parameters(module)))
    cache = _TrialCache(layers=[*(DummyLayer() for _ in range(module.layer_idx)), layer])
    try:
        output = forward(hidden, cache=cache)
        empty = RowState(*(_zeros(tensors) for tensors in (layer.conv_states, layer.recurrent_states)))
        others = len(output) - 1 if isinstance(output, tuple) else 0
        mixer = Mixer(module, module.layer_idx, forward, empty, hidden.shape[-1], others)
        mixer = replace(mixer, **_products_at_the_ends(mixer, hidden[:, :1]))
        mixer = replace(mixer, in_blocks=_is_same_in_blocks(mixer, hidden))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unsupported(f"{type(module).__name__}: keeps a state in a way of its own ({error})") from error
    if empty.tensors:
        mixers.append(mixer)
    return output


def _products_at_the_ends(mixer: Mixer, row: torch.Tensor) -> dict[str, Any]:
    """A layer's linear layers that read its input, once each, and the one that writes its output, by a row's step."""
    reading: list[str] = []
    outputs: dict[str, torch.Tensor] = {}

    def note(name: str, _module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        outputs[name] = output
        if inputs[0].data_ptr() == row.data_ptr() and inputs[0].shape == row.shape:
            reading.append(name)

    linears = {name: each for name, each in mixer.module.named_modules() if isinstance(each, nn.Linear)}
    hooks = [linear.register_forward_hook(partial(note, name)) for name, linear in linears.items()]
    try:
        last_output = mixer.compute(mixer.empty.copy(), row[0])
    finally:
        for hook in hooks:
            hook.remove()
    writing = [name for name, output in outputs.items() if output.data_ptr() == last_output.data_ptr()]
    once = tuple(name for name in reading if reading.count(name) == 1)
    return {"reading": once, "writing": writing[0] if len(writing) == 1 and writing[0] not in once else ""}


def _is_same_in_blocks(mixer: Mixer, like: torch.Tensor) -> bool:
    """Whether a layer goes on from a state with two rows at once as with one after the other, to half of the digits.

    Some of transformers' layers begin anew with any step of several rows.
    """
    rows = torch.randn(_TRIAL_ROWS, mixer.width, generator=torch.Generator().manual_seed(0)).to(like)
    state, release = mixer.empty.copy(), bound_time_steps(mixer.module)
    try:
        for row in rows[:-2].split(1):
            mixer.compute(state, row)
        other = state.copy()
        pair = mixer.compute(other, rows[-2:])
        single = torch.cat([mixer.compute(state, row) for row in rows[-2:].split(1)])
    except (RuntimeError, ValueError):
        return False
    finally:
        release()
    margin = torch.finfo(like.dtype).eps ** 0.5
    pairs = ((single, pair), *zip(state.tensors, other.tensors, strict=True))
    return all(((one - both).abs().max() <= margin * one.abs().max()).item() for one, both in pairs)


def bound_time_steps(module: Any) -> Callable[[], None]:
    """Bound the time steps of Mamba-2 layers that bound them: transformers' recurrent form leaves that out.

    The time step of a head is softplus(x + bias), x from the last columns of the layer's input projection.
    Returns what takes the bound away again.
    """
    low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    if low <= 0 and high == math.inf:
        return lambda: None
    least, most = (torch.tensor(limit).expm1().log() for limit in (low, high))

    def bound(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        steps, bias = output[..., -module.num_heads :], module.dt_bias.detach().float()
        steps.copy_(steps.clamp((least - bias).to(steps), (most - bias).to(steps)))
        return output

    hook: Callable[[], None] = module.in_proj.register_forward_hook(bound).remove
    return hook


def _zeros(states: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    return {index: torch.zeros_like(state) for index, state in states.items() if state is not None}
