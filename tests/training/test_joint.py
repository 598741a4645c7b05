"""A drafter and its target trained together: what is written, what it is served with, and what stays as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.drafters.layers.manifest import DraftManifest, TrainedKind, load_manifest
from paceline.drafters.layers.stack import WEIGHTS_FILE, load_draft_engine
from paceline.drafters.layers.student import Target
from paceline.engine.loading import load_engine
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from paceline_training import make_joint
from paceline_training.corpus import Row, Split, read_shards, save_shard, split_rows
from paceline_training.distill import Distiller, Pace, StepReport
from paceline_training.evaluate import read_text
from paceline_training.joint import TARGET_PREFIX, JointTrainee, divergences, joint_trainee, log_probabilities
from paceline_training.kinds import TraineeShape, make_trainee
from paceline_training.make_draft import TrainingJob
from paceline_training.make_joint import train_joint
from paceline_training.recipe import JointRecipe, TrainRecipe
from paceline_training.teacher import read_row
from paceline_training.text_pass import learned_logits
from tests.e2e.in_process import coordinator
from tests.services.harness import draft_service, target_service
from tests.training.tiny_target import SETTINGS, job, load_target, vocabulary_of

QUIET = Console(quiet=True)
DEPTH = 2
SHORT = 40
"""Tokens of a text."""
JOINT = JointRecipe(target_learning_rate=1e-3)
RECIPE = TrainRecipe(tokens=2000, learning_rate=3e-3, warmup_steps=2, joint=JOINT)
PROMPT = (0, 40, 41, 42, 43, 44)


class Made(NamedTuple):
    """What the command was asked for, and what it left."""

    asked: TrainingJob
    manifest: DraftManifest

    @property
    def target(self) -> Path:
        return make_joint.target_folder(self.asked)

    @property
    def drafter(self) -> Path:
        return make_joint.drafter_folder(self.asked)


def asked(target: Path, corpus: Path, out: Path, kind: TrainedKind = TrainedKind.MEDUSA) -> TrainingJob:
    """A run of seconds."""
    whole = job(target, out, tokens=1200)
    shape, pace = TraineeShape(kind, depth=DEPTH), Pace(measure_steps=10, save_steps=3)
    recipe = replace(whole.recipe, joint=JOINT)
    return replace(whole, data=corpus, shape=shape, pace=pace, recipe=recipe, evaluation_rows=1)


@pytest.fixture(scope="module")
def corpus(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the target's texts, cut short."""
    rows = [row for row in read_shards(corpus_folder) if row.loss_mask[:SHORT].sum() > SHORT // 2]
    file = tmp_path_factory.mktemp("corpus") / "short.npz"
    save_shard(file, [Row(row.token_ids[:SHORT], row.roles[:SHORT], row.temperature) for row in rows], 258)
    return file


@pytest.fixture(scope="module", params=[TrainedKind.MEDUSA, pytest.param(TrainedKind.MTP, marks=pytest.mark.full)])
def made(
    request: pytest.FixtureRequest, target_folder: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Made:
    run = asked(target_folder, corpus, tmp_path_factory.mktemp("joint") / "both", request.param)
    return Made(run, train_joint(run, QUIET))


@pytest.fixture(scope="module")
def split(corpus_folder: Path) -> Split:
    return split_rows(read_shards(corpus_folder))


def trainee(target: Target, split: Split) -> JointTrainee:
    drafter = make_trainee(TraineeShape(TrainedKind.MEDUSA, depth=DEPTH), target, vocabulary_of(target, split))
    return joint_trainee(target, drafter, JOINT.drafter_weight)


def distiller(target: Target, both: JointTrainee, split: Split, recipe: TrainRecipe = RECIPE) -> Distiller:
    shares = dict.fromkeys(both.target_weights(), JOINT.target_learning_rate / recipe.learning_rate)
    return Distiller(target.model, both, split, recipe, {}, shares)


@torch.no_grad()
def losses(target: Target, both: JointTrainee, rows: tuple[Row, ...]) -> tuple[float, float]:
    """Mean KL from the original, and the drafter's mean overlap with it over all depths."""
    moved, overlaps = [], []
    for row in rows:
        lesson = both.original.lesson(row, 1.0)
        logits, _ = read_row(both.target, row, both.need)
        moved.append(divergences(lesson.labels, log_probabilities(logits, lesson.labels.shape[1])))
        for depth in both.draft_logits(lesson):
            labels = lesson.labels[:, both.vocabulary.d2t]
            labels = labels if depth.label_rows is None else labels[depth.label_rows]
            overlaps.append(torch.minimum(labels.exp(), torch.softmax(depth.logits, -1)).sum(-1))
    assert target.model.training is False
    return float(torch.cat(moved).mean()), float(torch.cat(overlaps).mean())


def test_both_losses_fall(target_folder: Path, split: Split) -> None:
    """From a target that was pushed away from what it was, so that both have room."""
    target = load_target(target_folder)
    kept = {name: weight.clone() for name, weight in target.model.named_parameters()}
    both = trainee(target, split)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in both.target_weights().values():
            weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=generator))
    before = losses(target, both, split.held_out)
    learner = distiller(target, both, split)
    while not learner.is_done:
        learner.step()
    moved, overlap = losses(target, both, split.held_out)
    assert moved < 0.8 * before[0]
    assert overlap > before[1] + 0.02
    assert all(torch.equal(weight, kept[name]) for name, weight in target.model.named_parameters())


