"""A draft on disk, and the engine made of it.

The folder holds what training changed: layers and norm (safetensors, float16 or
int8, transformers' names beside its `config.json`), the maps between
vocabularies, and a manifest. Embedding and head rows come from the target when
the draft is loaded, so a draft only fits the target that it was made from; the
manifest's fingerprint is compared before anything is served.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from paceline.models.resolve import MANIFEST_FILE
from paceline.models.wheels import file_digest
from paceline.models.whole import refuse_incomplete
from paceline.protocol.errors import DamagedFile, InvalidInput, VocabularyMismatch, require
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline.protocol.given_files import read_json
from paceline.train.corpus import replace_file
from paceline.train.packing import WeightFormat, pack, unpack
from paceline.train.student import Target, build_student, learned_logits, trained_weights
from paceline.train.trainee import DepthLogits, Lesson, Trainee
from paceline.train.vocabulary import DraftVocabulary

WEIGHTS_FILE = "model.safetensors"
VOCABULARY_FILE = "vocabulary.safetensors"
CONFIG_FILE = "config.json"
FORMAT = "paceline-draft/1"


@dataclass(frozen=True)
class TargetFingerprint:
    """Which target a draft belongs to."""

    model: str
    tokenizer: str
    weights: str

    @classmethod
    def of(cls, target: Target) -> TargetFingerprint:
        """A loaded target's."""
        return cls(target.name, target.tokenizer.fingerprint, target.weights)


class TrainedKind(StrEnum):
    """What a draft's folder holds: layers of ours, or what others publish as this."""

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
        """Whether it may have fewer ids than the target: stacks of ours, others whose layout has a map."""
        return self not in (TrainedKind.EAGLE, TrainedKind.MTP)


@dataclass(frozen=True)
class DraftManifest:
    """What a draft is, needs, and was made from.

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
        acceptance: the tables of `paceline.train.evaluate`; empty until measured.
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


def save_draft(folder: Path, trainee: Trainee, manifest: DraftManifest) -> None:
    """Write a draft; the manifest comes last, so a folder that has one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    trainee.save(folder)
    save_manifest(folder, manifest)


@dataclass(frozen=True, eq=False)
class Stack:
    """A student in training: layers of the target's, the first `borrowed_layers` of them as they are there."""

    student: PreTrainedModel
    vocabulary: DraftVocabulary
    borrowed_layers: int = 0
    need: FeatureNeed = NO_FEATURES
    depth: int = 1

    def weights(self) -> dict[str, torch.nn.Parameter]:  # noqa: D102
        return trained_weights(self.student, self.borrowed_layers)

    def drafted(self, lesson: Lesson) -> tuple[DepthLogits, ...]:  # noqa: D102
        return (DepthLogits(learned_logits(self.student, lesson.row)),)

    def save(self, folder: Path) -> None:  # noqa: D102
        save_tensors(folder / WEIGHTS_FILE, pack(self.weights(), WeightFormat.FLOAT16))
        maps = {"d2t": torch.from_numpy(self.vocabulary.d2t), "t2d": torch.from_numpy(self.vocabulary.t2d)}
        save_tensors(folder / VOCABULARY_FILE, maps)
        self.student.config.save_pretrained(folder)


