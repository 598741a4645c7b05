"""Networks that read the target's features: trained, written as published, and served as they were trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from draft_service.drafters.catalogue import build_catalogue
from paceline.drafters.layers.manifest import TargetFingerprint, TrainedKind, WeightFormat, load_manifest
from paceline.drafters.layers.stack import WEIGHTS_FILE, load_draft_engine
from paceline.drafters.layers.student import Target
from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.fingerprint import weights_digest
from paceline.engine.forward import AttentionCall
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.protocol.features import EMBEDDING, FINAL, FeatureNeed
from paceline.runtime.config import DraftConfig
from paceline_training.checkpoint import pack_draft, save_draft
from paceline_training.corpus import Row, read_shards, split_rows
from paceline_training.distill import Distiller
from paceline_training.evaluate import by_depth
from paceline_training.kinds import TraineeShape, make_trainee, manifest_of
from paceline_training.losses import Loss
from paceline_training.make_draft import train_draft
from paceline_training.recipe import TrainRecipe
from paceline_training.teacher import Teacher
from paceline_training.trainee import Lesson, Trainee
from paceline_training.unrolled import UnrolledAttention
from tests.training.tiny_target import SETTINGS, job, load_target, save_target, vocabulary_of

KINDS = (TrainedKind.MEDUSA, TrainedKind.EAGLE, TrainedKind.EAGLE3, TrainedKind.MTP, TrainedKind.BLOCK)
DEPTH = 3
WHOLE = DraftVocabulary(np.arange(258, dtype=np.int32), 258)
RECIPE = TrainRecipe(loss=Loss.KL, tokens=4200, learning_rate=3e-3, warmup_steps=5, batch_rows=4)
TOLERANCE = 1e-3
"""Of logits of some tens: what float32 leaves."""


class Trained(NamedTuple):
    """A trainee after some steps, its figures, what its teacher says of a text, and the folder it was written to."""

    trainee: Trainee
    losses: list[float]
    held_out: tuple[float, float]
    lesson: Lesson
    folder: Path


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return load_target(target_folder)


@pytest.fixture(scope="module", params=KINDS)
def trained(
    request: pytest.FixtureRequest, target: Target, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    shape = TraineeShape(request.param, depth=DEPTH).on(target)
    split = split_rows(read_shards(corpus_folder))
    vocabulary = vocabulary_of(target, split, 200 if shape.kind.reduces else None)
    trainee = make_trainee(shape, target, vocabulary)
    tokens = 6000 if shape.kind is TrainedKind.MEDUSA else RECIPE.tokens  # its heads learn the slowest
    learner = Distiller(target.model, trainee, split, replace(RECIPE, tokens=tokens))
    before, losses = learner.measure_held_out(), []
    while not learner.is_done:
        losses.append(learner.step().loss)
    folder = tmp_path_factory.mktemp("trained") / shape.kind.value
    made_for = TargetFingerprint(target.name, target.tokenizer.fingerprint, target.weights)
    save_draft(folder, trainee, manifest_of(shape, made_for, trainee, {}))
    after = learner.measure_held_out()
    as_written(trainee)
    teacher = Teacher(target.model, vocabulary, torch.float32, trainee.need)
    return Trained(trainee, losses, (before, after), teacher.lesson(split.held_out[0], 1.0), folder)


@torch.no_grad()
def as_written(trainee: Trainee) -> None:
    """Round a network's weights to what its folder holds."""
    for weight in trainee.weights().values():
        weight.copy_(weight.half())


def test_it_learns(trained: Trained) -> None:
    assert 20 <= len(trained.losses) <= 60
    assert np.mean(trained.losses[-5:]) < np.mean(trained.losses[:5])
    before, after = trained.held_out
    assert after > before + 0.02


def test_what_is_trained_is_written_and_nothing_of_the_targets(trained: Trained, target: Target) -> None:
    tensors = load_file(trained.folder / WEIGHTS_FILE)
    assert set(trained.trainee.weights()) == set(tensors) - {"d2t", "t2d", "token_map"}
    assert not any("embed" in name or "lm_head" in name for name in tensors)
    assert weights_digest(target.model) == target.weights
    manifest = load_manifest(trained.folder)
    assert (manifest.needs, manifest.target.weights) == ("features", target.weights)


def furthest(trained: Trained, lesson: Lesson, target: Path) -> float:
    """The largest difference between what is served of a text, and what the network in training says of a lesson."""
    engine: Any = load_draft_engine(str(trained.folder), SETTINGS, str(target))
    ids = trained.trainee.vocabulary.d2t
    row, places = lesson.row, trained.lesson.places
    features = trained.lesson.features.numpy()
    served = {(place, depth): logits[ids] for place, depth, logits in by_depth(engine, row, places, features, DEPTH)}
    with torch.no_grad():
        depths = trained.trainee.draft_logits(lesson)
    compared = [
        np.abs(served[int(place), depth] - logits.numpy()).max()
        for depth, drafted in enumerate(depths)
        for place, logits in zip(places_of(drafted.label_rows, places.size), drafted.logits, strict=True)
    ]
    assert len(compared) > DEPTH * (places.size - DEPTH)
    return float(max(compared))


