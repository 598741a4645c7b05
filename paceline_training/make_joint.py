"""`paceline train KIND --joint`: a drafter and a target of its own, from a target's name.

The drafter is trained alone first, as without `--joint`: `OUT/work/alone` is that run's folder, a drafter of the
target as it was. Then both are trained. `OUT` gets a model's folder, and the drafter that names it.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from paceline.drafters.layers.manifest import DraftManifest, TargetFingerprint, TrainedKind
from paceline.drafters.layers.stack import WEIGHTS_FILE
from paceline.drafters.layers.student import Target
from paceline.engine.memory import available_ram
from paceline.engine.weights import chosen_device, load_decoder_config
from paceline.models.resolve import resolve
from paceline.models.tokenizer import TransformersTokenizer, load_tokenizer
from paceline.protocol.errors import InvalidInput, Unsupported, require
from paceline_training import measure
from paceline_training.checkpoint import save_draft
from paceline_training.distill import Distiller
from paceline_training.joint import JointTrainee, TargetChange, joint_trainee, target_change
from paceline_training.kinds import make_trainee, manifest_of
from paceline_training.make_draft import (
    PreparedTraining,
    TrainDraft,
    go_on,
    measure_saved,
    prepare,
    run_shown,
    train_draft,
    training_facts,
)
from paceline_training.recipe import JointRecipe, TrainRecipe
from paceline_training.teacher import TEACHER_MEMORY_BYTES
from paceline_training.trainee import Trainee

JOINT_KINDS = (TrainedKind.MEDUSA, TrainedKind.MTP)
"""Those whose authors train them with their target. Others copy its layers, or are meant for features that stay."""
_BYTES_A_WEIGHT = 20
"""Of the target: as it was, as it is, its gradient, and AdamW's two means, in float32."""
_FLOATS_A_ROW = 16
"""Of each layer, in hidden sizes, that wait for the backward pass; chosen, not tuned."""
_LOGIT_COPIES = 8
"""Of a text's logits, those of the loss and of its gradient among them; chosen, not tuned."""


def target_folder(wanted: TrainDraft) -> Path:
    """Where the new target is written: its name says what it began as."""
    began_as = resolve(wanted.target).name.partition("#")[0]
    return wanted.out / f"{Path(began_as).name}-joint"


def drafter_folder(wanted: TrainDraft) -> Path:
    """Where the new target's drafter is written."""
    return wanted.out / "drafter"


def train_joint(wanted: TrainDraft, console: Console) -> DraftManifest:
    """Train a drafter and its target, write both, and measure them.

    Raises:
        PacelineError: as `train_draft`; a kind or a target that isn't trained so, or too little memory.
    """
    joint = wanted.recipe.joint
    assert joint is not None
    refuse(wanted)
    first = replace(wanted, out=wanted.work / "alone", recipe=_alone(wanted.recipe, joint))
    resumes = wanted.resume and wanted.checkpoint.exists()
    alone = train_draft(first, console)  # refuses a folder that is in use
    ready = prepare(first, console)
    trainee = joint_trainee(ready.target, _trained_alone(first, ready), joint.drafter_weight)
    share = joint.target_learning_rate / wanted.recipe.learning_rate
    distiller = Distiller(
        ready.target.model,
        trainee,
        ready.split,
        replace(_together(wanted.recipe, joint), focus=ready.recipe.focus),
        ready.position_weights,
        dict.fromkeys(trainee.target_weights(), share),
    )
    if resumes:
        go_on(distiller, wanted.checkpoint, console)
    run_shown(wanted, distiller, lambda: None, console)
    change = _write(wanted, ready, distiller, trainee, alone)
    made = replace(wanted, target=str(target_folder(wanted)), out=drafter_folder(wanted))
    manifest = measure_saved(made, ready.split.held_out, console)
    for line in (*_comparison(alone, manifest), str(change)):
        console.print(line)
    return manifest


def refuse(wanted: TrainDraft) -> None:
    """Refuse what can't be trained so before anything is loaded.

    Raises:
        InvalidInput: another kind, or too little memory.
        Unsupported: a target that can't be written as a model's folder.
    """
    kind, limit = wanted.shape.kind, f"{' or '.join(JOINT_KINDS)}: others are made for a target that stays"
    require(kind in JOINT_KINDS, "joint", kind.value, limit)
    source = resolve(wanted.target)
    if source.kind == "table":
        raise Unsupported(f"target {source.name}: a table model has no layers to train")
    config = load_decoder_config(source, wanted.engine)
    for key in ("auto_map", "quantization_config"):
        if getattr(config, key, None):
            raise Unsupported(f"target {source.name}: --joint writes plain transformers models, not one with {key}")
    needed, available = memory_needed(wanted, config), _available(wanted)
    if needed > available:
        limit = f"one that trains in {available >> 20} MiB, which are free; with --joint it takes {needed >> 20} MiB"
        raise InvalidInput.of("target", source.name, limit)


