"""Hidden states of a transformers decoder: which there are, and how they are kept beside a forward pass.

They are read by hooks, which change nothing of what is computed: a step's logits are bit-identical with and without.
Decoders differ in the names of their parts, so parts are found by what they are: layers are the list that has as many
modules as the configuration has layers, the decoder is the module that has this list, and what the head reads is what
the decoder returns. What these yield is looked at once, by running a row: a decoder that yields something else than
one vector a row offers none, which is known before anybody asks for them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.engine.features import FeatureRows
from paceline.engine.forward import AttentionCall, packed_forward
from paceline.engine.interface import StepPlan
from paceline.protocol.features import EMBEDDING, FINAL, FeatureNeed, FeatureOffer

logger = logging.getLogger(__name__)

States = dict[int, torch.Tensor]
"""By layer, counted as `FeatureNeed` does: [rows, hidden]."""
_STREAM = "altup_active_idx"
"""Gemma 3n's layers carry several streams [streams, batch, rows, hidden] (AltUp, arXiv:2301.13310). Attention and MLP
work on this one: it is what a layer yields."""


class _ToItself:
    """Attends every row to itself: only shapes are looked at."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        groups = call.query.shape[1] // call.value.shape[1]
        return call.value.repeat_interleave(groups, dim=1).transpose(1, 2)


@torch.inference_mode()
def offered(model: PreTrainedModel) -> FeatureOffer | None:
    """Which hidden states a decoder has, whose attention is ours; None: its parts are not found, or yield others."""
    found = _decoder(model)
    hidden: int | None = getattr(model.config.get_text_config(), "hidden_size", None)
    if found is None or hidden is None:
        return None
    wanted = (EMBEDDING, *range(len(found[1])), FINAL)
    with watched(model, wanted) as states:
        packed_forward(model, _ToItself(), [0], [0], [0])
    for layer in wanted:
        shape = tuple(states[layer].shape) if layer in states else None
        if shape != (1, hidden):
            name = type(model).__name__
            logger.warning("%s offers no hidden states: layer %d yields %s a row, not %d", name, layer, shape, hidden)
            return None
    return FeatureOffer(len(found[1]), hidden)


def _decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList] | None:
    """The module that has the list of the model's layers, and that list."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return parent, child
    return None


@contextmanager
def watched(model: PreTrainedModel, wanted: Collection[int], into: States | None = None) -> Iterator[States]:
    """Within, a forward pass of one batch leaves its hidden states here; of a model that has some to offer.

    `into`: what takes them, where that must be tensors that are there before, on the host perhaps.
    """
    states: States = {}
    if not wanted:
        yield states
        return
    found = _decoder(model)
    assert found is not None, "an engine without an offer keeps none"
    decoder, layers = found
    stream: int | None = getattr(model.config.get_text_config(), _STREAM, None)

    def keep(layer: int, output: torch.Tensor) -> None:
        # A copy: a later layer may add to what it is given in place.
        found = _of_rows(output, stream)
        states[layer] = found.clone() if into is None else into[layer].copy_(found, non_blocking=True)

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(EMBEDDING, args[0] if args else kwargs["hidden_states"])

    def behind(layer: int, output: Any) -> None:
        keep(layer, output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        for layer in wanted:
            if layer == EMBEDDING:
                handle: Any = layers[0].register_forward_pre_hook(before, with_kwargs=True)
            elif layer == FINAL:
                handle = decoder.register_forward_hook(lambda _module, _args, out: behind(FINAL, out[0]))
            else:
                handle = layers[layer].register_forward_hook(lambda _m, _args, out, at=layer: behind(at, out))
            hooks.callback(handle.remove)
        yield states


def _of_rows(output: torch.Tensor, stream: int | None) -> torch.Tensor:
    """Of a batch of one: [rows, hidden]."""
    return (output if stream is None or output.dim() < 4 else output[stream])[0]


class _KeptRows(NamedTuple):
    """Some of a session's new rows, from `first` on: rows of the states of a pass."""

    first: int
    states: States
    layers: tuple[int, ...]
    rows: slice

    def joined(self) -> torch.Tensor:
        """[rows, layers · hidden], on the host; a layer goes there once for all sessions of the pass."""
        for layer in self.layers:
            self.states[layer] = self.states[layer].cpu()
        return torch.cat([self.states[layer][self.rows] for layer in self.layers], dim=1)


class KeptStates:
    """The hidden states of the latest step, of the sessions that want some; where they are until they are read."""

    def __init__(self) -> None:
        self._needs: dict[int, FeatureNeed] = {}
        self._parts: dict[int, list[_KeptRows]] = {}

    def want(self, session: int, need: FeatureNeed) -> None:
        """Keep what a session needs from now on."""
        self._needs[session] = need

    def close(self, session: int) -> None:
        """Forget a session; unknown ones are ignored."""
        self._needs.pop(session, None)
        self._parts.pop(session, None)

    def begin(self, plan: StepPlan) -> frozenset[int]:
        """A step begins: forget the last one's. Returns the layers that its sessions need."""
        self._parts = {}
        needs = (self._needs.get(item.session) for item in plan.items)
        return frozenset(layer for need in needs if need is not None for layer in need.layers)

    def take(self, session: int, first: int, states: States, rows: slice) -> None:
        """Keep the session's new rows from `first` on: they are these rows of the states."""
        need = self._needs.get(session)
        if need is not None:
            self._parts.setdefault(session, []).append(_KeptRows(first, states, need.layers, rows))

    def take_packed(self, plan: StepPlan, states: States) -> None:
        """Keep the new rows of all sessions of a step, which the states have one after another."""
        if not states:
            return
        low = 0
        for item in plan.items:
            high = low + len(item.token_ids)
            self.take(item.session, 0, states, slice(low, high))
            low = high

    def rows(self, session: int) -> FeatureRows:
        """Of a session's new rows in the latest step, in their order."""
        parts = sorted(self._parts[session], key=lambda part: part.first)
        found: FeatureRows = torch.cat([part.joined() for part in parts]).float().numpy()
        return found