def places_of(learned: torch.Tensor | None, count: int) -> list[int]:
    return list(range(count)) if learned is None else learned.tolist()


def test_the_served_network_is_the_trained_one_at_every_depth(trained: Trained, target_folder: Path) -> None:
    assert furthest(trained, trained.lesson, target_folder) < TOLERANCE


@pytest.mark.parametrize("by", [-1, 1])
def test_features_shifted_by_one_are_given_away(trained: Trained, by: int, target_folder: Path) -> None:
    """The mutation that the test above must catch: training that reads the next token's features, or the last's."""
    shifted = replace(trained.lesson, features=trained.lesson.features.roll(by, 0))
    assert furthest(trained, shifted, target_folder) > 100 * TOLERANCE


def test_the_draft_service_loads_it(trained: Trained, target_folder: Path) -> None:
    config = DraftConfig(drafters=(f"model:{trained.folder}",), target_model=str(target_folder), engine=SETTINGS)
    assert build_catalogue(config).needs == (trained.trainee.need,)


def test_another_targets_network_is_refused(trained: Trained, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", seed=1)
    with pytest.raises(InvalidInput, match=r"made for tiny .*: must be a draft of 'other'"):
        load_draft_engine(str(trained.folder), SETTINGS, str(other))


def test_published_layouts_are_packed_as_they_are(trained: Trained, target_folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    with pytest.raises(InvalidInput, match="weights = 'int8': must be float16 for kind"):
        pack_draft(trained.folder, packed, WeightFormat.INT8)
    (trained.folder / "work").mkdir(exist_ok=True)
    manifest = pack_draft(trained.folder, packed, WeightFormat.FLOAT16)
    assert (packed / WEIGHTS_FILE).read_bytes() == (trained.folder / WEIGHTS_FILE).read_bytes()
    assert {file.name for file in packed.iterdir()} == {"manifest.json", *manifest.files}
    assert load_draft_engine(str(packed), SETTINGS, str(target_folder)).info.max_length > 0


def test_lessons_have_the_targets_hidden_states(target: Target) -> None:
    """Against transformers' own, which counts them by their input."""
    random = np.random.Generator(np.random.Philox(3))
    row = Row(random.integers(2, 258, 20).astype(np.int32), np.full(20, 2, np.int8), 1.0)
    need = FeatureNeed((1, EMBEDDING, FINAL, 0))
    lesson = Teacher(target.model, WHOLE, torch.float32, need).lesson(row, 1.0)
    plain: Any = type(target.model).from_pretrained(target.model.name_or_path, attn_implementation="eager")
    with torch.no_grad():
        output = plain(input_ids=torch.tensor(row.token_ids[None, :-1]).long(), output_hidden_states=True)
    states = output.hidden_states
    expected = torch.cat([states[2], states[0], states[-1], states[1]], dim=-1)[0]
    torch.testing.assert_close(lesson.features, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("extra", ["sliding_window", "softcap", "s_aux"])
def test_attention_that_sees_less_is_refused_by_name(extra: str) -> None:
    rows = torch.zeros(1, 1, 2, 4)
    call = AttentionCall(torch.nn.Identity(), rows, rows, rows, None, {extra: 4})
    with pytest.raises(Unsupported, match=f"attention with {extra} is not trained"):
        UnrolledAttention().attend(call)


def test_the_command_measures_by_depth(corpus_folder: Path, target_folder: Path, tmp_path: Path) -> None:
    """Two heads draft two tokens: deeper ones are never accepted."""
    asked = job(target_folder, tmp_path / "medusa", tokens=1200)
    shape = TraineeShape(TrainedKind.MEDUSA, depth=2)
    manifest = train_draft(replace(asked, data=corpus_folder, shape=shape), Console(quiet=True))
    tables = manifest.acceptance["tables"]
    assert {table["temperature"] for table in tables} == {0.0, 0.6, 1.0}
    assert any(table["by_depth"][0] > 0 for table in tables)
    assert all(table["by_depth"][2:] == [0.0] * 6 for table in tables)
    assert (manifest.kind, manifest.draft_vocab, manifest.vocabulary) == ("medusa", 200, "reduced")


@pytest.mark.parametrize("depth", [-1, 9])
def test_a_depth_out_of_bounds_is_refused(depth: int, target: Target) -> None:
    with pytest.raises(InvalidInput, match=rf"depth = {depth}: must be in \[1, 8\]"):
        TraineeShape(TrainedKind.EAGLE, depth=depth).on(target)
