"""How far a draft's distribution is from the target's, as training counts it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

_SMALLEST = 1e-6
"""Below it an acceptance counts as this much, so that its logarithm is finite."""


class Loss(StrEnum):
    """What is made small. All three see the target's whole distribution, and the draft's over its own vocabulary."""

    KL = "kl"
    """Forward KL(p, q)."""
    NLA = "nla"
    """-log of the acceptance Σ min(p, q) of each position (arXiv 2602.23881)."""
    LK = "lk"
    """λ KL + (1 - λ) TV with λ = exp(-η · acceptance): KL while drafts are poor, then TV (same paper)."""


@dataclass(frozen=True)
class LabelledLogs:
    """Log-probabilities of learned positions at their temperatures, over the draft's vocabulary.

    `target` sums to the covered mass, at most 1; `draft` sums to 1.
    """

    target: torch.Tensor  # [positions, draft size]
    draft: torch.Tensor  # [positions, draft size]


def position_losses(logs: LabelledLogs, loss: Loss, hybrid_decay: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and acceptance Σ min(p, q) of each position, both [positions]; what p has outside counts as lost."""
    p, q = logs.target.exp(), logs.draft.exp()
    overlap = torch.minimum(p, q).sum(-1)
    if loss is Loss.NLA:
        return -overlap.clamp(min=_SMALLEST).log(), overlap.detach()
    divergence = (p * (logs.target - logs.draft)).sum(-1)
    if loss is Loss.KL:
        return divergence, overlap.detach()
    share = torch.exp(-hybrid_decay * overlap.detach().mean())
    return share * divergence + (1 - share) * (1 - overlap), overlap.detach()