def save_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors whole or not at all, for everyone to read."""

    def write(temporary: Path) -> None:
        save_file(tensors, temporary, {"format": "pt"})
        temporary.chmod(0o644)  # safetensors makes files that only their owner can read

    replace_file(file, write)


def save_config(file: Path, facts: Mapping[str, Any]) -> None:
    """Write a configuration whole or not at all."""
    text = json.dumps(facts, indent=2) + "\n"
    replace_file(file, lambda temporary: temporary.write_text(text))


def pack_draft(folder: Path, out: Path, form: WeightFormat) -> DraftManifest:
    """Copy a draft without what only training needs, its weights in `form`, its files' digests in the manifest.

    Raises:
        InvalidInput: no whole draft there, `out` is the same folder, its weights are packed already, or a published
            layout is to have others.
    """
    manifest = load_manifest(folder)
    require(out.resolve() != folder.resolve(), "out", str(out), "another folder than the draft's")
    require(manifest.weights == WeightFormat.FLOAT16, "weights", manifest.weights, "float16, as training writes them")
    ours = TrainedKind(manifest.kind).is_stack
    layout = f"float16 for kind {manifest.kind}, whose published layout has no other"
    require(ours or form is WeightFormat.FLOAT16, "weights", form.value, layout)
    out.mkdir(parents=True, exist_ok=True)
    names = [WEIGHTS_FILE, VOCABULARY_FILE, CONFIG_FILE] if ours else _published_files(folder)
    if ours:
        save_tensors(out / WEIGHTS_FILE, pack(_load_tensors(folder / WEIGHTS_FILE), form))
        save_tensors(out / VOCABULARY_FILE, _load_tensors(folder / VOCABULARY_FILE))
    for name in names:
        if not ours or name == CONFIG_FILE:
            shutil.copyfile(folder / name, out / name)
    files = {name: file_digest(out / name) for name in names}
    packed = replace(manifest, weights=form.value, files=files)
    save_manifest(out, packed)
    return packed


def _published_files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.is_file() and file.name != MANIFEST_FILE)


def _load_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except SafetensorError as error:
        raise DamagedFile.at(file, str(error)) from error
    except OSError as error:
        raise InvalidInput.of("draft", str(file.parent), f"a whole draft ({file.name}: {error})") from error
    return tensors


def save_manifest(folder: Path, manifest: DraftManifest) -> None:
    """Write or replace a draft's manifest."""
    save_config(folder / MANIFEST_FILE, asdict(manifest))


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
    made_for, given = manifest.target, target.tokenizer.fingerprint
    if made_for.tokenizer != given:
        raise VocabularyMismatch(
            f"draft {draft!r} was made for {made_for.model!r}: its tokenizer {made_for.tokenizer[:12]} "
            f"differs from {target.name!r}'s {given[:12]}",
            metadata={"field": "tokenizer", "value": made_for.tokenizer, "limit": given},
        )
    if made_for.weights != target.weights:
        limit = f"a draft of {target.name!r} with weights {target.weights[:12]}"
        raise InvalidInput.of("draft", f"{draft}, made for {made_for.model} {made_for.weights[:12]}", limit)


@dataclass(frozen=True, eq=False)
class LoadedDraft:
    """A draft on the target's own embedding and head."""

    stack: Stack
    manifest: DraftManifest

    @property
    def student(self) -> PreTrainedModel:
        """The model."""
        return self.stack.student

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The ids that it has logits for."""
        return self.stack.vocabulary


def load_draft(folder: Path, target: Target) -> LoadedDraft:
    """Read a draft onto its target.

    Raises:
        InvalidInput: it can't be read, or is another target's.
        VocabularyMismatch: the tokenizers differ.
    """
    manifest = load_manifest(folder)
    check_target(manifest, target, folder.name)
    require(TrainedKind(manifest.kind).is_stack, "draft kind", manifest.kind, "layers of the target's: draft or exit")
    maps = _load_tensors(folder / VOCABULARY_FILE)
    require("d2t" in maps, f"{VOCABULARY_FILE} tensors", sorted(maps), "d2t among them")
    vocabulary = DraftVocabulary(maps["d2t"].numpy().astype(np.int32), target.tokenizer.vocab_size)
    student = build_student(target.model, manifest.layers, vocabulary, manifest.borrowed_layers)
    stack = Stack(student, vocabulary, manifest.borrowed_layers)
    copy_weights(folder, stack)
    return LoadedDraft(stack, manifest)


@torch.no_grad()
def copy_weights(folder: Path, stack: Stack) -> None:
    """Give a student the weights of a draft of the same layers; the vocabularies may differ.

    Raises:
        InvalidInput: they can't be read, are not all there, or belong to other layers.
    """
    weights, own = unpack(_load_tensors(folder / WEIGHTS_FILE)), stack.weights()
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    shapes = {name: tuple(weight.shape) for name, weight in own.items()}
    misshapen = {
        name: (found[name], shapes[name]) for name in shapes if found.get(name, shapes[name]) != shapes[name]
    }
    refuse_incomplete("draft", str(folder), shapes.keys() - found.keys(), misshapen)
    require(found == shapes, f"{WEIGHTS_FILE} weights", len(found), f"the {len(shapes)} of the draft's layers")
    for name, weight in own.items():
        weight.copy_(weights[name])