def test_the_drafters_loss_reaches_all_of_the_target_but_its_ends(target_folder: Path, split: Split) -> None:
    target = load_target(target_folder)
    both = trainee(target, split)
    trained = both.target_weights()
    names = dict(target.model.named_parameters())
    assert set(trained) == {TARGET_PREFIX + each for each in names if "embed" not in each and "lm_head" not in each}
    lesson = both.original.lesson(split.train[0], 1.0)
    torch.stack([depth.logits.square().mean() for depth in both.draft_logits(lesson)]).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in trained.values())
    assert all(weight.grad is None for weight in names.values())


@pytest.mark.parametrize("made", [TrainedKind.MEDUSA], indirect=True)
def test_an_interrupted_command_goes_on(
    made: Made, target_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the bytes of an undisturbed one; without --resume its folder is refused."""
    again = asked(target_folder, corpus, tmp_path / "both")
    step = Distiller.step

    def killed(self: Distiller) -> StepReport:
        if isinstance(self.trainee, JointTrainee) and self.step_number == 4:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Distiller, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        train_joint(again, QUIET)
    monkeypatch.undo()
    left = Made(again, made.manifest)
    assert not left.target.exists()
    with pytest.raises(InvalidInput, match="resume"):
        train_joint(again, QUIET)
    with pytest.raises(InvalidInput, match=r"joint = .*as checkpointed"):
        train_joint(replace(again, resume=True, recipe=replace(again.recipe, joint=JointRecipe())), QUIET)
    train_joint(replace(again, resume=True), QUIET)
    for one, other in ((made.target, left.target), (made.drafter, left.drafter)):
        assert (one / WEIGHTS_FILE).read_bytes() == (other / WEIGHTS_FILE).read_bytes()


def greedy(folder: Path, tokens: int = 24) -> list[int]:
    """As transformers writes it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    limits = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 1}
    return list(model.generate(torch.tensor([PROMPT]), do_sample=False, **limits)[0, len(PROMPT) :].tolist())


async def test_it_is_served_and_its_text_is_the_new_targets(made: Made) -> None:
    target = load_engine(str(made.target), SETTINGS)
    drafter = load_draft_engine(str(made.drafter), SETTINGS, str(made.target))
    greedily = SamplingParams(temperature=0.0)
    ask = GenerateRequest(token_ids=PROMPT, seed=5, max_new_tokens=24, ignore_eos=True, sampling=greedily)
    async with (
        target_service(target) as (_, target_address),
        draft_service(drafter) as (_, draft_address),
        coordinator(target_address, draft_address, model=str(made.target)) as client,
    ):
        alone = await client.generate(replace(ask, speculation=SpeculationSettings(off=True)))
        speculation = SpeculationSettings(drafter="model", num_draft_tokens=DEPTH)
        drafted = await client.generate(replace(ask, speculation=speculation))
    assert list(alone.token_ids) == list(drafted.token_ids) == greedy(made.target)


def test_the_new_target_is_another_model(made: Made, target_folder: Path) -> None:
    old, new = (load_engine(str(folder), SETTINGS).info.fingerprint for folder in (target_folder, made.target))
    assert (old.tokenizer, old.vocab_size) == (new.tokenizer, new.vocab_size)
    assert old.numeric != new.numeric
    began, became = (load_file(folder / WEIGHTS_FILE) for folder in (target_folder, made.target))
    assert began.keys() == became.keys()
    same = {name for name in began if torch.equal(began[name].float(), became[name])}
    assert same == {name for name in began if "embed" in name or "lm_head" in name}
    tokenizers = [load_tokenizer(str(folder)) for folder in (target_folder, made.target)]
    assert tokenizers[0].eos_token_ids == tokenizers[1].eos_token_ids
    assert made.target.name == "tiny-joint"
    assert {file.stat().st_mode & 0o777 for file in made.target.iterdir()} == {0o644}
    assert not [file for file in made.asked.out.iterdir() if file.name.startswith(".")]


