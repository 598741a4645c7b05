"""EAGLE-1 and EAGLE-3 before their first step, and as SafeAILab publishes them.

Embedding and head are the target's own (of EAGLE-3 the head's rows for the draft's ids): they are neither trained nor
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel

from paceline.drafters.heads.eagle import Eagle1Network, Eagle3Form, Eagle3Network
from paceline.drafters.layers.student import Target
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.protocol.features import FINAL, FeatureNeed
from paceline_training.published import offset_maps, write_published
from paceline_training.starts import (
    begin_as_last_input,
    begin_as_last_layer,
    begin_as_last_norm,
    borrow,
    feature_inputs,
    layer_keys,
)
from paceline_training.unrolled import RecurrentTrainee


def eagle1_trainee(target: Target, vocabulary: DraftVocabulary, steps: int) -> RecurrentTrainee:
    """EAGLE-1 of one layer, its ids the target's."""
    config = layer_config(target.model)
    network = Eagle1Network(config, config.vocab_size)
    borrow(network, target.model, None)
    begin_as_last_layer(network.layers[0], target.model)
    layer: Any = network.layers[0]
    begin_as_last_input(network.fc)  # the feature as it is, which is behind the last layer and its norm already
    with torch.no_grad():
        network.fc.bias.zero_()
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    facts = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "bias": True}
    own = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}

    def write(folder: Path, weights: Mapping[str, torch.nn.Parameter]) -> None:
        write_published(folder, weights, facts)

    return RecurrentTrainee(network, own, write, vocabulary, FeatureNeed((FINAL,)), steps, regresses=True)


def eagle3_trainee(target: Target, vocabulary: DraftVocabulary, steps: int) -> RecurrentTrainee:
    """EAGLE-3 over three layers' features, with logits for the vocabulary's ids.

    Raises:
        InvalidInput: a target of fewer than three layers.
    """
    config = layer_config(target.model)
    inputs = feature_inputs(target)
    network = Eagle3Network(config, vocabulary.size, Eagle3Form(len(inputs), config.hidden_size))
    borrow(network, target.model, vocabulary)
    begin_as_last_layer(network.layers[0], target.model)
    begin_as_last_norm(network.norm, target.model)
    begin_as_last_input(network.fc)  # the highest layer's feature as it is
    facts = config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": vocabulary.size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(inputs), "use_aux_hidden_state": True},
    }
    own = {
        name.replace("layers.0.", "midlayer."): weight
        for name, weight in network.named_parameters()
        if weight.requires_grad
    }

    def write(folder: Path, weights: Mapping[str, torch.nn.Parameter]) -> None:
        write_published(folder, weights, facts, offset_maps(vocabulary, config.vocab_size))

    return RecurrentTrainee(network, own, write, vocabulary, FeatureNeed(tuple(each - 1 for each in inputs)), steps)


def layer_config(target: PreTrainedModel) -> Any:
    """A Llama's configuration of one layer as wide as the target's."""
    return LlamaConfig(**layer_keys(target) | {"num_hidden_layers": 1}, tie_word_embeddings=False)
