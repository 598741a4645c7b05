"""A draft of the target's own layers, read from its folder.

The folder holds what training changed: layers and norm (safetensors, float16 or
int8, transformers' names beside its `config.json`), the maps between
vocabularies, and a manifest. Embedding and head rows come from the target when
the draft is loaded, so a draft only fits the target that it was made from; the
manifest's fingerprint is compared before anything is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from paceline.drafters.layers.manifest import TrainedKind, check_target, load_manifest
from paceline.drafters.layers.packing import unpack
from paceline.drafters.layers.student import Target, build_student, trained_weights
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.models.whole import refuse_incomplete
from paceline.protocol.errors import DamagedFile, InvalidInput, require
from paceline.protocol.features import NO_FEATURES, FeatureNeed

WEIGHTS_FILE = "model.safetensors"
VOCABULARY_FILE = "vocabulary.safetensors"


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers of the target's, the first `borrowed_layers` of them as they are there."""

    student: PreTrainedModel
    vocabulary: DraftVocabulary
    borrowed_layers: int = 0
    need: FeatureNeed = NO_FEATURES
    depth: int = 1

    def weights(self) -> dict[str, torch.nn.Parameter]:
        """Name → weight of all that is the draft's own."""
        return trained_weights(self.student, self.borrowed_layers)


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """A file's tensors by name.

    Raises:
        DamagedFile: it is no safetensors file, or not all of one.
        InvalidInput: it can't be read.
    """
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except SafetensorError as error:
        raise DamagedFile.at(file, str(error)) from error
    except OSError as error:
        raise InvalidInput.of("draft", str(file.parent), f"a whole draft ({file.name}: {error})") from error
    return tensors


def load_draft(folder: Path, target: Target) -> Stack:
    """Read a draft onto its target.

    Raises:
        InvalidInput: it can't be read, or is another target's.
        VocabularyMismatch: the tokenizers differ.
    """
    manifest = load_manifest(folder)
    check_target(manifest, target, folder.name)
    require(TrainedKind(manifest.kind).is_stack, "draft kind", manifest.kind, "layers of the target's: draft or exit")
    maps = load_tensors(folder / VOCABULARY_FILE)
    require("d2t" in maps, f"{VOCABULARY_FILE} tensors", sorted(maps), "d2t among them")
    vocabulary = DraftVocabulary(maps["d2t"].numpy().astype(np.int32), target.tokenizer.vocab_size)
    student = build_student(target.model, manifest.layers, vocabulary, manifest.borrowed_layers)
    stack = Stack(student, vocabulary, manifest.borrowed_layers)
    copy_weights(folder, stack)
    return stack


@torch.no_grad()
def copy_weights(folder: Path, stack: Stack) -> None:
    """Give a student the weights of a draft of the same layers; the vocabularies may differ.

    Raises:
        InvalidInput: they can't be read, are not all there, or belong to other layers.
    """
    weights, own = unpack(load_tensors(folder / WEIGHTS_FILE)), stack.weights()
    file_shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    shapes = {name: tuple(weight.shape) for name, weight in own.items()}
    pairs = {name: (file_shapes.get(name, shape), shape) for name, shape in shapes.items()}
    misshapen = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    refuse_incomplete("draft", str(folder), shapes.keys() - file_shapes.keys(), misshapen)
    limit = f"the {len(shapes)} of the draft's layers"
    require(file_shapes == shapes, f"{WEIGHTS_FILE} weights", len(file_shapes), limit)
    for name, weight in own.items():
        weight.copy_(weights[name])
