"""Block drafting as a network: a block of masked positions filled in one pass (DFlash, arXiv:2602.06036).

Read in z-lab's `dflash.model` and speculators' `dflash`, November 2026. A block begins with the text's last token;
its other positions hold the mask. Every layer's keys and values are those of the block and, before them, of the
context: what the target computed of the tokens before the block, joined and normed once, and projected by each
layer's own matrices. The context has no tokens, and no row of the context depends on another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [..., rows, head_dim]."""
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries [blocks, heads, size, head_dim], the block's own keys, its values) → like the queries."""


@dataclass(frozen=True)
class Sight:
    """The horizon of a layer's rows: `window` positions back and, unless `causal`, as many ahead; None: all."""

    window: int | None = None
    causal: bool = False

    def mask(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Whether each row sees each key, by their positions: [..., rows, keys]; None: rows see all keys."""
        if self.window is None and not self.causal:
            return None
        back = rows[..., :, None] - keys[..., None, :]
        visible = torch.ones_like(back, dtype=torch.bool)
        if self.causal:
            visible &= back >= 0
        if self.window is not None:
            visible &= back.abs() < self.window
        return visible


@dataclass(frozen=True)
class BlockForm:
    """The form of a network's blocks.

    Attributes:
        size: positions of a block, its first token among them.
        mask_token: the token at the other positions.
        from_first: whether each position predicts the token after it; otherwise each predicts its own token, and the
            first predicts nothing.
        features: how many of the target's layers are joined.
        sights: of each layer.
    """

    size: int
    mask_token: int
    from_first: bool
    features: int
    sights: tuple[Sight, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens that a block predicts."""
        return self.size if self.from_first else self.size - 1


class BlockAttention(nn.Module):
    """Qwen3's attention, which takes keys and values from two places."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        shape: Any = config
        self.head_dim: int = shape.head_dim
        hidden, bias, eps = shape.hidden_size, shape.attention_bias, shape.rms_norm_eps
        query_width, kv_width = shape.num_attention_heads * self.head_dim, shape.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, query_width, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=bias)
        self.o_proj = nn.Linear(query_width, hidden, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=eps)

    def keys_and_values(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., rows, hidden] → two of [..., kv_heads, rows, head_dim], the keys rotated."""
        keys: torch.Tensor = self.k_norm(self._split_heads(self.k_proj(hidden))).transpose(-3, -2)
        return _rotate(keys, rotation), self._split_heads(self.v_proj(hidden)).transpose(-3, -2)

    def queries(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[..., rows, hidden] → [..., heads, rows, head_dim]."""
        queries: torch.Tensor = self.q_norm(self._split_heads(self.q_proj(hidden))).transpose(-3, -2)
        return _rotate(queries, rotation)

    def merge_heads(self, attention: torch.Tensor) -> torch.Tensor:
        """[..., heads, rows, head_dim] → [..., rows, hidden]."""
        hidden: torch.Tensor = self.o_proj(attention.transpose(-3, -2).flatten(-2))
        return hidden

    def _split_heads(self, rows: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = rows.unflatten(-1, (-1, self.head_dim))
        return heads


class BlockLayer(nn.Module):
    """A decoder layer; its parts have their published names."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        shape: Any = config
        self.self_attn = BlockAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """[blocks, size, hidden] → the same."""
        inputs = self.input_layernorm(hidden)
        keys, values = self.self_attn.keys_and_values(inputs, rotation)
        attention = attend(self.self_attn.queries(inputs, rotation), keys, values)
        hidden = hidden + self.self_attn.merge_heads(attention)
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class BlockNetwork(nn.Module):
    """A block drafter; its parts have their published names."""

    def __init__(self, config: Qwen3Config, head_size: int, form: BlockForm) -> None:
        """Begin with random weights.

        Args:
            config: of the layers; its vocabulary is the target's.
            head_size: ids that the head has logits for.
            form: of its blocks.
        """
        super().__init__()
        self.config: Any = config
        self.form = form
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.embed_tokens = nn.Embedding(self.config.vocab_size, hidden)
        self.lm_head = nn.Linear(hidden, head_size, bias=False)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in form.sights])
        self.norm = Qwen3RMSNorm(hidden, eps=eps)
        self.fc = nn.Linear(form.features * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=eps)
        with torch.device("cpu"):  # its frequencies are computed here, and in no checkpoint
            self.rotary_emb = Qwen3RotaryEmbedding(config)

    @property
    def dtype(self) -> torch.dtype:
        """That of all weights."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """That of all weights."""
        return self.norm.weight.device

    def get_input_embeddings(self) -> nn.Embedding:
        """As transformers' models have it."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """As transformers' models have it."""
        return self.lm_head

    @property
    def context_width(self) -> int:
        """Values of a row of the context: keys and values of all layers."""
        width: int = len(self.layers) * 2 * self.config.num_key_value_heads * self.config.head_dim
        return width

    def context(self, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys and values of the target's features.

        Args:
            features: [rows, layers of the target · hidden].
            positions: [rows], those of the features' tokens.

        Returns:
            [rows, layers, 2, kv_heads, head_dim].
        """
        hidden = self.hidden_norm(self.fc(features))
        rotation = self._rotation(hidden, positions)
        pairs = [torch.stack(layer.self_attn.keys_and_values(hidden, rotation)) for layer in self._stack]
        return torch.stack(pairs).permute(3, 0, 1, 2, 4)

    def outputs(self, first_tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Fill blocks.

        Args:
            first_tokens: [blocks].
            positions: [blocks], of those tokens.
            attend: attention, over each block and the context before it.

        Returns:
            [blocks, size, hidden], normed: what the head reads.
        """
        tokens = first_tokens[:, None].repeat(1, self.form.size)
        tokens[:, 1:] = self.form.mask_token
        hidden: torch.Tensor = self.embed_tokens(tokens)
        cos, sin = self._rotation(
            hidden, (positions[:, None] + torch.arange(self.form.size, device=positions.device))
        )
        rotation = (cos[:, None], sin[:, None])
        for number, layer in enumerate(self._stack):
            hidden = layer(hidden, rotation, lambda *qkv, number=number: attend(number, *qkv))
        output: torch.Tensor = self.norm(hidden)
        return output

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, head width]."""
        logits: torch.Tensor = self.lm_head(outputs)
        return logits

    @property
    def _stack(self) -> list[Any]:
        return [*self.layers]

    def _rotation(self, like: torch.Tensor, positions: torch.Tensor) -> Rotation:
        """Each [rows, head_dim], or [blocks, rows, head_dim]."""
        cos, sin = self.rotary_emb(like, torch.atleast_2d(positions))
        return (cos, sin) if positions.dim() == 2 else (cos[0], sin[0])


def block_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of [blocks, heads, size, head_dim] over [blocks, kv_heads, keys, head_dim]; `mask`: what rows see."""
    is_grouped = queries.shape[1] != keys.shape[1]
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=is_grouped)


def _rotate(rows: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cos, sin = rotation
    output: torch.Tensor = rows * cos + rotate_half(rows) * sin
    return output
