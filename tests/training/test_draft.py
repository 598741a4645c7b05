"""A draft from end to end: made, measured, killed and resumed, refused, served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draft_service.drafters.catalogue import build_catalogue
from paceline.cli.main import app
from paceline.drafters.layers.manifest import load_manifest
from paceline.drafters.layers.stack import WEIGHTS_FILE, ReducedVocabularyEngine, load_draft, load_draft_engine
from paceline.drafters.layers.student import build_student, trained_weights
from paceline.drafters.layers.vocabulary import ABSENT, DraftVocabulary
from paceline.drafting.redrawing import redraw_proposal
from paceline.engine.interface import Logits
from paceline.models.resolve import MANIFEST_FILE
from paceline.protocol.draft import DraftBudget, DraftedProposal
from paceline.protocol.errors import DamagedFile, InvalidInput, VocabularyMismatch
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.runtime.config import DraftConfig
from paceline_training.distill import Distiller, Pace, load_state, run, save_state
from paceline_training.losses import LabelledLogs, Loss, position_losses
from paceline_training.recipe import TrainRecipe
from paceline_training.vocabulary import choose_vocabulary, coverage
from tests.training.tiny_target import (
    LAYERS,
    SETTINGS,
    Bench,
    load_target,
    save_target,
    served_as_trained,
    writer,
    written,
)

RECIPE = TrainRecipe(loss=Loss.LK, tokens=5000, learning_rate=3e-3, warmup_steps=5, batch_rows=4)
PACE = Pace(measure_steps=10, save_steps=5)


@pytest.fixture(scope="module")
def bench(target_folder: Path) -> Bench:
    return Bench.of(target_folder, written(writer(target_folder), range(48)))


def weights(of: Distiller) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in of.trainee.weights().items()}


@pytest.mark.parametrize(
    "loss", [Loss.NLA, *(pytest.param(each, marks=pytest.mark.full) for each in (Loss.KL, Loss.LK))]
)
def test_acceptance_rises(bench: Bench, loss: Loss, tmp_path: Path) -> None:
    """By LK learns the draft of test_packed, by KL what reads features: those are for the whole matrix."""
    learner = bench.distiller(replace(RECIPE, loss=loss, tokens=12_000))
    before = learner.measure_held_out()
    reports = list(run(learner, tmp_path / "checkpoint.pt", PACE, lambda: None))
    assert reports[-1].step == reports[-1].total_steps == learner.total_steps
    assert reports[-1].held_out > before + 0.05
    assert reports[-1].tokens >= 11_000


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_killed_and_resumed_is_bitwise_undisturbed(bench: Bench, dtype: str, tmp_path: Path) -> None:
    recipe = replace(RECIPE, dtype=dtype, tokens=3000)
    undisturbed = bench.distiller(recipe)
    list(run(undisturbed, tmp_path / "a.pt", PACE, lambda: None))
    killed = bench.distiller(recipe)
    for report in run(killed, tmp_path / "b.pt", PACE, lambda: None):
        if report.step == 8:  # three steps past the last checkpoint
            break
    resumed = bench.distiller(recipe)
    resumed.restore(load_state(tmp_path / "b.pt"))
    assert resumed.step_number == 5
    list(run(resumed, tmp_path / "b.pt", PACE, lambda: None))
    assert resumed.step_number == undisturbed.step_number > 10
    for (name, one), other in zip(weights(undisturbed).items(), weights(resumed).values(), strict=True):
        assert torch.equal(one, other), name
    both = zip(weights(killed).values(), weights(resumed).values(), strict=True)
    assert not all(torch.equal(one, other) for one, other in both)


def test_a_checkpoint_of_another_run_is_refused(bench: Bench, tmp_path: Path) -> None:
    learner = bench.distiller(RECIPE)
    learner.step()
    save_state(tmp_path / "c.pt", learner.state())
    other = bench.distiller(replace(RECIPE, learning_rate=1e-4))
    with pytest.raises(InvalidInput, match="learning_rate"):
        other.restore(load_state(tmp_path / "c.pt"))
    (tmp_path / "torn.pt").write_bytes((tmp_path / "c.pt").read_bytes()[:100])
    with pytest.raises(InvalidInput, match="resumed"):
        load_state(tmp_path / "torn.pt")


def test_minutes_become_steps(bench: Bench) -> None:
    learner = bench.distiller(replace(RECIPE, tokens=0, minutes=0.01))
    while not learner.total_steps:
        learner.step()
    assert learner.step_number == 4
    kept = bench.distiller(replace(RECIPE, tokens=0, minutes=0.01))
    kept.restore(learner.state())
    assert kept.total_steps == learner.total_steps > 4


def test_losses_are_what_they_say() -> None:
    p, q = torch.tensor([[0.5, 0.3]]), torch.tensor([[0.2, 0.8]])  # 0.2 of p lies outside the vocabulary
    logs = LabelledLogs(p.log(), q.log())
    divergence = float((p * (p / q).log()).sum())
    assert float(position_losses(logs, Loss.KL, 3.0)[0]) == pytest.approx(divergence)
    assert float(position_losses(logs, Loss.NLA, 3.0)[0]) == pytest.approx(-np.log(0.5))
    hybrid, accepted = position_losses(logs, Loss.LK, 3.0)
    share = np.exp(-3.0 * 0.5)
    assert float(hybrid) == pytest.approx(share * divergence + (1 - share) * 0.5)
    assert float(accepted) == pytest.approx(0.5)


def test_the_student_starts_from_the_layers_and_trains_nothing_borrowed(bench: Bench) -> None:
    target = bench.target.model
    student = build_student(target, LAYERS, bench.vocabulary)
    own = trained_weights(student)
    theirs = dict(target.named_parameters())
    assert torch.equal(own["model.layers.1.mlp.up_proj.weight"], theirs["model.layers.2.mlp.up_proj.weight"])
    assert torch.equal(own["model.norm.weight"], theirs["model.norm.weight"])
    assert not any("embed" in name or "lm_head" in name for name in own)
    learner = bench.distiller(RECIPE)
    before = {name: weight.clone() for name, weight in theirs.items()}
    learner.step()
    assert all(torch.equal(weight, before[name]) for name, weight in target.named_parameters())
    assert not any(torch.equal(weight, own[name]) for name, weight in weights(learner).items() if "proj" in name)


def test_the_draft_vocabulary_is_the_most_frequent_ids(bench: Bench) -> None:
    vocabulary = bench.vocabulary
    assert vocabulary.size == 200
    assert 1 in vocabulary.d2t
    assert (vocabulary.t2d[vocabulary.d2t] == np.arange(200)).all()
    assert (vocabulary.t2d == ABSENT).sum() == vocabulary.target_size - 200
    assert 0.8 < coverage(bench.split.train, vocabulary) <= 1
    smaller = choose_vocabulary(bench.split.train, 50, vocabulary.target_size)
    assert set(smaller.d2t) < set(vocabulary.d2t) | {0}
    logits = vocabulary.scatter(np.zeros((2, 200), np.float32))
    assert np.isneginf(logits[:, vocabulary.t2d == ABSENT]).all()
    assert (logits[:, vocabulary.d2t] == 0).all()


def test_the_folder_is_small_and_says_what_it_is(draft_folder: Path, target_folder: Path) -> None:
    manifest = load_manifest(draft_folder)
    assert (manifest.needs, manifest.vocabulary, manifest.trees) == ("nothing", "reduced", True)
    assert manifest.layers == LAYERS
    assert {table["temperature"] for table in manifest.acceptance["tables"]} == {0.0, 0.6, 1.0}
    assert manifest.training["steps"] == manifest.training["total_steps"] > 0
    assert str(draft_folder.parent) not in (draft_folder / MANIFEST_FILE).read_text()
    tensors = load_file(draft_folder / WEIGHTS_FILE)
    assert {weight.dtype for weight in tensors.values()} == {torch.float16}
    config = json.loads((draft_folder / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 2)
    loaded = load_draft(draft_folder, load_target(target_folder))
    for name, weight in trained_weights(loaded.student).items():
        assert torch.equal(weight.detach(), tensors[name].float()), name


def test_served_logits_are_the_students_and_never_leave_its_vocabulary(
    draft_folder: Path, target_folder: Path
) -> None:
    vocabulary = load_draft(draft_folder, load_target(target_folder)).vocabulary
    logits = served_as_trained(draft_folder, target_folder)
    assert logits.shape == (38, vocabulary.target_size)
    assert np.isneginf(logits[:, vocabulary.t2d == ABSENT]).all()


def proposed_ids(draft: Path, target: Path, acceptance: Acceptance, temperature: float) -> tuple[set[int], set[int]]:
    """What a draft proposes behind tokens that it lacks, drawn as it says, and the ids that it has."""
    config = DraftConfig(drafters=(f"model:{draft}",), target_model=str(target), engine=SETTINGS)
    catalogue = build_catalogue(config)
    assert isinstance(catalogue.engines[0], ReducedVocabularyEngine)
    drafter = catalogue.pick("")
    known = set(load_draft(draft, load_target(target)).vocabulary.d2t.tolist())
    absent = next(token for token in range(258) if token not in known)
    sampling = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.01)
    proposed: set[int] = set()
    for seed in range(8):
        prefix = (0, absent, 5 + seed)  # the target may have emitted what the draft can't
        drafter.open(seed, SessionSpec(prefix, 1, sampling, NoiseKey(seed), acceptance))
        budget = DraftBudget(max_tokens=4, tree_widths=(3, 2) if acceptance is Acceptance.COUPLED else ())
        drafting = drafter.begin(seed, budget, 1)
        while not drafting.done:
            drafter.advance([drafting], [])
        proposal = drafting.proposal()
        proposed |= set(proposal.token_ids)
        if acceptance is not Acceptance.COUPLED:
            again = redraw_proposal(DraftedProposal(1, None, proposal), len(prefix) - 1, NoiseKey(seed))
            assert again.mistake is None
        drafter.close(seed)
    return proposed, known


@pytest.mark.parametrize(
    ("acceptance", "temperature"), [(Acceptance.COUPLED, 1.0), (Acceptance.REJECTION, 0.0), (Acceptance.BLOCK, 1.0)]
)
def test_a_draft_proposes_its_own_ids_alone(
    draft_folder: Path, target_folder: Path, acceptance: Acceptance, temperature: float
) -> None:
    proposed, known = proposed_ids(draft_folder, target_folder, acceptance, temperature)
    assert proposed
    assert proposed <= known


def test_logits_for_ids_that_the_draft_lacks_are_given_away(
    draft_folder: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation that the test above must catch: absent ids as probable as the draft's best."""

    def leaking(vocabulary: DraftVocabulary, logits: Logits) -> Logits:
        wide = np.repeat(logits.max(axis=1, keepdims=True), vocabulary.target_size, axis=1)
        wide[:, vocabulary.d2t] = logits
        return wide

    monkeypatch.setattr(DraftVocabulary, "scatter", leaking)
    proposed, known = proposed_ids(draft_folder, target_folder, Acceptance.COUPLED, 1.0)
    assert not proposed <= known


