"""The student: chosen layers of the target, with its norm, its embedding, and the rows of its head that it needs.

Embedding and head stay the target's own and are never trained, so a checkpoint
holds layers and norm alone; of an early exit (LayerSkip, arXiv 2404.16710, §4)
the first layers are the target's own too, and what is trained is the exit behind
them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.cpu.linear import frozen_linear
from paceline.engine.fingerprint import weights_digest
from paceline.engine.forward import ATTENTION_NAME
from paceline.engine.weights import keep_layers, layers_of, load_decoder
from paceline.models.resolve import resolve
from paceline.models.tokenizer import Tokenizer, load_tokenizer
from paceline.protocol.errors import Unsupported, require
from paceline.runtime.config import EngineSettings


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded target, from which students are made and learn."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    name: str
    weights: str
    """Digest of its weights, as float32."""

    @classmethod
    def load(cls, model: str, settings: EngineSettings) -> Target:
        """Load a model in float32 on the configured device.

        Raises:
            InvalidInput: the name or a setting is out of its limits.
            Unsupported: a table, or a model that can't be packed.
        """
        source = resolve(model)
        if source.kind == "table":
            raise Unsupported(f"target {model}: a table model has no layers to make a draft from")
        exact = settings.model_copy(update={"dtype": "float32"})
        decoder = load_decoder(source, exact)
        decoder.train(False)
        decoder.requires_grad_(False)
        decoder.set_attn_implementation(ATTENTION_NAME)
        tokenizer = load_tokenizer(model, trust_remote_code=settings.trust_remote_code)
        return cls(decoder, tokenizer, source.name, weights_digest(decoder))


def build_student(
    target: PreTrainedModel, layers: Sequence[int], vocabulary: DraftVocabulary, borrowed_layers: int = 0
) -> PreTrainedModel:
    """Copy the chosen layers and the norm; embedding and head rows stay the target's values, frozen.

    So do the first `borrowed_layers` of the chosen layers, which must be the target's first.

    Raises:
        InvalidInput: a layer that the target lacks, or none.
    """
    require(list(layers) == sorted(set(layers)), "layers", tuple(layers), "ascending")
    first = tuple(range(borrowed_layers))
    require(tuple(layers[:borrowed_layers]) == first, "layers", tuple(layers), f"{first} first, the target's own")
    # Weights are shared until it is known which of them are kept.
    student = copy.deepcopy(target, {id(weight): weight for weight in target.parameters()})
    keep_layers(student, tuple(layers))
    _reduce_head(student, vocabulary)
    frozen_ids = {id(weight) for weight in _borrowed_weights(student, borrowed_layers)}
    for module in student.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) not in frozen_ids:
                setattr(module, name, torch.nn.Parameter(weight.detach().clone()))
    student.train(False)  # no dropout: the teacher's distribution is the label
    return student


def trained_weights(student: PreTrainedModel, borrowed_layers: int = 0) -> dict[str, torch.nn.Parameter]:
    """Name → weight of all that is the student's own."""
    borrowed_ids = {id(weight) for weight in _borrowed_weights(student, borrowed_layers)}
    return {name: weight for name, weight in student.named_parameters() if id(weight) not in borrowed_ids}


def _reduce_head(student: PreTrainedModel, vocabulary: DraftVocabulary) -> None:
    head: Any = student.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise Unsupported(f"{type(student).__name__}: its output head is {type(head).__name__}, not a linear layer")
    rows = torch.from_numpy(vocabulary.d2t).long().to(head.weight.device)
    bias = None if head.bias is None else head.bias.detach()[rows].clone()
    student.config.get_text_config().tie_word_embeddings = False
    student.config.tie_word_embeddings = False
    student.set_output_embeddings(frozen_linear(head.weight.detach()[rows].clone(), bias))


def _borrowed_weights(student: PreTrainedModel, layers: int) -> list[torch.nn.Parameter]:
    modules: list[Any] = [student.get_input_embeddings(), student.get_output_embeddings()]
    if layers:
        modules += layers_of(student)[:layers]
    return [weight for module in modules for weight in module.parameters()]
