"""A tiny target with a chat template, small enough to be distilled in a test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.drafters.layers.student import Target
from paceline.engine.loading import load_engine
from paceline.runtime.config import EngineSettings
from paceline_training.corpus import Row
from paceline_training.distill import Pace
from paceline_training.kinds import TraineeShape
from paceline_training.losses import Loss
from paceline_training.make_draft import TrainingJob
from paceline_training.recipe import TrainRecipe
from paceline_training.writing import GenerationRecipe, Writer
from tests.engine.tiny import llama, random_model
from tests.models.saving import byte_level_tokenizer

SETTINGS = EngineSettings(threads=1, device="cpu")
LAYERS = (0, 2)
GENERATION = GenerationRecipe(seed=5, max_length=64, user_tokens=8, shard_rows=16, batch_rows=16)


def save_target(folder: Path, seed: int = 0) -> Path:
    """Three layers, 258 byte-level ids, logits sharp enough to have something to learn."""
    tokenizer = byte_level_tokenizer()
    config = llama(vocab_size=len(tokenizer), eos_token_id=1, bos_token_id=0)
    model = random_model(config, seed)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_target(folder: Path) -> Target:
    return Target.load(str(folder), SETTINGS)


def writer(folder: Path, recipe: GenerationRecipe = GENERATION, prompts: tuple[tuple[int, ...], ...] = ()) -> Writer:
    engine = load_engine(str(folder), SETTINGS)
    return Writer(engine, load_target(folder).tokenizer, recipe, prompts)


def written(by: Writer, rows: range) -> list[Row]:
    found = {index: row for index, row in by.write(rows) if row is not None}
    return [found[index] for index in rows]


def wanted(target: Path, out: Path, tokens: int = 20_000) -> TrainingJob:
    """A whole run of the command, seconds long."""
    recipe = TrainRecipe(loss=Loss.LK, tokens=tokens, learning_rate=3e-3, warmup_steps=5, batch_rows=4)
    return TrainingJob(
        target=str(target),
        out=out,
        self_generate=4000,
        shape=TraineeShape(layers=LAYERS),
        draft_vocab=200,
        generation=GENERATION,
        recipe=recipe,
        pace=Pace(measure_steps=10, save_steps=5),
        evaluation_rows=2,
        engine=SETTINGS,
    )


def same_rows(one: list[Row], other: list[Row]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.roles, b.roles)
        and a.temperature == b.temperature
        for a, b in zip(one, other, strict=True)
    )


__all__ = ["GENERATION", "LAYERS", "SETTINGS", "load_target", "replace", "same_rows", "save_target", "wanted"]
