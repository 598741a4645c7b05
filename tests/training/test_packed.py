"""Drafts as they are shipped: small, whole, found by name; and measured again from the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draft_service.drafters.catalogue import build_catalogue
from paceline.cli.main import app
from paceline.drafters.layers.manifest import WeightFormat, load_manifest, pack, unpack
from paceline.drafters.layers.stack import WEIGHTS_FILE, ReducedVocabularyEngine, load_draft
from paceline.drafters.layers.student import trained_weights
from paceline.models import resolve as models
from paceline.models.pull import file_digest
from paceline.models.pullable import PULLABLE
from paceline.models.resolve import MANIFEST_FILE, resolve_draft, shipped_draft, shipped_kinds
from paceline.protocol.errors import InvalidInput
from paceline.runtime.config import DraftConfig
from paceline_training.checkpoint import pack_draft
from paceline_training.kinds import TraineeShape
from paceline_training.make_draft import train_draft
from tests.training.tiny_target import SETTINGS, job, load_target

QUIET = Console(quiet=True)
LARGEST_SHIPPED = 32_000_000


@pytest.fixture(scope="session")
def packed_folder(draft_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "int8"
    pack_draft(draft_folder, out, WeightFormat.INT8)
    return out


def test_int8_is_half_a_step_of_its_row_away() -> None:
    weights = {"matrix": torch.randn(7, 50) * torch.logspace(-4, 4, 7)[:, None], "vector": torch.randn(50)}
    weights["matrix"][3] = 0
    packed = pack(weights, WeightFormat.INT8)
    assert packed["matrix"].dtype == torch.int8
    again = unpack(packed)
    assert set(again) == set(weights)
    step = weights["matrix"].abs().amax(1, keepdim=True) / 127
    assert bool(((again["matrix"] - weights["matrix"]).abs() <= 0.5001 * step).all())
    assert torch.equal(again["vector"], weights["vector"].half())


def test_a_packed_draft_is_the_draft_in_half_the_bytes(
    draft_folder: Path, packed_folder: Path, target_folder: Path
) -> None:
    assert (packed_folder / WEIGHTS_FILE).stat().st_size < 0.7 * (draft_folder / WEIGHTS_FILE).stat().st_size
    manifest = load_manifest(packed_folder)
    assert manifest.files == {name: file_digest(packed_folder / name) for name in manifest.files}
    assert set(manifest.files) | {MANIFEST_FILE} == {file.name for file in packed_folder.iterdir()}
    assert replace(manifest, weights="float16", files={}) == load_manifest(draft_folder)
    target = load_target(target_folder)
    mine, theirs = (trained_weights(load_draft(each, target).student) for each in (packed_folder, draft_folder))
    for name, weight in mine.items():
        far = float((weight - theirs[name]).detach().abs().max())
        assert far <= 0.01 * float(theirs[name].detach().abs().max()), name


def test_what_cant_be_packed_is_refused(draft_folder: Path, packed_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="another folder"):
        pack_draft(draft_folder, draft_folder, WeightFormat.INT8)
    with pytest.raises(InvalidInput, match="weights = 'int8'"):
        pack_draft(packed_folder, tmp_path / "again", WeightFormat.FLOAT16)


def test_the_table_is_measured_again(draft_folder: Path, packed_folder: Path, target_folder: Path) -> None:
    """On the texts that training held out: the manifest's own table; int8 is as good."""
    report = packed_folder.parent / "acceptance.md"
    options = ["--draft", str(draft_folder), "--draft", str(packed_folder), "--target", str(target_folder)]
    options += ["--data", str(draft_folder / "work" / "corpus"), "--rows", "2", "--report", str(report)]
    done = CliRunner().invoke(app, ["train", "measure", *options, "--threads", "1", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "mean accepted tokens" in done.stdout
    assert "…" not in done.stdout, "80 columns hold every figure"
    values = json.loads(report.with_suffix(".json").read_text())
    own, packed = values["drafts"].values()
    assert own["tables"] == load_manifest(draft_folder).acceptance["tables"]
    for one, other in zip(own["tables"], packed["tables"], strict=True):
        assert one["positions"] == other["positions"]
        # Greedy positions match or don't: 2 texts' worth of them says little.
        assert one["overlap"] == pytest.approx(other["overlap"], abs=0.02 if one["temperature"] else 0.1)
    text = report.read_text()
    assert all(key in text for key in ("command", "machine", "versions", "int8 weights"))
    assert str(draft_folder.parent) not in text


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--held-out", "0"), "held_out = 0"),
        (("--rows", "0"), "rows = 0"),
        (("--draft", "default"), "model:default"),
        (("--data", "prompts.jsonl"), "prompts"),
    ],
)
def test_bad_measurements_are_one_line(
    flags: tuple[str, ...], named: str, draft_folder: Path, target_folder: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "answer me"}\n')
    given = [str(prompts) if flag == prompts.name else flag for flag in flags]
    options = ["--draft", str(draft_folder), "--target", str(target_folder), "--threads", "1", "--device", "cpu"]
    data = ["--data", str(draft_folder / "work" / "corpus")]
    result = CliRunner().invoke(app, ["train", "measure", *options, *data, *given])
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_training_starts_from_another_draft(draft_folder: Path, target_folder: Path, tmp_path: Path) -> None:
    """Two steps from a draft are better than two steps from the target's layers; the vocabulary may be another."""
    short = job(target_folder, tmp_path / "fresh", tokens=200)
    short = replace(short, data=draft_folder / "work" / "corpus", shape=TraineeShape(), draft_vocab=180)
    going_on = replace(short, out=tmp_path / "further", init=draft_folder)
    fresh = train_draft(replace(short, shape=TraineeShape(layers=(0, 2))), QUIET).training["held_out_overlap"]
    manifest = train_draft(going_on, QUIET)
    assert manifest.layers == (0, 2)
    assert manifest.draft_vocab == 180
    assert manifest.training["init_sha256"] == file_digest(draft_folder / WEIGHTS_FILE)
    assert manifest.training["held_out_overlap"] > fresh + 0.03
    with pytest.raises(InvalidInput, match="layers"):
        train_draft(replace(going_on, out=tmp_path / "other", shape=TraineeShape(layers=(0, 1))), QUIET)


