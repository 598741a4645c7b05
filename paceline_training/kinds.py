"""What can be trained for a target, and how each kind begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.drafters.layers.manifest import DraftManifest, TargetFingerprint, TrainedKind
from paceline.drafters.layers.student import Target, build_student
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.protocol.errors import require
from paceline_training.block import block_trainee
from paceline_training.checkpoint import StackTrainee
from paceline_training.eagle import eagle1_trainee, eagle3_trainee
from paceline_training.evaluate import MAX_K
from paceline_training.medusa import medusa_trainee
from paceline_training.mtp import mtp_trainee
from paceline_training.trainee import Trainee

_EXIT_SHARE = 5
"""The default exit stands after the first 1 / 5 of the target's layers; chosen, not tuned."""


_DEPTHS = {
    TrainedKind.MEDUSA: 4,
    TrainedKind.EAGLE: 3,
    TrainedKind.EAGLE3: 4,
    TrainedKind.MTP: 3,
    TrainedKind.BLOCK: 8,
}
"""Chosen, not tuned: rounds of small targets rarely accept more."""


def default_layers(count: int) -> tuple[int, ...]:
    """The first three layers and the last, as in the default draft (docs/reports/draft-default-2026-11-21.md)."""
    return tuple(sorted({layer for layer in (0, 1, 2, count - 1) if 0 <= layer < count}))


@dataclass(frozen=True)
class TraineeShape:
    """What is trained.

    Attributes:
        layers: for a `draft`: the target's layers that it is copied from; empty: the first three and the last.
        exit_layer: for an `exit`: the number of the target's layers before it; 0: a fifth of them.
        depth: for the other kinds: tokens of a round that they learn to draft, which are Medusa's heads, EAGLE's and
            MTP's steps, or the places of a block; 0: the kind's default.
    """

    kind: TrainedKind = TrainedKind.DRAFT
    layers: tuple[int, ...] = ()
    exit_layer: int = 0
    depth: int = 0

    def on(self, target: Target) -> TraineeShape:
        """This shape with the defaults that depend on the target filled in.

        Raises:
            InvalidInput: `exit_layer` is not before the target's last layer, or `depth` is out of bounds.
        """
        count = target.model.config.get_text_config().num_hidden_layers
        if self.kind is TrainedKind.EXIT:
            exit_layer = self.exit_layer or max(1, count // _EXIT_SHARE)
            require(0 < exit_layer < count, "exit_layer", exit_layer, f"in [1, {count - 1}]")
            return replace(self, exit_layer=exit_layer, layers=(*range(exit_layer), count - 1))
        if self.kind is TrainedKind.DRAFT:
            return replace(self, layers=self.layers or default_layers(count))
        depth = self.depth or _DEPTHS[self.kind]
        least = 2 if self.kind is TrainedKind.BLOCK else 1  # a block has a masked place
        require(least <= depth <= MAX_K, "depth", depth, f"in [{least}, {MAX_K}]")
        return replace(self, depth=depth)


def make_trainee(shape: TraineeShape, target: Target, vocabulary: DraftVocabulary) -> Trainee:
    """A network before its first step.

    Raises:
        InvalidInput: layers that the target lacks.
        Unsupported: a target that such a network can't be made for.
    """
    match shape.kind:
        case TrainedKind.DRAFT | TrainedKind.EXIT:
            exit_layer = shape.exit_layer
            student = build_student(target.model, shape.layers, vocabulary, exit_layer)
            return StackTrainee(student, vocabulary, exit_layer)
        case TrainedKind.MEDUSA:
            return medusa_trainee(target, vocabulary, shape.depth)
        case TrainedKind.EAGLE:
            return eagle1_trainee(target, vocabulary, shape.depth)
        case TrainedKind.EAGLE3:
            return eagle3_trainee(target, vocabulary, shape.depth)
        case TrainedKind.MTP:
            return mtp_trainee(target, vocabulary, shape.depth)
        case TrainedKind.BLOCK:
            return block_trainee(target, vocabulary, shape.depth)


def manifest_of(
    shape: TraineeShape, target: TargetFingerprint, trainee: Trainee, data: Mapping[str, Any]
) -> DraftManifest:
    """What a trainee's manifest says before it is trained."""
    return DraftManifest(
        target,
        shape.layers,
        trainee.vocabulary.size,
        data,
        kind=shape.kind.value,
        borrowed_layers=shape.exit_layer,
        depth=trainee.depth,
        needs="features" if trainee.need.any else "nothing",
        vocabulary="reduced" if shape.kind.reduces else "whole",
    )
