"""Medusa's heads: residual blocks over the target's last hidden state, each with its output (arXiv:2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from paceline.protocol.features import FINAL, FeatureNeed


class ResidualLayer(nn.Module):
    """x + SiLU(W x + b); the identity, as long as W and b are zeros (section 2.1.1)."""

    def __init__(self, hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden, bias=bias)
        for weight in self.linear.parameters():
            nn.init.zeros_(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, hidden] → […, hidden]."""
        return hidden + functional.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    """Head d predicts the token d + 2 positions after the feature, whatever lies between.

    Args:
        hidden: width of the target's hidden state.
        layers: residual layers of each head.
        outputs: each head's last matrix, hidden → logits; one module for all heads where they share it.
        bias: of the residual layers.
        ids: [k] the target's ids of the logits, where outputs have logits for some of them alone.
        vocab_size: the target's, where `ids` says which.
        logit_scale: factor of the logits.
    """

    need = FeatureNeed((FINAL,))
    ids: torch.Tensor | None

    def __init__(
        self,
        hidden: int,
        layers: int,
        outputs: Sequence[nn.Module],
        *,
        bias: bool = True,
        ids: torch.Tensor | None = None,
        vocab_size: int = 0,
        logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        heads = [nn.Sequential(*(ResidualLayer(hidden, bias=bias) for _ in range(layers))) for _ in outputs]
        self.blocks = nn.ModuleList(heads)
        self.outputs = nn.ModuleList(outputs)
        self.register_buffer("ids", ids, persistent=False)
        self._hidden, self._vocab_size, self._logit_scale = hidden, vocab_size, logit_scale

    @property
    def heads(self) -> int:
        """The number of heads."""
        return len(self.blocks)

    @property
    def empty_feature(self) -> torch.Tensor:
        """Zeros [hidden], of the dtype and on the device of features."""
        zeros: torch.Tensor = next(self.parameters()).new_zeros(self._hidden)
        return zeros

    def forward(self, features: torch.Tensor, head: int) -> torch.Tensor:
        """One head's own logits [n, width of its output] of features [n, hidden]."""
        logits: torch.Tensor = self.outputs[head](self.blocks[head](features))
        return logits * self._logit_scale

    def logits(self, head: int, features: torch.Tensor) -> torch.Tensor:
        """One head's logits [n, V or wider]; -inf for ids that it has none for."""
        own: torch.Tensor = self(features, head)
        if self.ids is None:
            return own
        wide = own.new_full((len(own), self._vocab_size), float("-inf"))
        wide[:, self.ids] = own
        return wide