def test_a_damaged_packed_draft_is_refused(packed_folder: Path, target_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(packed_folder, tmp_path, dirs_exist_ok=True)
    tensors: dict[str, Any] = load_file(tmp_path / WEIGHTS_FILE)
    scale = next(name for name in tensors if name.endswith(".scale"))
    del tensors[scale]
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(InvalidInput, match=r"weights"):
        load_draft(tmp_path, load_target(target_folder))


@pytest.fixture
def shipped(packed_folder: Path, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation that knows the target by the name `tiny`, and comes with a draft for it."""
    home, drafts = tmp_path / "home", tmp_path / models.DRAFTS_PACKAGE
    (home / "models").mkdir(parents=True)
    drafts.mkdir()
    (drafts / "__init__.py").touch()
    (home / "models" / "tiny").symlink_to(target_folder)
    (target_folder / models.PROVENANCE_FILE).write_text("{}")
    (drafts / "tiny").symlink_to(packed_folder)
    monkeypatch.setenv("PACELINE_HOME", str(home))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PULLABLE, "tiny", PULLABLE["smollm2-135m"])
    return drafts / "tiny"


def test_the_default_drafter_is_the_shipped_draft(shipped: Path) -> None:
    assert shipped_draft("tiny") == shipped
    config = DraftConfig(drafters=("model:default",), target_model="tiny", engine=SETTINGS)
    catalogue = build_catalogue(config)
    assert catalogue.names == ("model",)
    assert isinstance(catalogue.engines[0], ReducedVocabularyEngine)


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("target", ["other", "tiny/../tiny", "", None])
def test_other_targets_have_no_default_draft(target: str | None) -> None:
    if target is not None:
        assert shipped_draft(target) is None
    with pytest.raises(InvalidInput, match="model:default"):
        resolve_draft("default", target)


def test_a_shipped_draft_of_another_kind_is_called_by_it(shipped: Path) -> None:
    (shipped.parent / "tiny-eagle3").symlink_to(shipped)
    assert resolve_draft("default-eagle3", "tiny") == str(shipped.parent / "tiny-eagle3")
    assert resolve_draft("default", "tiny") == str(shipped)
    for target in ("tiny", "other", None):
        with pytest.raises(InvalidInput, match=r"drafter = 'model:default-medusa': must be one that comes with"):
            resolve_draft("default-medusa", target)


def test_shipped_drafts_are_whole_small_and_say_where_they_come_from() -> None:
    targets = [name for name, model in PULLABLE.items() if model.draft_is_packaged]
    folders = [shipped_draft(name, kind) for name in targets for kind in ("", *shipped_kinds(name))]
    assert len(folders) > 1
    for folder in folders:
        assert folder is not None, f"{targets}: pip install ./drafts"
        manifest = load_manifest(folder)
        own = manifest.target.model
        assert folder.name == (own if manifest.kind == "draft" else f"{own}-{manifest.kind}")
        assert manifest.files == {name: file_digest(folder / name) for name in manifest.files}
        assert WEIGHTS_FILE in manifest.files
        assert sum(file.stat().st_size for file in folder.iterdir()) <= LARGEST_SHIPPED
        assert {"command", "seed", "steps", "tokens_seen", "seconds"} <= set(manifest.training)
        assert {"source", "sha256", "recipe"} <= set(manifest.data)
        assert manifest.acceptance["tables"]
        assert not any(" /" in str(value) for value in manifest.training.values())
