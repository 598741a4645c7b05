"""The manifest of a draft's folder: what the draft is, and the target that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.drafters.layers.packing import WeightFormat
from paceline.drafters.layers.student import Target
from paceline.models.resolve import MANIFEST_FILE
from paceline.protocol.errors import InvalidInput, VocabularyMismatch, require
from paceline.protocol.given_files import read_json

FORMAT = "paceline-draft/1"


@dataclass(frozen=True)
class TargetFingerprint:
    """The target that a draft belongs to."""

    model: str
    tokenizer: str
    weights: str

    @classmethod
    def from_target(cls, target: Target) -> TargetFingerprint:
        """The fingerprint of a loaded target."""
        return cls(target.name, target.tokenizer.fingerprint, target.weights)


class TrainedKind(StrEnum):
    """The content of a draft's folder: layers of ours, or a published layout."""

    DRAFT = "draft"
    EXIT = "exit"
    MEDUSA = "medusa"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    BLOCK = "block"

    @property
    def is_stack(self) -> bool:
        """Whether it is a `Stack`: layers of the target's with a vocabulary of their own."""
        return self in (TrainedKind.DRAFT, TrainedKind.EXIT)

    @property
    def reduces(self) -> bool:
        """Whether it may have fewer ids than the target: stacks of ours, and layouts that have a map."""
        return self not in (TrainedKind.EAGLE, TrainedKind.MTP)


@dataclass(frozen=True)
class DraftManifest:
    """A draft's kind, needs and origin.

    Attributes:
        kind: what was trained, a `TrainedKind`.
        layers: of the target, that its own began as.
        borrowed_layers: the first of them, which were not trained: they are read from the target.
        depth: tokens of a round that it learned to draft, each with a loss of its own.
        needs: what the target must send: `nothing`, or `features`.
        vocabulary: `reduced`: the draft has logits for some of the target's ids.
        trees: whether it may propose trees.
        data: where the text came from, and how much of it there was.
        training: command, recipe, steps, learned tokens, seconds.
        acceptance: the tables of `paceline_training.evaluate`; empty until measured.
        versions: of the libraries that made it.
        weights: how they are written, a `WeightFormat`.
        files: SHA-256 of the files beside the manifest, by name, of a draft that was packed to be shipped.
    """

    target: TargetFingerprint
    layers: tuple[int, ...]
    draft_vocab: int
    data: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    weights: str = WeightFormat.FLOAT16.value
    files: Mapping[str, str] = field(default_factory=dict)
    kind: str = TrainedKind.DRAFT.value
    borrowed_layers: int = 0
    depth: int = 1
    needs: str = "nothing"
    vocabulary: str = "reduced"
    trees: bool = True
    format: str = FORMAT


def load_manifest(folder: Path) -> DraftManifest:
    """Read a draft's manifest.

    Raises:
        InvalidInput: there is none, or it is of another format.
    """
    value = read_json("draft", folder / MANIFEST_FILE)
    try:
        require(value.get("format") == FORMAT, "manifest format", value.get("format"), FORMAT)
        kind = value.get("kind", TrainedKind.DRAFT)
        require(kind in list(TrainedKind), "manifest kind", kind, " or ".join(TrainedKind))
        target = TargetFingerprint(**value.pop("target"))
        layers = tuple(int(layer) for layer in value.pop("layers"))
        return DraftManifest(target=target, layers=layers, **value)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput.of("draft", str(folder), f"a folder with a draft's {MANIFEST_FILE} ({error})") from error


def check_target(manifest: DraftManifest, target: Target, draft: str) -> None:
    """Refuse a draft of another target.

    Raises:
        VocabularyMismatch: the tokenizers differ.
        InvalidInput: the tokenizers agree but the weights differ.
    """
    fingerprint, tokenizer = manifest.target, target.tokenizer.fingerprint
    if fingerprint.tokenizer != tokenizer:
        raise VocabularyMismatch(
            f"draft {draft!r} was made for {fingerprint.model!r}: its tokenizer {fingerprint.tokenizer[:12]} "
            f"differs from {target.name!r}'s {tokenizer[:12]}",
            metadata={"field": "tokenizer", "value": fingerprint.tokenizer, "limit": tokenizer},
        )
    if fingerprint.weights != target.weights:
        limit = f"a draft of {target.name!r} with weights {target.weights[:12]}"
        raise InvalidInput.of("draft", f"{draft}, made for {fingerprint.model} {fingerprint.weights[:12]}", limit)
