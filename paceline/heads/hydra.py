"""Hydra's heads: Medusa's that also read the tokens drafted before what they tell (arXiv:2402.05109, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from paceline.heads.lookahead import Tokens
from paceline.heads.medusa import ResidualLayer
from paceline.protocol.features import FeatureNeed


class JoiningLayer(nn.Module):
    """A residual layer that narrows `parts` vectors to one: R x + SiLU(W x) with x of parts · hidden."""

    def __init__(self, hidden: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(parts * hidden, hidden)
        self.res_connection = nn.Linear(parts * hidden, hidden)

    def forward(self, joined: torch.Tensor) -> torch.Tensor:
        """[…, parts · hidden] → […, hidden]."""
        narrowed: torch.Tensor = self.res_connection(joined) + functional.silu(self.linear(joined))
        return narrowed


class HydraHeads(nn.Module):
    """As a `LookaheadNetwork`: head d reads the feature and the embeddings of the d + 1 tokens behind it.

    Args:
        embedding: the target's, whose width is that of hidden states.
        need: which hidden state they read.
        layers: residual layers of each head.
        outputs: each head's last matrix, hidden → logits.
    """

    reads_tokens = True

    def __init__(self, embedding: nn.Embedding, need: FeatureNeed, layers: int, outputs: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.need = embedding, need
        hidden = embedding.embedding_dim
        behind = range(layers - 1)
        heads = [
            nn.Sequential(JoiningLayer(hidden, head + 2), *(ResidualLayer(hidden) for _ in behind))
            for head in range(len(outputs))
        ]
        self.blocks = nn.ModuleList(heads)
        self.outputs = nn.ModuleList(outputs)

    @property
    def heads(self) -> int:  # noqa: D102
        return len(self.blocks)

    @property
    def empty_feature(self) -> torch.Tensor:  # noqa: D102
        return self.embedding.weight.new_zeros(self.embedding.embedding_dim)

    def logits(self, head: int, features: torch.Tensor, paths: Sequence[Tokens]) -> torch.Tensor:
        """One head's logits [n, V or wider] of features [n, hidden], each with the `head + 1` tokens behind it."""
        tokens = torch.tensor(paths, dtype=torch.long, device=features.device)  # [n, head + 1]
        joined = torch.cat([features, self.embedding(tokens).flatten(1)], dim=-1)
        found: torch.Tensor = self.outputs[head](self.blocks[head](joined))
        return found