def test_the_drafter_is_of_the_new_target_alone(made: Made, target_folder: Path) -> None:
    assert load_manifest(made.drafter).target.weights == load_target(made.target).weights
    with pytest.raises(InvalidInput, match=r"made for tiny-joint .*: must be a draft of 'tiny'"):
        load_draft_engine(str(made.drafter), SETTINGS, str(target_folder))
    alone = made.asked.work / "alone"
    load_draft_engine(str(alone), SETTINGS, str(target_folder))
    with pytest.raises(InvalidInput, match=r"made for tiny .*: must be a draft of 'tiny-joint'"):
        load_draft_engine(str(alone), SETTINGS, str(made.target))


def test_the_manifest_says_what_the_target_lost(made: Made, target_folder: Path) -> None:
    training = made.manifest.training
    lost = training["target_change"]
    assert 0 < lost["divergence"] < 0.5
    assert 0.5 < lost["same_choice"] <= 1
    assert lost["perplexity_after"] != lost["perplexity_before"] > 1
    assert training["joint"]["target_learning_rate"] == JOINT.target_learning_rate
    assert training["began_as"]["target"]["weights"] == load_target(target_folder).weights
    before, after = training["began_as"]["acceptance"]["tables"], made.manifest.acceptance["tables"]
    assert [table["positions"] for table in before] == [table["positions"] for table in after]
    assert made.manifest.needs == "features"


def test_features_in_training_are_those_that_are_served(made: Made, split: Split) -> None:
    """The target in training runs as transformers has it; the one that is served is packed and fused."""
    target, row = load_target(made.target), split.held_out[0]
    need = made_trainee(made, target).need
    _, features = read_row(target.model, row, need)
    engine = load_engine(str(made.target), SETTINGS)
    learned = np.flatnonzero(row.loss_mask[1:]) + 1
    served = read_text(engine, row, learned, need)
    np.testing.assert_allclose(served.features, features.numpy(), atol=1e-3)
    logits = learned_logits(target.model, row).numpy()
    np.testing.assert_allclose(served.logits, logits[:, : served.logits.shape[1]], atol=1e-3 * np.abs(logits).max())
    assert np.abs(served.features[1:] - features.numpy()[:-1]).max() > 0.1  # shifted by one it is given away


def made_trainee(made: Made, target: Target) -> Any:
    split = split_rows(read_shards(made.asked.data or Path()))
    shape = made.asked.shape
    return make_trainee(shape, target, vocabulary_of(target, split, 200 if shape.kind.reduces else None))


@pytest.mark.parametrize("kind", [TrainedKind.DRAFT, TrainedKind.EAGLE3])
def test_kinds_that_need_a_target_that_stays_are_refused(
    kind: TrainedKind, target_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=f"joint = '{kind}': must be medusa or mtp"):
        train_joint(asked(target_folder, corpus, tmp_path / "both", kind), QUIET)
    assert not (tmp_path / "both").exists()


def test_too_little_memory_is_refused_before_anything_is_read(
    target_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_joint, "available_ram", lambda: 1 << 20)
    limit = r"target = 'tiny': must be a model that trains in 1 MiB of free memory: --joint needs \d+ MiB"
    with pytest.raises(InvalidInput, match=limit):
        train_joint(asked(target_folder, corpus, tmp_path / "both"), QUIET)
    assert not (tmp_path / "both").exists()


def test_a_table_is_refused(corpus: Path, tmp_path: Path) -> None:
    run = replace(asked(Path(), corpus, tmp_path / "both"), target="table:vocab=64,seed=1")
    with pytest.raises(Unsupported, match="no layers to train"):
        train_joint(run, QUIET)


@pytest.mark.parametrize(
    ("kind", "flags", "named"),
    [
        ("eagle", ("--joint",), "--joint"),
        ("medusa", ("--target-learning-rate", "1e-5"), "target_learning_rate = 1e-05: must be left out without"),
        ("medusa", ("--joint", "--target-learning-rate", "2"), "target_learning_rate = 2.0: must be in (0, 1)"),
        ("medusa", ("--joint", "--dtype", "bfloat16"), "dtype = 'bfloat16': must be float32 with --joint"),
    ],
)
def test_bad_options_are_refused(
    target_folder: Path, corpus: Path, tmp_path: Path, kind: str, flags: tuple[str, ...], named: str
) -> None:
    paths = ["--target", str(target_folder), "--out", str(tmp_path / "both"), "--data", str(corpus)]
    result = CliRunner().invoke(app, ["train", kind, *paths, "--threads", "1", "--evaluation-rows", "1", *flags])
    assert result.exit_code != 0
    assert named in result.stderr
