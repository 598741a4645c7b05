"""The target's distributions over the draft's vocabulary, and what is learned from them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.hidden_states import capture_states, feature_offer
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
"""Memory for the states of texts that were read; chosen, not tuned."""


def _check_need(model: PreTrainedModel, need: FeatureNeed) -> None:
    """Refuse hidden states that a target doesn't have.

    Raises:
        Unsupported: naming the layer, or the model whose layers aren't recognised.
    """
    if need.any:
        offer = feature_offer(model)
        if offer is None:
            raise Unsupported(
                f"{type(model).__name__}: its layers aren't recognised, so their hidden states can't be read"
            )
        offer.check(need)


def read_row(model: PreTrainedModel, row: Row, need: FeatureNeed) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass over a text, with gradients where the model has them.

    Returns:
        [learned tokens, head width] logits; [tokens - 1, layers · hidden] the needed hidden states, layers joined.
    """
    with capture_states(model, set(need.layers)) as states:
        logits = learned_logits(model, row)
    parts = [states[layer] for layer in need.layers]
    return logits, torch.cat(parts, dim=-1) if parts else torch.empty(len(row.token_ids) - 1, 0)


@dataclass(frozen=True, eq=False)
class _TextStates:
    """States of a text that the teacher has read. Its lesson follows from them without a pass through the layers."""

    hidden: torch.Tensor  # [learned tokens, hidden size], as its head reads them
    normaliser: torch.Tensor  # [learned tokens, 1], log of the summed exponentials over its whole vocabulary
    features: torch.Tensor  # [tokens - 1, layers · hidden size]

    @property
    def nbytes(self) -> int:
        return self.hidden.nbytes + self.normaliser.nbytes + self.features.nbytes


class Teacher:
    """The target's distributions over the draft's vocabulary, and the hidden states that a trainee needs.

    The layers read a text once and its states are kept while `memory_bytes`
    lasts. A text without kept states is read every time, as is every text of a
    model that scales or caps its head's output. Kept states never change a bit
    of a lesson.
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
        teacher_model: Any = model if model.dtype == dtype else copy.deepcopy(model)
        self._model: PreTrainedModel = teacher_model.to(dtype)
        self._need = need
        self._width = vocabulary.target_size
        self._ids = torch.from_numpy(vocabulary.d2t).long().to(model.device)
        self._head: Any = self._model.get_output_embeddings()
        self._head_rows = self._head.weight.detach()[self._ids]
        self._head_bias = None if self._head.bias is None else self._head.bias.detach()[self._ids]
        self._texts: dict[tuple[Row, float], _TextStates] = {}
        self._free = memory_bytes

    @torch.no_grad()
    def lesson(self, row: Row, temperature: float) -> Lesson:
        """One text's features, and the distributions of its learned tokens at a temperature above 0.

        Labels are normalised over the target's whole vocabulary.
        """
        states = self._texts.get((row, temperature))
        if states is None:
            hidden, logits, features = self._read_text(row)
            normaliser = torch.logsumexp(logits / temperature, dim=-1, keepdim=True)
            if hidden is None:
                return Lesson(row, logits[:, self._ids] / temperature - normaliser, features.float())
            states = _TextStates(hidden, normaliser, features)
            if states.nbytes <= self._free:
                self._texts[row, temperature] = states
                self._free -= states.nbytes
        scores = functional.linear(states.hidden, self._head_rows, self._head_bias).float()
        return Lesson(row, scores / temperature - states.normaliser, states.features.float())

    def _read_text(self, row: Row) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """One pass of the teacher over a text.

        Returns:
            The head's input [learned tokens, hidden size], or None if the head's output isn't the logits; the
            logits [learned tokens, width]; the features.
        """
        heads: list[tuple[torch.Tensor, torch.Tensor]] = []
        # A copy of the output: what is done to it in place behind the head must show.
        hook = self._head.register_forward_hook(lambda _, inputs, output: heads.append((inputs[0], output.clone())))
        try:
            logits, features = read_row(self._model, row, self._need)
        finally:
            hook.remove()
        hidden, output = (each.reshape(-1, each.shape[-1]) for each in heads[0])
        return hidden if torch.equal(output, logits) else None, logits[:, : self._width].float(), features
