"""A tiny target with a chat template, small enough to be distilled in a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.drafters.layers.stack import load_draft, load_draft_engine
from paceline.drafters.layers.student import Target, build_student
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.interface import Logits
from paceline.engine.loading import load_engine
from paceline.runtime.config import EngineSettings
from paceline_training.checkpoint import StackTrainee
from paceline_training.corpus import Row, Split, split_rows
from paceline_training.distill import Distiller, Pace
from paceline_training.kinds import TraineeShape
from paceline_training.losses import Loss
from paceline_training.make_draft import TrainingJob
from paceline_training.recipe import TrainRecipe
from paceline_training.vocabulary import choose_vocabulary
from paceline_training.writing import GenerationRecipe, Writer
from tests.engine.tiny import llama, random_model, read
from tests.models.saving import byte_level_tokenizer

Counts = dict[Row, NDArray[np.float32]]
SETTINGS = EngineSettings(threads=1, device="cpu")
LAYERS = (0, 2)
GENERATED_TOKENS = 4000
GENERATION = GenerationRecipe(seed=5, max_length=64, user_tokens=8, shard_rows=16, batch_rows=16)


def save_target(folder: Path, seed: int = 0) -> Path:
    """Three layers, 258 byte-level ids, logits sharp enough to have something to learn."""
    tokenizer = byte_level_tokenizer()
    model = random_model(llama(vocab_size=len(tokenizer), eos_token_id=1, bos_token_id=0), seed)
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
    texts = {index: row for index, row in by.write(rows) if row is not None}
    return [texts[index] for index in rows]


@dataclass(frozen=True)
class Bench:
    """A target, texts that it wrote, and ids that a draft of it has."""

    target: Target
    split: Split
    vocabulary: DraftVocabulary

    @classmethod
    def of(cls, folder: Path, rows: Sequence[Row]) -> Bench:
        target, split = load_target(folder), split_rows(rows)
        return cls(target, split, vocabulary_of(target, split))

    def distiller(self, recipe: TrainRecipe, counts: Counts | None = None) -> Distiller:
        """Learning with a draft's layers, as they are in the beginning."""
        stack = StackTrainee(build_student(self.target.model, LAYERS, self.vocabulary), self.vocabulary)
        return Distiller(self.target.model, stack, self.split, recipe, counts or {})


def vocabulary_of(target: Target, split: Split, size: int | None = 200) -> DraftVocabulary:
    """The most frequent ids of texts; None: all."""
    ids = target.tokenizer.vocab_size
    return choose_vocabulary(split.train, size or ids, ids, always=(1,))


def job(target: Path, out: Path, tokens: int = 9000) -> TrainingJob:
    """A whole run of the command, seconds long."""
    recipe = TrainRecipe(loss=Loss.LK, tokens=tokens, learning_rate=3e-3, warmup_steps=5, batch_rows=4)
    return TrainingJob(
        target=str(target),
        out=out,
        self_generate=GENERATED_TOKENS,
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


def served_as_trained(draft: Path, target: Path) -> Logits:
    """Logits of a text as a draft is served, which must be those of the network that was trained."""
    engine, trained = load_draft_engine(str(draft), SETTINGS, str(target)), load_draft(draft, load_target(target))
    tokens = range(2, 40)
    logits = read(engine, tokens)
    trained.student.set_attn_implementation("eager")
    with torch.inference_mode():
        own = trained.student(input_ids=torch.tensor([[*tokens]]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(logits[:, trained.vocabulary.d2t], own, atol=1e-4 * np.abs(own).max())
    return logits
