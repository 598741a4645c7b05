"""EAGLE as its papers define it, row by row, on a checkpoint's own tensors: what engines are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from tests.drafters.formats.eagle_files import Tensors


@dataclass(frozen=True)
class Published:
    """A network by its tensors; layer names are those of speculators, `layers.0` the first."""

    tensors: Tensors
    heads: int = 4
    kv_heads: int = 2
    eps: float = 1e-5
    theta: float = 10_000.0
    norm_before_residual: bool = False
    norm_output: bool = False
    inputs: int = 3
    third: bool = True

    def path(self, tokens: Sequence[int], features: torch.Tensor) -> torch.Tensor:
        """Logits [tokens - 1, draft ids] after the second token and each later one.

        `features` [known, width]: of the first tokens; where they end, a row reads what its parent's row yielded.
        """
        past = _Past()
        logits: list[torch.Tensor] = []
        outputs = torch.zeros(0)
        for place, token in enumerate(tokens[1:]):
            read = self._fused(features[place]) if place < len(features) else outputs
            outputs = self._row(token, read, place, past)
            normed = outputs if self.norm_output or not self.third else self._norm(outputs, "norm")
            logits.append(self.tensors["lm_head.weight"] @ normed)
        return torch.stack(logits)

    def _fused(self, features: torch.Tensor) -> torch.Tensor:
        if not self.third:
            return features
        if "input_norm.weight" in self.tensors:
            features = self._norm(features, "input_norm")
        if "fc_norm.0.weight" in self.tensors:
            parts = features.chunk(self.inputs)
            features = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        return self.tensors["fc.weight"] @ features

    def _row(self, token: int, read: torch.Tensor, position: int, past: _Past) -> torch.Tensor:
        embedding = self.tensors["embed_tokens.weight"][token]
        if self.third:
            normed = self._norm(read, "layers.0.hidden_norm")
            residual = normed if self.norm_before_residual else read
            hidden = self._layer(
                0, torch.cat((self._norm(embedding, "layers.0.input_layernorm"), normed)), residual, position, past
            )
        else:
            joined = self.tensors["fc.weight"] @ torch.cat((embedding, read)) + self.tensors.get("fc.bias", 0)
            hidden = self._layer(0, joined, joined, position, past)
        layer = 1
        while f"layers.{layer}.mlp.up_proj.weight" in self.tensors:
            hidden = self._layer(layer, self._norm(hidden, f"layers.{layer}.input_layernorm"), hidden, position, past)
            layer += 1
        return self._norm(hidden, "norm") if self.norm_output else hidden

    def _layer(
        self, layer: int, inputs: torch.Tensor, residual: torch.Tensor, position: int, past: _Past
    ) -> torch.Tensor:
        name = f"layers.{layer}"
        hidden = residual + self._attention(f"{name}.self_attn", inputs, position, past)
        normed = self._norm(hidden, f"{name}.post_attention_layernorm")
        gate, up = (self.tensors[f"{name}.mlp.{each}_proj.weight"] @ normed for each in ("gate", "up"))
        return hidden + self.tensors[f"{name}.mlp.down_proj.weight"] @ (functional.silu(gate) * up)

    def _attention(self, name: str, inputs: torch.Tensor, position: int, past: _Past) -> torch.Tensor:
        query, key, value = (self._split(f"{name}.{each}", inputs) for each in ("q", "k", "v"))
        keys = past.add(f"{name}.keys", self._rotated(key, position)).repeat_interleave(
            self.heads // self.kv_heads, dim=1
        )
        values = past.add(f"{name}.values", value).repeat_interleave(self.heads // self.kv_heads, dim=1)
        scores = torch.einsum("hd,rhd->hr", self._rotated(query, position), keys) / query.shape[-1] ** 0.5
        attended = torch.einsum("hr,rhd->hd", scores.softmax(-1), values)
        return self.tensors[f"{name}.o_proj.weight"] @ attended.reshape(-1)

    def _split(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        """[heads, head_dim]."""
        projected = self.tensors[f"{name}_proj.weight"] @ inputs
        heads = self.heads if name.endswith("q") else self.kv_heads
        rows = projected.reshape(heads, -1)
        normed = f"{name}_norm"
        return torch.stack([self._norm(row, normed) for row in rows]) if f"{normed}.weight" in self.tensors else rows

    def _rotated(self, rows: torch.Tensor, position: int) -> torch.Tensor:
        half = rows.shape[-1] // 2
        angles = position * self.theta ** (-torch.arange(half) / half)
        first, second = rows[:, :half], rows[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _norm(self, row: torch.Tensor, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"] * row * torch.rsqrt(row.square().mean() + self.eps)


@dataclass
class _Past:
    """Keys and values of a path's rows, by layer."""

    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, row: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, head_dim], this one the last."""
        self.rows[name] = torch.cat((self.rows.get(name, row[None][:0]), row[None]))
        return self.rows[name]
