"""The target's distributions over the draft's vocabulary, and what is learned from them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from paceline.train.corpus import Row
from paceline.train.student import learned_logits
from paceline.train.vocabulary import DraftVocabulary

GREEDY_TEMPERATURE = 0.5
"""Rows written greedily are learned at this temperature: a point mass would teach nothing but its mode.

Chosen in docs/decisions/2026-11-21-plain-training-loop.md.
"""
TEACHER_MEMORY_BYTES = 4 << 30
"""What may be kept of texts that were read; chosen, not tuned."""
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


@dataclass(frozen=True, eq=False)
class _ReadText:
    """What is kept of a text that the teacher has read: its label can be had from these without its layers."""

    hidden: torch.Tensor  # [positions, hidden size], as its head reads them
    normaliser: torch.Tensor  # [positions, 1], log of the summed exponentials over its whole vocabulary


class Teacher:
    """The target's distributions over the draft's vocabulary.

    Its layers read a text once while `memory_bytes` lasts. A text is read each
    time once that is spent, or where the head's output is not the logits
    themselves (a model that scales or caps them). Whether a text is remembered
    never changes a bit of its label.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: DraftVocabulary,
        dtype: torch.dtype,
        memory_bytes: int = TEACHER_MEMORY_BYTES,
    ) -> None:
        copied: Any = model if model.dtype == dtype else copy.deepcopy(model)
        self._model: PreTrainedModel = copied.to(dtype)
        self._width = vocabulary.target_size
        self._ids = torch.from_numpy(vocabulary.d2t).long().to(model.device)
        self._head: Any = self._model.get_output_embeddings()
        self._reduced = self._head.weight.detach()[self._ids]
        self._reduced_bias = None if self._head.bias is None else self._head.bias.detach()[self._ids]
        self._seen: dict[tuple[Row, float], _ReadText] = {}
        self._free = memory_bytes

    @torch.no_grad()
    def log_probabilities(self, row: Row, temperature: float) -> torch.Tensor:
        """Label of one text's learned positions at a temperature above 0.

        Returns:
            [positions, draft size], normalised over the target's whole vocabulary.
        """
        seen = self._seen.get((row, temperature))
        if seen is None:
            hidden, logits = self._read(row)
            normaliser = torch.logsumexp(logits / temperature, dim=-1, keepdim=True)
            if hidden is None:
                return logits[:, self._ids] / temperature - normaliser
            seen = _ReadText(hidden, normaliser)
            size = hidden.nbytes + normaliser.nbytes
            if size <= self._free:
                self._seen[row, temperature] = seen
                self._free -= size
        scores = functional.linear(seen.hidden, self._reduced, self._reduced_bias).float()
        return scores / temperature - seen.normaliser

    def _read(self, row: Row) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What the head reads [positions, hidden size], None if its output isn't the logits; and those [.., V]."""
        heads: list[tuple[torch.Tensor, torch.Tensor]] = []
        # A copy of the output: what is done to it in place behind the head must show.
        hook = self._head.register_forward_hook(lambda _, inputs, output: heads.append((inputs[0], output.clone())))
        try:
            logits = learned_logits(self._model, row)
        finally:
            hook.remove()
        hidden, output = (each.reshape(-1, each.shape[-1]) for each in heads[0])
        return hidden if torch.equal(output, logits) else None, logits[:, : self._width].float()