def test_a_draft_of_another_target_is_refused(
    draft_folder: Path, draft_copy: Path, target_folder: Path, tmp_path: Path
) -> None:
    other = save_target(tmp_path / "other", seed=1)
    config = DraftConfig(drafters=(f"model:{draft_folder}",), target_model=str(other), engine=SETTINGS)
    with pytest.raises(InvalidInput, match="other"):
        build_catalogue(config)
    manifest = json.loads((draft_copy / MANIFEST_FILE).read_text())
    manifest["target"]["tokenizer"] = "0" * 64
    (draft_copy / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(VocabularyMismatch, match="copy"):
        load_draft_engine(str(draft_copy), SETTINGS, str(target_folder))


def test_a_draft_that_lacks_weights_is_refused(draft_copy: Path, target_folder: Path) -> None:
    tensors = load_file(draft_copy / WEIGHTS_FILE)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 4, dtype=torch.float16)
    save_file(tensors, draft_copy / WEIGHTS_FILE)
    message = (
        r"copy': must be whole; tensors missing: 1 \(model.norm.weight\); "
        r"tensors of another shape: 1 \(model.layers.1.mlp.up_proj.weight \[3, 4\], not \[48, 32\]\)"
    )
    with pytest.raises(InvalidInput, match=message):
        load_draft_engine(str(draft_copy), SETTINGS, str(target_folder))


