"""The target's distributions over the draft's vocabulary, and what is learned from them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.hidden_states import offered, watched
from paceline.protocol.errors import Unsupported
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline_training.corpus import Row
from paceline_training.text_pass import learned_logits
from paceline_training.trainee import Lesson

GREEDY_TEMPERATURE = 0.5
"""Rows written greedily are learned at this temperature: a point mass would teach nothing but its mode.

Chosen in docs/decisions/2026-11-21-plain-training-loop.md.
"""
TEACHER_MEMORY_BYTES = 4 << 30
"""What may be kept of texts that were read; chosen, not tuned."""


def _check_need(model: PreTrainedModel, need: FeatureNeed) -> None:
    """Refuse hidden states that a target doesn't have.

    Raises:
        Unsupported: naming the layer, or the model whose layers can't be told.
    """
    if need.any:
        offer = offered(model)
        if offer is None:
            raise Unsupported(
                f"{type(model).__name__}: its layers can't be told, so their hidden states can't be read"
            )
        offer.check(need)


def read_row(model: PreTrainedModel, row: Row, need: FeatureNeed) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass over a text, with gradients where the model has them.

    Returns:
        [learned tokens, head width] logits; [tokens - 1, layers · hidden] what is needed, layers joined.
    """
    with watched(model, set(need.layers)) as states:
        logits = learned_logits(model, row)
    parts = [states[layer] for layer in need.layers]
    return logits, torch.cat(parts, dim=-1) if parts else torch.empty(len(row.token_ids) - 1, 0)


@dataclass(frozen=True, eq=False)
class _ReadText:
    """What is kept of a text that the teacher has read: its lesson can be had from these without its layers."""

    hidden: torch.Tensor  # [learned tokens, hidden size], as its head reads them
    normaliser: torch.Tensor  # [learned tokens, 1], log of the summed exponentials over its whole vocabulary
    features: torch.Tensor  # [tokens - 1, layers · hidden size]

    @property
    def nbytes(self) -> int:
        return self.hidden.nbytes + self.normaliser.nbytes + self.features.nbytes


class Teacher:
    """The target's distributions over the draft's vocabulary, and the hidden states that a trainee needs.

    Its layers read a text once while `memory_bytes` lasts. A text is read each
    time once that is spent, or where the head's output is not the logits
    themselves (a model that scales or caps them). Whether a text is remembered
    never changes a bit of its lesson.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: DraftVocabulary,
        dtype: torch.dtype,
        need: FeatureNeed = NO_FEATURES,
        memory_bytes: int = TEACHER_MEMORY_BYTES,
    ) -> None:
        _check_need(model, need)
        copied: Any = model if model.dtype == dtype else copy.deepcopy(model)
        self._model: PreTrainedModel = copied.to(dtype)
        self._need = need
        self._width = vocabulary.target_size
        self._ids = torch.from_numpy(vocabulary.d2t).long().to(model.device)
        self._head: Any = self._model.get_output_embeddings()
        self._reduced = self._head.weight.detach()[self._ids]
        self._reduced_bias = None if self._head.bias is None else self._head.bias.detach()[self._ids]
        self._seen: dict[tuple[Row, float], _ReadText] = {}
        self._free = memory_bytes

    @torch.no_grad()
    def lesson(self, row: Row, temperature: float) -> Lesson:
        """One text's features, and the distributions of its learned tokens at a temperature above 0.

        Labels are normalised over the target's whole vocabulary.
        """
        seen = self._seen.get((row, temperature))
        if seen is None:
            hidden, logits, features = self._read(row)
            normaliser = torch.logsumexp(logits / temperature, dim=-1, keepdim=True)
            if hidden is None:
                return Lesson(row, logits[:, self._ids] / temperature - normaliser, features.float())
            seen = _ReadText(hidden, normaliser, features)
            if seen.nbytes <= self._free:
                self._seen[row, temperature] = seen
                self._free -= seen.nbytes
        scores = functional.linear(seen.hidden, self._reduced, self._reduced_bias).float()
        return Lesson(row, scores / temperature - seen.normaliser, seen.features.float())

    def _read(self, row: Row) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """What the head reads [learned, hidden size], None if its output isn't the logits; those; the features."""
        heads: list[tuple[torch.Tensor, torch.Tensor]] = []
        # A copy of the output: what is done to it in place behind the head must show.
        hook = self._head.register_forward_hook(lambda _, inputs, output: heads.append((inputs[0], output.clone())))
        try:
            logits, features = read_row(self._model, row, self._need)
        finally:
            hook.remove()
        hidden, output = (each.reshape(-1, each.shape[-1]) for each in heads[0])
        return hidden if torch.equal(output, logits) else None, logits[:, : self._width].float(), features
