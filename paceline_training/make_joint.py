"""`paceline train KIND --joint`: a drafter and a target of its own, from a target's name.

The drafter is trained alone first, as without `--joint`: `OUT/work/alone` is that run's folder, a drafter of the
original target. Then both are trained. `OUT` gets the new target's folder and the folder of its drafter.
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
from paceline.engine.weights import load_decoder_config, select_device
from paceline.models.resolve import resolve
from paceline.models.tokenizer import TransformersTokenizer, load_tokenizer
from paceline.protocol.errors import InvalidInput, Unsupported, require
from paceline_training import measure
from paceline_training.checkpoint import save_draft
from paceline_training.distill import Distiller
from paceline_training.joint import JointTrainee, TargetChange, joint_trainee, target_change
from paceline_training.kinds import make_trainee, manifest_of
from paceline_training.make_draft import (
    TrainingJob,
    TrainingSetup,
    go_on,
    measure_saved,
    prepare,
    run_with_progress,
    train_draft,
    training_facts,
)
from paceline_training.recipe import JointRecipe, TrainRecipe
from paceline_training.teacher import TEACHER_MEMORY_BYTES
from paceline_training.trainee import Trainee

JOINT_KINDS = (TrainedKind.MEDUSA, TrainedKind.MTP)
"""Kinds whose authors train them with their target. The others copy its layers or need features that don't change."""
_BYTES_A_WEIGHT = 20
"""Bytes for each weight of the target in float32: original, trained copy, gradient, and AdamW's two means."""
_FLOATS_A_ROW = 16
"""Floats that each layer keeps of a row for the backward pass, in hidden sizes; chosen, not tuned."""
_LOGIT_COPIES = 8
"""Copies of a text's logits in memory, with those of the loss and of its gradient; chosen, not tuned."""


def target_folder(job: TrainingJob) -> Path:
    """Folder of the new target, named after the model that it began as."""
    began_as = resolve(job.target).name.partition("#")[0]
    return job.out / f"{Path(began_as).name}-joint"


def drafter_folder(job: TrainingJob) -> Path:
    """Folder of the new target's drafter."""
    return job.out / "drafter"


def train_joint(job: TrainingJob, console: Console) -> DraftManifest:
    """Train a drafter and its target, write both, and measure them.

    Raises:
        PacelineError: as `train_draft`; or a kind or target that can't be trained jointly, or too little memory.
    """
    joint = job.recipe.joint
    assert joint is not None
    refuse(job)
    drafter_job = replace(job, out=job.work / "alone", recipe=_drafter_recipe(job.recipe, joint))
    resumes = job.resume and job.checkpoint.exists()
    drafter_manifest = train_draft(drafter_job, console)  # refuses a folder that is in use
    setup = prepare(drafter_job, console)
    trainee = joint_trainee(setup.target, _saved_drafter(drafter_job, setup), joint.drafter_weight)
    share = joint.target_learning_rate / job.recipe.learning_rate
    distiller = Distiller(
        setup.target.model,
        trainee,
        setup.split,
        replace(_joint_recipe(job.recipe, joint), focus=setup.recipe.focus),
        setup.position_weights,
        dict.fromkeys(trainee.target_weights(), share),
    )
    if resumes:
        go_on(distiller, job.checkpoint, console)
    run_with_progress(job, distiller, lambda: None, console)
    change = _write(job, setup, distiller, trainee, drafter_manifest)
    final_job = replace(job, target=str(target_folder(job)), out=drafter_folder(job))
    manifest = measure_saved(final_job, setup.split.held_out, console)
    for line in (*_comparison(drafter_manifest, manifest), str(change)):
        console.print(line)
    return manifest


def refuse(job: TrainingJob) -> None:
    """Refuse a job that can't be trained jointly, before anything is loaded.

    Raises:
        InvalidInput: a kind that is not in `JOINT_KINDS`, or too little memory.
        Unsupported: a target that can't be written as a model's folder.
    """
    kind, limit = job.shape.kind, f"{' or '.join(JOINT_KINDS)}: other kinds need a target that doesn't change"
    require(kind in JOINT_KINDS, "joint", kind.value, limit)
    source = resolve(job.target)
    if source.kind == "table":
        raise Unsupported(f"target {source.name}: a table model has no layers to train")
    config = load_decoder_config(source, job.engine)
    for key in ("auto_map", "quantization_config"):
        if getattr(config, key, None):
            raise Unsupported(f"target {source.name}: --joint writes plain transformers models, not one with {key}")
    needed_bytes, available_bytes = training_bytes(job, config), _available_bytes(job)
    if needed_bytes > available_bytes:
        free = f"a model that trains in {available_bytes >> 20} MiB of free memory"
        limit = f"{free}: --joint needs {needed_bytes >> 20} MiB for this one"
        raise InvalidInput.of("target", source.name, limit)


