"""Hidden states of a transformers decoder: which there are, and how they are kept beside a forward pass.

They are read by hooks, which change nothing of what is computed: a step's logits are bit-identical with and without.
Decoders differ in the names of their parts, so parts are found by what they are: the decoder is the model's base, its
layers the one list that has as many modules as the configuration has layers, and what the head reads is what the
base returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.engine.features import FeatureRows
from paceline.engine.interface import StepPlan
from paceline.protocol.features import EMBEDDING, FINAL, FeatureNeed, FeatureOffer

States = dict[int, torch.Tensor]
"""By layer, counted as `FeatureNeed` does: [rows, hidden]."""


def offered(model: PreTrainedModel) -> FeatureOffer | None:
    """Which hidden states a decoder has; None: its parts are not found."""
    layers = _layers(model)
    hidden: int | None = getattr(model.config.get_text_config(), "hidden_size", None)
    return None if layers is None or hidden is None else FeatureOffer(len(layers), hidden)


def _layers(model: PreTrainedModel) -> nn.ModuleList | None:
    if model.base_model is model:
        return None
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    stacks = [each for each in model.base_model.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    return stacks[0] if stacks else None


@contextmanager
def watched(model: PreTrainedModel, wanted: Collection[int]) -> Iterator[States]:
    """Within, a forward pass of one batch leaves its hidden states here; of a model that has some to offer."""
    states: States = {}
    layers = _layers(model)
    assert layers is not None, "an engine without an offer keeps none"

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[EMBEDDING] = (args[0] if args else kwargs["hidden_states"])[0]

    def behind(layer: int, output: Any) -> None:
        # A later layer may add to what it is given in place.
        states[layer] = (output[0] if isinstance(output, tuple) else output)[0].clone()

    with ExitStack() as hooks:
        for layer in wanted:
            if layer == EMBEDDING:
                handle: Any = layers[0].register_forward_pre_hook(before, with_kwargs=True)
            elif layer == FINAL:
                handle = model.base_model.register_forward_hook(lambda _module, _args, out: behind(FINAL, out[0]))
            else:
                handle = layers[layer].register_forward_hook(lambda _m, _args, out, at=layer: behind(at, out))
            hooks.callback(handle.remove)
        yield states


class KeptStates:
    """The hidden states of the latest step, of the sessions that want some."""

    def __init__(self) -> None:
        self._needs: dict[int, FeatureNeed] = {}
        self._parts: dict[int, list[tuple[int, torch.Tensor]]] = {}

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

    def take(self, session: int, first: int, states: Mapping[int, torch.Tensor], rows: slice) -> None:
        """Keep the session's new rows from `first` on: they are these rows of the states."""
        need = self._needs.get(session)
        if need is not None:
            joined = torch.cat([states[layer][rows] for layer in need.layers], dim=1)
            self._parts.setdefault(session, []).append((first, joined))

    def rows(self, session: int) -> FeatureRows:
        """Of a session's new rows in the latest step, in their order."""
        parts = sorted(self._parts[session], key=lambda part: part[0])
        found: FeatureRows = np.concatenate([rows.float().cpu().numpy() for _, rows in parts])
        return found
