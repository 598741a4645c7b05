"""A draft of the target's own layers, read from its folder.

The folder holds what training changed: layers and norm (safetensors, float16 or
int8, transformers' names beside its `config.json`), the maps between
vocabularies, and a manifest. Embedding and head rows come from the target when
the draft is loaded, so a draft only fits the target that it was made from; the
manifest's fingerprint is compared before anything is served.

The engines of trained drafts: stacks of ours, and published layouts by their own loaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from paceline.drafters.formats.kinds import kind_of, load_kind
from paceline.drafters.layers.manifest import TrainedKind, check_target, load_manifest, unpack
from paceline.drafters.layers.student import Target, build_student, trained_weights
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.decoder import build_engine
from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.weights import select_dtype
from paceline.engine.wrapped import WrappedEngine
from paceline.models.resolve import resolve
from paceline.models.whole import refuse_incomplete
from paceline.protocol.errors import DamagedFile, InvalidInput, require
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline.runtime.config import EngineSettings

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


class ReducedVocabularyEngine(WrappedEngine):
    """A draft's engine seen in the target's vocabulary: logits are -inf for ids that the draft lacks.

    `Engine` says what its methods promise. No id outside the draft's
    vocabulary can be drawn from such logits; the target may still emit it.
    """

    def __init__(self, inner: Engine, vocabulary: DraftVocabulary) -> None:
        super().__init__(inner)
        self._vocabulary = vocabulary

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        return [self._vocabulary.scatter(logits) for logits in self._inner.step(plan)]


def load_draft_engine(model: str, settings: EngineSettings, target_model: str | None = None) -> Engine:
    """Load a draft's folder as a drafter's engine, on the calling thread.

    Args:
        model: the folder.
        settings: as for any engine; the target is loaded with them once, for its embedding and head.
        target_model: the target that will be drafted for; None: the one that the manifest names.

    Raises:
        InvalidInput: the target is not there, or the draft is another target's.
        VocabularyMismatch: the tokenizers differ.
    """
    folder = Path(model).expanduser()
    manifest = load_manifest(folder)
    target_model = target_model or manifest.target.model
    target = Target.load(target_model, settings)
    if not TrainedKind(manifest.kind).is_stack:
        check_target(manifest, target, folder.name)
        kind = kind_of(folder)
        if kind is None:
            limit = "whole: beside its manifest it has none of the published layouts"
            raise InvalidInput.of("draft", str(folder), limit)
        return load_kind(kind, folder, target_model, settings)
    draft = load_draft(folder, target)
    student: Any = draft.student
    student.requires_grad_(False)
    dtype_choice = select_dtype(settings.dtype, student.device)
    student.to(torch.float16 if dtype_choice == "auto" else dtype_choice)
    inner = build_engine(student, target.tokenizer, settings, resolve(model).name, reduced_head=True)
    return ReducedVocabularyEngine(inner, draft.vocabulary)