def training_bytes(job: TrainingJob, config: PreTrainedConfig) -> int:
    """Bytes that training a target of such a configuration takes, roughly."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights: int = sum(weight.numel() for weight in model.parameters())
    text: Any = config.get_text_config()
    rows, hidden = job.generation.max_length, int(text.hidden_size)
    a_pass: int = 4 * rows * (_FLOATS_A_ROW * hidden * text.num_hidden_layers + _LOGIT_COPIES * text.vocab_size)
    texts: int = 4 * hidden * job.self_generate if job.data is None else TEACHER_MEMORY_BYTES
    return _BYTES_A_WEIGHT * weights + a_pass + 2 * min(texts, TEACHER_MEMORY_BYTES)


def _available_bytes(job: TrainingJob) -> int:
    device = select_device(job.engine.device)
    if device.type != "cuda":
        return available_ram()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def _drafter_recipe(recipe: TrainRecipe, joint: JointRecipe) -> TrainRecipe:
    """The recipe of the drafter's training, before the target's begins."""
    share = joint.alone_share
    return replace(recipe, joint=None, tokens=math.ceil(recipe.tokens * share), minutes=recipe.minutes * share)


def _joint_recipe(recipe: TrainRecipe, joint: JointRecipe) -> TrainRecipe:
    """The recipe of the joint training; the drafter has warmed up on KL already."""
    share = 1 - joint.alone_share
    return replace(recipe, kl_share=0.0, tokens=math.ceil(recipe.tokens * share), minutes=recipe.minutes * share)


@torch.no_grad()
def _saved_drafter(job: TrainingJob, setup: TrainingSetup) -> Trainee:
    """The drafter as it was saved, so that the joint training begins at the weights that were measured."""
    drafter = make_trainee(setup.shape, setup.target, setup.vocabulary)
    tensors = load_file(job.out / WEIGHTS_FILE)
    for name, weight in drafter.weights().items():
        weight.copy_(tensors[name])
    return drafter


def _write(
    job: TrainingJob,
    setup: TrainingSetup,
    distiller: Distiller,
    trainee: JointTrainee,
    drafter_manifest: DraftManifest,
) -> TargetChange:
    """Write the target, then its drafter, so that the drafter never names a missing target."""
    folder = target_folder(job)
    write_target(folder, trainee.target, job.target)
    target = Target.load(str(folder), job.engine)
    change = target_change(setup.target, target, measure.first_of_each(setup.split.held_out, job.evaluation_rows))
    began_as = {
        "target": asdict(drafter_manifest.target),
        "steps": drafter_manifest.training["steps"],
        "acceptance": drafter_manifest.acceptance,
    }
    manifest = replace(
        manifest_of(setup.shape, TargetFingerprint.from_target(target), trainee.drafter, setup.facts),
        training=training_facts(job, distiller) | {"began_as": began_as, "target_change": asdict(change)},
        versions=measure.versions(),
    )
    save_draft(drafter_folder(job), trainee, manifest)
    return change


def write_target(folder: Path, model: PreTrainedModel, source: str) -> None:
    """Write a model's folder, whole or not at all, with the tokenizer of `source`, the model that it began as.

    Raises:
        Unsupported: the tokenizer changes when it is written and read again.
    """
    model_source = resolve(source)
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
            raise Unsupported(f"target {model_source.name}: its tokenizer changes when it is written and read again")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _comparison(first: DraftManifest, final: DraftManifest) -> list[str]:
    """Accepted tokens of a round of full depth, before and after the joint training, by temperature."""
    steps = f"{first.training['steps']} steps alone, {final.training['steps']} together"
    lines = [f"tokens accepted a round of {final.depth}, before and after the target was trained ({steps}):"]
    for tables in zip(first.acceptance["tables"], final.acceptance["tables"], strict=True):
        lengths = ", ".join(f"{table['accepted_length'][final.depth - 1]:.3f}" for table in tables)
        lines.append(f"T {tables[1]['temperature']:g} {tables[1]['part']}: {lengths}")
    return lines
