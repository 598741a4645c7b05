"""Initial weights of networks that read the target's features: copies of parts of the target of the same shape.

A layer copied from the target learns in minutes what random weights learn in hours.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.drafters.formats.eagle import LAYER_KEYS
from paceline.drafters.formats.eagle_parts import default_inputs
from paceline.drafters.layers.student import Target
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.weights import layers_of
from paceline.protocol.errors import require

_FEATURES = 3
"""Number of layers whose hidden states are joined, as EAGLE-3's authors do."""


def feature_inputs(target: Target) -> tuple[int, ...]:
    """The layers whose inputs are joined: the published choice, or the first, middle and last of a small target.

    Raises:
        InvalidInput: a target of fewer than three layers.
    """
    layers = len(layers_of(target.model))
    require(layers >= _FEATURES, f"{target.name}: layers", layers, f"at least {_FEATURES}, whose features are joined")
    published_inputs = default_inputs(layers)
    return published_inputs if len(published_inputs) == _FEATURES else (0, layers // 2, layers - 1)


def layer_keys(target: PreTrainedModel) -> dict[str, Any]:
    """The keys of the target's configuration that published drafters' configurations have, too."""
    text: Any = target.config.get_text_config()
    return {key: getattr(text, key) for key in LAYER_KEYS if getattr(text, key, None) is not None}


def borrow(network: Any, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
    """Give a network the target's embedding and head, frozen. The head gets the vocabulary's rows; None: all rows."""
    embedding: Any = target.get_input_embeddings()
    head: Any = target.get_output_embeddings()
    rows = head.weight.detach()
    if vocabulary is not None:
        rows = rows[torch.from_numpy(vocabulary.d2t).long()]
    network.embed_tokens.weight = torch.nn.Parameter(embedding.weight.detach(), requires_grad=False)
    network.lm_head.weight = torch.nn.Parameter(rows, requires_grad=False)


@torch.no_grad()
def begin_as_last_input(fusion: torch.nn.Linear) -> None:
    """Pass the last of the joined inputs on as it is. weight: [hidden, inputs · hidden]."""
    hidden, width = fusion.weight.shape
    fusion.weight.copy_(torch.cat((torch.zeros(hidden, width - hidden), torch.eye(hidden)), dim=1))


@torch.no_grad()
def begin_as_last_layer(layer: torch.nn.Module, target: PreTrainedModel) -> None:
    """Copy what has the same name and shape in the target's last layer.

    Where attention reads an embedding beside a feature (EAGLE-3), the feature's half is copied; the other is zero.
    """
    last = dict(layers_of(target)[-1].named_parameters())
    for name, weight in layer.named_parameters():
        theirs = last.get(name.replace("hidden_norm", "input_layernorm"))
        if theirs is None:
            continue
        if weight.ndim == 2 and weight.shape[1] == 2 * theirs.shape[-1]:
            weight.zero_()
            weight[:, theirs.shape[1] :].copy_(theirs)
        elif weight.shape == theirs.shape:
            weight.copy_(theirs)


@torch.no_grad()
def begin_as_last_norm(norm: torch.nn.Module, target: PreTrainedModel) -> None:
    """Copy the norm in front of the target's head, where it has its usual name."""
    theirs: Any = getattr(target.base_model, "norm", None)
    for name, weight in norm.named_parameters():
        if theirs is not None and name == "weight" and theirs.weight.shape == weight.shape:
            weight.copy_(theirs.weight)