def test_a_torn_draft_is_refused(draft_copy: Path, target_folder: Path) -> None:
    weights_file = draft_copy / WEIGHTS_FILE
    weights_file.write_bytes(weights_file.read_bytes()[:-10])
    with pytest.raises(DamagedFile, match=rf"copy/{WEIGHTS_FILE}': damaged or truncated \(.*\); fetch it again"):
        load_draft_engine(str(draft_copy), SETTINGS, str(target_folder))
    weights_file.unlink()
    with pytest.raises(InvalidInput, match="whole draft"):
        load_draft_engine(str(draft_copy), SETTINGS, str(target_folder))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--layers", "a"), "layers = 'a'"),
        (("--layers", "0,9"), "layers = (0, 9)"),
        (("--draft-vocab", "0"), "draft_vocab = 0"),
        (("--loss", "mse"), "'mse'"),
        (("--minutes", "0"), "minutes = 0"),
        (("--temperature-mix", "1:0.5"), "temperature_mix"),
        (("--target", "table:vocab=64,seed=1"), "table model"),
    ],
)
def test_bad_input_is_one_line(flags: tuple[str, ...], named: str, target_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "some text"}\n' * 4)
    paths = ["--target", str(target_folder), "--out", str(tmp_path / "out"), "--data", str(file), "--threads", "1"]
    result = CliRunner().invoke(app, ["train", "draft", *paths, *flags])
    assert result.exit_code != 0
    assert named in result.stderr
    assert result.stderr.count("\n") == 1
