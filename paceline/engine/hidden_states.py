"""Hidden states of a transformers decoder: which there are, and how a forward pass leaves them.

Hooks read them, which changes nothing of what is computed: a step's logits are bit-identical with and without.
Decoders name their parts differently, so parts are told by their structure: the layers are the list that has as many
modules as the configuration has layers, the decoder is the module that has this list, and the head reads what the
decoder returns. One row is run at load time to see what these yield. A decoder that yields something else than one
vector a row offers no hidden states.
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
from paceline.engine.forward import SelfAttention, packed_forward
from paceline.engine.interface import StepPlan
from paceline.protocol.features import EMBEDDING, FINAL, FeatureNeed, FeatureOffer

logger = logging.getLogger(__name__)

States = dict[int, torch.Tensor]
"""By layer, counted as `FeatureNeed` does: [rows, hidden]."""
_STREAM = "altup_active_idx"
"""Gemma 3n's layers carry several streams [streams, batch, rows, hidden] (AltUp, arXiv:2301.13310). Attention and MLP
work on this one: it is what a layer yields."""


@torch.inference_mode()
def feature_offer(model: PreTrainedModel) -> FeatureOffer | None:
    """The hidden states that a decoder offers, whose attention is ours.

    None: its parts can't be told, or they yield something else than a vector a row.
    """
    decoder = _decoder(model)
    hidden: int | None = getattr(model.config.get_text_config(), "hidden_size", None)
    if decoder is None or hidden is None:
        return None
    layers = (EMBEDDING, *range(len(decoder[1])), FINAL)
    with capture_states(model, layers) as states:
        packed_forward(model, SelfAttention(), [0], [0], [0])
    for layer in layers:
        shape = tuple(states[layer].shape) if layer in states else None
        if shape != (1, hidden):
            name = type(model).__name__
            logger.warning("%s offers no hidden states: layer %d yields %s a row, not %d", name, layer, shape, hidden)
            return None
    return FeatureOffer(len(decoder[1]), hidden)


def _decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList] | None:
    """The module that has the list of the model's layers, and that list."""
    config = model.config.get_text_config()
    for name in ("num_hidden_layers", "num_layers"):  # LongCat-Flash's layers attend twice, and the first counts both
        count = getattr(config, name, None)
        for parent in model.modules():
            for child in parent.children():
                if isinstance(child, nn.ModuleList) and len(child) == count:
                    return parent, child
    return None


@contextmanager
def capture_states(model: PreTrainedModel, layers: Collection[int], out: States | None = None) -> Iterator[States]:
    """Capture the hidden states of a forward pass of one batch that runs within.

    Args:
        model: one that offers hidden states.
        layers: which of them, counted as `FeatureNeed` does.
        out: existing tensors, perhaps on the host, that take the states; None: new ones are made.
    """
    states: States = {}
    if not layers:
        yield states
        return
    parts = _decoder(model)
    assert parts is not None, "an engine without an offer keeps none"
    decoder, layer_list = parts
    stream: int | None = getattr(model.config.get_text_config(), _STREAM, None)

    def keep(layer: int, output: torch.Tensor) -> None:
        # A copy: a later layer may add to its input in place.
        rows = _rows_of(output, stream)
        states[layer] = rows.clone() if out is None else out[layer].copy_(rows, non_blocking=True)

    def keep_embedding(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(EMBEDDING, args[0] if args else kwargs["hidden_states"])

    def keep_output(layer: int, output: Any) -> None:
        keep(layer, output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        for layer in layers:
            if layer == EMBEDDING:
                handle: Any = layer_list[0].register_forward_pre_hook(keep_embedding, with_kwargs=True)
            elif layer == FINAL:
                handle = decoder.register_forward_hook(lambda _m, _args, output: keep_output(FINAL, output[0]))
            else:
                handle = layer_list[layer].register_forward_hook(
                    lambda _m, _args, output, number=layer: keep_output(number, output)
                )
            hooks.callback(handle.remove)
        yield states


def _rows_of(output: torch.Tensor, stream: int | None) -> torch.Tensor:
    """The rows [rows, hidden] of a batch of one."""
    return (output if stream is None or output.dim() < 4 else output[stream])[0]


class _KeptRows(NamedTuple):
    """Some of a session's new rows, from `first` on: rows of the states of a pass."""

    first: int
    states: States
    layers: tuple[int, ...]
    rows: slice

    def features(self) -> torch.Tensor:
        """[rows, layers · hidden], on the host; a layer is copied there once for all sessions of the pass."""
        for layer in self.layers:
            self.states[layer] = self.states[layer].cpu()
        return torch.cat([self.states[layer][self.rows] for layer in self.layers], dim=1)


class KeptStates:
    """The hidden states of the latest step, of the sessions that need some; they stay on their device until read."""

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
        """Begin a step: drop the states of the last one. Returns the layers that its sessions need."""
        self._parts = {}
        needs = (self._needs.get(item.session) for item in plan.items)
        return frozenset(layer for need in needs if need is not None for layer in need.layers)

    def take(self, session: int, first: int, states: States, rows: slice) -> None:
        """Keep the session's new rows from `first` on, which are `rows` of the states."""
        need = self._needs.get(session)
        if need is not None:
            self._parts.setdefault(session, []).append(_KeptRows(first, states, need.layers, rows))

    def take_packed(self, plan: StepPlan, states: States) -> None:
        """Keep the new rows of all sessions of a step; in the states they follow one another."""
        if not states:
            return
        low = 0
        for item in plan.items:
            high = low + len(item.token_ids)
            self.take(item.session, 0, states, slice(low, high))
            low = high

    def rows(self, session: int) -> FeatureRows:
        """Features of a session's new rows in the latest step, in their order."""
        parts = sorted(self._parts[session], key=lambda part: part.first)
        features: FeatureRows = torch.cat([part.features() for part in parts]).float().numpy()
        return features
