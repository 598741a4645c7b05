"""The engines of trained drafts: stacks of ours, and published layouts by their own loaders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.drafters.formats.kinds import kind_of, load_kind
from paceline.drafters.layers.manifest import TrainedKind, check_target, load_manifest
from paceline.drafters.layers.stack import load_draft
from paceline.drafters.layers.student import Target
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.decoder import build_engine
from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.weights import select_dtype
from paceline.engine.wrapped import WrappedEngine
from paceline.models.resolve import resolve
from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import EngineSettings


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
