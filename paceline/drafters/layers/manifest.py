"""The manifest of a draft's folder: what the draft is, and the target that it belongs to.

Weights on disk: float16 as they are, or int8 rows with a scale each, half the size again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from paceline.drafters.layers.student import Target
from paceline.engine.cpu.row_products import in_int8
from paceline.models.resolve import MANIFEST_FILE
from paceline.protocol.errors import InvalidInput, VocabularyMismatch, require
from paceline.protocol.given_files import read_json

_SCALE = ".scale"

Tensors = dict[str, torch.Tensor]


class WeightFormat(StrEnum):
    """The format of a draft's weights on disk."""

    FLOAT16 = "float16"
    INT8 = "int8"
    """Matrices in int8, symmetric, with a float32 scale a row; vectors in float16."""


def pack(weights: Mapping[str, torch.Tensor], form: WeightFormat) -> Tensors:
    """Weights as they are written; int8 is at most half of a row's largest / 127 away from the original."""
    tensors: Tensors = {}
    for name, weight in weights.items():
        whole = weight.detach().cpu()
        if form is WeightFormat.FLOAT16 or whole.ndim < 2:
            tensors[name] = whole.half().contiguous()
            continue
        tensors[name], tensors[name + _SCALE] = in_int8(whole.float())
    return tensors


def unpack(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The weights that `pack` wrote, as close as its format allows: float32 where it was int8, else as stored.

    Raises:
        InvalidInput: a row's scale is missing or of another shape.
    """
    return {name: _unpack_tensor(name, tensors) for name in tensors if not name.endswith(_SCALE)}


def _unpack_tensor(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensors[name]
    if tensor.dtype != torch.int8:
        return tensor
    scale = tensors.get(name + _SCALE, torch.empty(0))
    shape = (len(tensor), 1)
    require(tuple(scale.shape) == shape, f"weights {name}{_SCALE}", tuple(scale.shape), f"of shape {shape}")
    return tensor.float() * scale


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
