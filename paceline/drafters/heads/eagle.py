"""EAGLE as networks: one decoder layer that goes on from the target's hidden states.

Every row reads the embedding of a token and the features of the token before it: the target's, or the output of its
parent's row. EAGLE-1 (arXiv:2401.15077, section 3) joins the two in one projection and predicts the target's
last hidden state, which the target's head reads. EAGLE-3 (arXiv:2503.01840, section 3) fuses hidden states of several
layers, joins them with the embedding in its first layer's attention, and has a head of its own.

Attention is that of `paceline.engine.forward`: a pass runs within `attending`, in training as in service, and has no
mask of its own.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from paceline.engine.forward import ATTENTION_NAME
from paceline.protocol.errors import Unsupported


@dataclass(frozen=True)
class _Family:
    """The classes of a family of decoders."""

    layer: Any
    norm: Any
    rotation: Any


_FAMILIES = {
    "llama": _Family(LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": _Family(Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


def family_of(config: PreTrainedConfig) -> _Family:
    """The family of a configuration's layers.

    Raises:
        Unsupported: layers that no published EAGLE has.
    """
    if config.model_type not in _FAMILIES:
        raise Unsupported(f"EAGLE with layers of model type {config.model_type}: one of {', '.join(_FAMILIES)}")
    return _FAMILIES[config.model_type]


class EagleNetwork(nn.Module, ABC):
    """The parts that EAGLE-1 and EAGLE-3 share: embedding, layers, rotations and head, named as in checkpoints."""

    def __init__(self, config: PreTrainedConfig, head_size: int) -> None:
        """Begin with random weights.

        Args:
            config: of the layers; its vocabulary is the target's.
            head_size: ids that the head has logits for.
        """
        super().__init__()
        self.config: Any = copy.deepcopy(config)
        self.config._attn_implementation = ATTENTION_NAME
        self.family = family_of(config)
        hidden: int = self.config.hidden_size
        self.embed_tokens = nn.Embedding(self.config.vocab_size, hidden)
        self.lm_head = nn.Linear(hidden, head_size, bias=False)
        with torch.device("cpu"):  # its frequencies are computed here, and in no checkpoint
            self.rotary_emb = self.family.rotation(self.config)

    layers: nn.ModuleList

    @property
    def hidden_size(self) -> int:
        """Width of a row's input and output."""
        size: int = self.config.hidden_size
        return size

    @property
    def dtype(self) -> torch.dtype:
        """That of all weights."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """That of all weights."""
        return self.embed_tokens.weight.device

    def get_input_embeddings(self) -> nn.Embedding:
        """As transformers' models have it."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """As transformers' models have it."""
        return self.lm_head

    @property
    @abstractmethod
    def feature_width(self) -> int:
        """Values of a row as the target sends it."""

    @abstractmethod
    def project(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features, a row's layers joined [..., feature_width] → the input of rows [..., hidden]."""

    @abstractmethod
    def forward(self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One pass.

        Args:
            token_ids: [batch, rows].
            features: [batch, rows, hidden], of the token before each: the target's, projected, or its row's output.
            positions: [batch, rows], those of the tokens before, so that the second token of a text is at 0.

        Returns:
            [batch, rows, hidden], which `logits` and deeper rows read.
        """

    @abstractmethod
    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[..., hidden] → [..., head_size]."""

    def _layer_arguments(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        """The arguments of every layer beside hidden states."""
        rotation = self.rotary_emb(hidden, position_ids=positions)
        return {"position_embeddings": rotation, "attention_mask": None, "position_ids": positions}


class Eagle1Network(EagleNetwork):
    """EAGLE-1: embedding and feature projected together, a first layer that begins without a norm, no last norm."""

    def __init__(
        self, config: PreTrainedConfig, head_size: int, *, bias: bool = True, qkv_bias: bool = False
    ) -> None:
        """Begin with random weights; `bias` is the projection's, `qkv_bias` that of attention's."""
        super().__init__(config, head_size)
        hidden = self.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=bias)
        layers = [self.family.layer(self.config, index) for index in range(self.config.num_hidden_layers)]
        layers[0].input_layernorm = nn.Identity()
        for layer in layers if qkv_bias else ():
            _reshape_inputs(layer.self_attn, hidden, bias=True)
        self.layers = nn.ModuleList(layers)

    @property
    def feature_width(self) -> int:  # noqa: D102
        return self.hidden_size

    def project(self, features: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return features

    def forward(  # noqa: D102
        self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.fc(torch.cat((self.embed_tokens(token_ids), features), dim=-1))
        layer_arguments = self._layer_arguments(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, **layer_arguments)
        return hidden

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:  # noqa: D102
        logits: torch.Tensor = self.lm_head(outputs)
        return logits


class InputNorm(StrEnum):
    """The norm of the target's features before they are fused."""

    NONE = "none"
    ALL_LAYERS = "all layers"
    """All layers of a row together: speculators' `norm_before_fc`."""
    EACH_LAYER = "each layer"
    """Each layer by itself: speculators' `fc_norm`."""


@dataclass(frozen=True)
class Eagle3Form:
    """The variations of published EAGLE-3 networks.

    Attributes:
        features: how many of the target's layers are joined.
        target_hidden: width of each.
        norm_before_residual: whether the residual stream begins with the normed feature, or with the feature itself.
        norm_output: whether deeper rows read outputs behind the last norm, or before it (EAGLE-3.1).
    """

    features: int
    target_hidden: int
    norm_before_residual: bool = False
    input_norm: InputNorm = InputNorm.NONE
    norm_output: bool = False


class Eagle3Network(EagleNetwork):
    """EAGLE-3: fused features beside the embedding in the first layer's attention, and a head of its own."""

    def __init__(self, config: PreTrainedConfig, head_size: int, form: Eagle3Form) -> None:
        """Begin with random weights."""
        super().__init__(config, head_size)
        self.form = form
        hidden, eps = self.hidden_size, self.config.rms_norm_eps
        self.fc = nn.Linear(self.feature_width, hidden, bias=False)
        if form.input_norm is InputNorm.ALL_LAYERS:
            self.input_norm = self.family.norm(self.feature_width, eps=eps)
        elif form.input_norm is InputNorm.EACH_LAYER:
            each = [self.family.norm(form.target_hidden, eps=eps) for _ in range(form.features)]
            self.fc_norm = nn.ModuleList(each)
        layers = [self.family.layer(self.config, index) for index in range(self.config.num_hidden_layers)]
        first = Eagle3FirstLayer(layers[0], self.family.norm(hidden, eps=eps), form.norm_before_residual)
        self.layers = nn.ModuleList([first, *layers[1:]])
        self.norm = self.family.norm(hidden, eps=eps)

    @property
    def feature_width(self) -> int:  # noqa: D102
        return self.form.features * self.form.target_hidden

    def project(self, features: torch.Tensor) -> torch.Tensor:  # noqa: D102
        if self.form.input_norm is InputNorm.ALL_LAYERS:
            features = self.input_norm(features)
        elif self.form.input_norm is InputNorm.EACH_LAYER:
            parts = features.split(self.form.target_hidden, dim=-1)
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(parts, dim=-1)
        hidden: torch.Tensor = self.fc(features)
        return hidden

    def forward(  # noqa: D102
        self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        layer_arguments = self._layer_arguments(features, positions)
        hidden: torch.Tensor = self.layers[0](self.embed_tokens(token_ids), features, **layer_arguments)
        for layer in self.layers[1:]:
            hidden = layer(hidden, **layer_arguments)
        return self.norm(hidden) if self.form.norm_output else hidden

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:  # noqa: D102
        logits: torch.Tensor = self.lm_head(outputs if self.form.norm_output else self.norm(outputs))
        return logits


class Eagle3FirstLayer(nn.Module):
    """A decoder layer whose attention reads embedding and feature side by side, each behind a norm of its own."""

    def __init__(self, layer: Any, hidden_norm: nn.Module, norm_before_residual: bool) -> None:
        """Take a plain layer apart; its projections into attention become twice as wide."""
        super().__init__()
        self.hidden_norm = hidden_norm
        self.input_layernorm: nn.Module = layer.input_layernorm
        self.self_attn: nn.Module = layer.self_attn
        self.post_attention_layernorm: nn.Module = layer.post_attention_layernorm
        self.mlp: nn.Module = layer.mlp
        self._norm_before_residual = norm_before_residual
        config = layer.self_attn.config
        _reshape_inputs(layer.self_attn, 2 * config.hidden_size, bias=config.attention_bias)

    def forward(self, embeddings: torch.Tensor, features: torch.Tensor, **layer_arguments: Any) -> torch.Tensor:
        """Each [batch, rows, hidden] → the same."""
        norm_features = self.hidden_norm(features)
        residual = norm_features if self._norm_before_residual else features
        inputs = torch.cat((self.input_layernorm(embeddings), norm_features), dim=-1)
        hidden = residual + self.self_attn(hidden_states=inputs, **layer_arguments)[0]
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


def _reshape_inputs(attention: Any, width: int, *, bias: bool) -> None:
    """Have attention read rows of another width, or with a bias that its own output lacks."""
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(width, getattr(attention, name).out_features, bias=bias))
