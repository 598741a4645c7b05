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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from paceline.engine.decoder import build_engine
from paceline.engine.interface import Engine, Logits, StepPlan
from paceline.engine.weights import chosen_dtype
from paceline.engine.wrapped import WrappedEngine
from paceline.models.resolve import MANIFEST_FILE, resolve
from paceline.models.wheels import file_digest
from paceline.models.whole import refuse_incomplete
from paceline.protocol.errors import DamagedFile, InvalidInput, VocabularyMismatch, require
from paceline.runtime.config import EngineSettings
from paceline.train.corpus import replace_file
from paceline.train.packing import WeightFormat, pack, unpack
from paceline.train.student import Target, build_student, trained_weights
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


@dataclass(frozen=True)
class DraftManifest:
    """What a draft is, needs, and was made from.

    Attributes:
        needs: what the target must send: `nothing`.
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
    needs: str = "nothing"
    vocabulary: str = "reduced"
    trees: bool = True
    format: str = FORMAT


def save_draft(folder: Path, student: PreTrainedModel, vocabulary: DraftVocabulary, manifest: DraftManifest) -> None:
    """Write a draft; the manifest comes last, so a folder that has one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_tensors(folder / WEIGHTS_FILE, pack(trained_weights(student), WeightFormat(manifest.weights)))
    maps = {"d2t": torch.from_numpy(vocabulary.d2t), "t2d": torch.from_numpy(vocabulary.t2d)}
    _save_tensors(folder / VOCABULARY_FILE, maps)
    student.config.save_pretrained(folder)
    save_manifest(folder, manifest)


def _save_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    def write(temporary: Path) -> None:
        save_file(tensors, temporary, {"format": "pt"})
        temporary.chmod(0o644)  # safetensors makes files that only their owner can read

    replace_file(file, write)


def pack_draft(folder: Path, out: Path, form: WeightFormat) -> DraftManifest:
    """Copy a draft without what only training needs, its weights in `form`, its files' digests in the manifest.

    Raises:
        InvalidInput: no whole draft there, `out` is the same folder, or its weights are packed already.
    """
    manifest = load_manifest(folder)
    require(out.resolve() != folder.resolve(), "out", str(out), "another folder than the draft's")
    require(manifest.weights == WeightFormat.FLOAT16, "weights", manifest.weights, "float16, as training writes them")
    out.mkdir(parents=True, exist_ok=True)
    _save_tensors(out / WEIGHTS_FILE, pack(_load_tensors(folder / WEIGHTS_FILE), form))
    _save_tensors(out / VOCABULARY_FILE, _load_tensors(folder / VOCABULARY_FILE))
    shutil.copyfile(folder / CONFIG_FILE, out / CONFIG_FILE)
    files = {name: file_digest(out / name) for name in (WEIGHTS_FILE, VOCABULARY_FILE, CONFIG_FILE)}
    packed = replace(manifest, weights=form.value, files=files)
    save_manifest(out, packed)
    return packed


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
    text = json.dumps(asdict(manifest), indent=2) + "\n"
    replace_file(folder / MANIFEST_FILE, lambda file: file.write_text(text))


def load_manifest(folder: Path) -> DraftManifest:
    """Read a draft's manifest.

    Raises:
        InvalidInput: there is none, or it is of another format.
    """
    try:
        value = json.loads((folder / MANIFEST_FILE).read_text())
        require(value.get("format") == FORMAT, "manifest format", value.get("format"), FORMAT)
        target = TargetFingerprint(**value.pop("target"))
        layers = tuple(int(layer) for layer in value.pop("layers"))
        return DraftManifest(target=target, layers=layers, **value)
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
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

    student: PreTrainedModel
    vocabulary: DraftVocabulary
    manifest: DraftManifest


def load_draft(folder: Path, target: Target) -> LoadedDraft:
    """Read a draft onto its target.

    Raises:
        InvalidInput: it can't be read, or is another target's.
        VocabularyMismatch: the tokenizers differ.
    """
    manifest = load_manifest(folder)
    check_target(manifest, target, folder.name)
    maps = _load_tensors(folder / VOCABULARY_FILE)
    require("d2t" in maps, f"{VOCABULARY_FILE} tensors", sorted(maps), "d2t among them")
    vocabulary = DraftVocabulary(maps["d2t"].numpy().astype(np.int32), target.tokenizer.vocab_size)
    student = build_student(target.model, manifest.layers, vocabulary)
    copy_weights(folder, student)
    return LoadedDraft(student, vocabulary, manifest)


@torch.no_grad()
def copy_weights(folder: Path, student: PreTrainedModel) -> None:
    """Give a student the weights of a draft of the same layers; the vocabularies may differ.

    Raises:
        InvalidInput: they can't be read, are not all there, or belong to other layers.
    """
    weights, own = unpack(_load_tensors(folder / WEIGHTS_FILE)), trained_weights(student)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    shapes = {name: tuple(weight.shape) for name, weight in own.items()}
    misshapen = {
        name: (found[name], shapes[name]) for name in shapes if found.get(name, shapes[name]) != shapes[name]
    }
    refuse_incomplete("draft", str(folder), shapes.keys() - found.keys(), misshapen)
    require(found == shapes, f"{WEIGHTS_FILE} weights", len(found), f"the {len(shapes)} of the draft's layers")
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
    target = Target.load(target_model or load_manifest(folder).target.model, settings)
    draft = load_draft(folder, target)
    student: Any = draft.student
    student.requires_grad_(False)
    wanted = chosen_dtype(settings.dtype, student.device)
    student.to(torch.float16 if wanted == "auto" else wanted)
    inner = build_engine(student, target.tokenizer, settings, resolve(model).name, reduced_head=True)
    return ReducedVocabularyEngine(inner, draft.vocabulary)
