"""A draft in training as a folder: written whole, and packed to be shipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.drafters.layers.manifest import DraftManifest, TrainedKind, WeightFormat, load_manifest, pack
from paceline.drafters.layers.stack import VOCABULARY_FILE, WEIGHTS_FILE, Stack, load_tensors
from paceline.models.pull import file_digest
from paceline.models.resolve import MANIFEST_FILE
from paceline.protocol.errors import require
from paceline.runtime.files import replace_file, replace_text
from paceline_training.text_pass import learned_logits
from paceline_training.trainee import DepthLogits, Lesson, Trainee

CONFIG_FILE = "config.json"


@dataclass(frozen=True, eq=False)
class StackTrainee(Stack):
    """A stack that learns; a `Trainee`."""

    def draft_logits(self, lesson: Lesson) -> tuple[DepthLogits, ...]:  # noqa: D102
        return (DepthLogits(learned_logits(self.student, lesson.row)),)

    def save(self, folder: Path) -> None:  # noqa: D102
        save_tensors(folder / WEIGHTS_FILE, pack(self.weights(), WeightFormat.FLOAT16))
        maps = {"d2t": torch.from_numpy(self.vocabulary.d2t), "t2d": torch.from_numpy(self.vocabulary.t2d)}
        save_tensors(folder / VOCABULARY_FILE, maps)
        self.student.config.save_pretrained(folder)


def save_draft(folder: Path, trainee: Trainee, manifest: DraftManifest) -> None:
    """Write a draft; the manifest comes last, so a folder that has one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    trainee.save(folder)
    save_manifest(folder, manifest)


def save_manifest(folder: Path, manifest: DraftManifest) -> None:
    """Write or replace a draft's manifest."""
    save_config(folder / MANIFEST_FILE, asdict(manifest))


def save_config(file: Path, facts: Mapping[str, Any]) -> None:
    """Write a configuration whole or not at all."""
    replace_text(file, json.dumps(facts, indent=2) + "\n")


def save_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors whole or not at all, for everyone to read."""

    def write(temporary: Path) -> None:
        save_file(tensors, temporary, {"format": "pt"})
        temporary.chmod(0o644)  # safetensors makes files that only their owner can read

    replace_file(file, write)


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
        save_tensors(out / WEIGHTS_FILE, pack(load_tensors(folder / WEIGHTS_FILE), form))
        save_tensors(out / VOCABULARY_FILE, load_tensors(folder / VOCABULARY_FILE))
    for name in names:
        if not ours or name == CONFIG_FILE:
            shutil.copyfile(folder / name, out / name)
    files = {name: file_digest(out / name) for name in names}
    packed_manifest = replace(manifest, weights=form.value, files=files)
    save_manifest(out, packed_manifest)
    return packed_manifest


def _published_files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.is_file() and file.name != MANIFEST_FILE)