def memory_needed(wanted: TrainDraft, config: PreTrainedConfig) -> int:
    """Bytes that training a target of such a configuration takes, roughly."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights: int = sum(weight.numel() for weight in model.parameters())
    text: Any = config.get_text_config()
    rows, hidden = wanted.generation.max_length, int(text.hidden_size)
    a_pass: int = 4 * rows * (_FLOATS_A_ROW * hidden * text.num_hidden_layers + _LOGIT_COPIES * text.vocab_size)
    texts: int = 4 * hidden * wanted.self_generate if wanted.data is None else TEACHER_MEMORY_BYTES
    return _BYTES_A_WEIGHT * weights + a_pass + 2 * min(texts, TEACHER_MEMORY_BYTES)


def _available(wanted: TrainDraft) -> int:
    device = chosen_device(wanted.engine.device)
    if device.type != "cuda":
        return available_ram()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def _alone(recipe: TrainRecipe, joint: JointRecipe) -> TrainRecipe:
    """Of the drafter before the target moves."""
    share = joint.alone_share
    return replace(recipe, joint=None, tokens=math.ceil(recipe.tokens * share), minutes=recipe.minutes * share)


def _together(recipe: TrainRecipe, joint: JointRecipe) -> TrainRecipe:
    """Of both; the drafter has warmed up on KL already."""
    share = 1 - joint.alone_share
    return replace(recipe, kl_share=0.0, tokens=math.ceil(recipe.tokens * share), minutes=recipe.minutes * share)


@torch.no_grad()
def _trained_alone(first: TrainDraft, ready: PreparedTraining) -> Trainee:
    """The drafter as its folder has it, so that what was measured is where the common steps begin."""
    drafter = make_trainee(ready.shape, ready.target, ready.vocabulary)
    written = load_file(first.out / WEIGHTS_FILE)
    for name, weight in drafter.weights().items():
        weight.copy_(written[name])
    return drafter


def _write(
    wanted: TrainDraft, ready: PreparedTraining, distiller: Distiller, trainee: JointTrainee, alone: DraftManifest
) -> TargetChange:
    """Write the target, then its drafter, which so never names a target that isn't there."""
    folder = target_folder(wanted)
    write_target(folder, trainee.target, wanted.target)
    target = Target.load(str(folder), wanted.engine)
    change = target_change(ready.target, target, measure.first_of_each(ready.split.held_out, wanted.evaluation_rows))
    began_as = {
        "target": asdict(alone.target),
        "steps": alone.training["steps"],
        "acceptance": alone.acceptance,
    }
    manifest = replace(
        manifest_of(ready.shape, TargetFingerprint.of(target), trainee.drafter, ready.facts),
        training=training_facts(wanted, distiller) | {"began_as": began_as, "target_change": asdict(change)},
        versions=measure.versions(),
    )
    save_draft(drafter_folder(wanted), trainee, manifest)
    return change


def write_target(folder: Path, model: PreTrainedModel, source: str) -> None:
    """Write a model's folder, whole or not at all, with the tokenizer of the model that it began as.

    Raises:
        Unsupported: a tokenizer that isn't the same when it is read again.
    """
    resolved = resolve(source)
    temporary = folder.with_name(f".{os.getpid()}-{folder.name}")
    try:
        model.save_pretrained(temporary)
        old = load_tokenizer(source)
        assert isinstance(old, TransformersTokenizer)  # a table is no decoder
        old.inner.save_pretrained(temporary)
        for file in temporary.iterdir():
            file.chmod(0o644)  # safetensors makes files that only their owner can read
        new = load_tokenizer(str(temporary))
        if (old.fingerprint, old.eos_token_ids) != (new.fingerprint, new.eos_token_ids):
            raise Unsupported(f"target {resolved.name}: its tokenizer is another once it is written")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _comparison(alone: DraftManifest, together: DraftManifest) -> list[str]:
    """What a round of as many tokens as there are depths accepts, before and after, by temperature."""
    steps = f"{alone.training['steps']} steps alone, {together.training['steps']} together"
    lines = [f"tokens accepted a round of {together.depth}, before and after the target was trained ({steps}):"]
    for before, after in zip(alone.acceptance["tables"], together.acceptance["tables"], strict=True):
        lengths = (each["accepted_length"][together.depth - 1] for each in (before, after))
        lines.append(f"T {after['temperature']:g} {after['part']}: " + ", ".join(f"{each:.3f}" for each in lengths))
    return lines
