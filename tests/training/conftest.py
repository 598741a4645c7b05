from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.drafters.layers.manifest import TrainedKind
from paceline_training.kinds import TraineeShape
from paceline_training.make_draft import train_draft
from tests.training.tiny_target import job, save_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def draft_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft made by the command, from nothing but the target."""
    out = tmp_path_factory.mktemp("draft") / "draft"
    train_draft(job(target_folder, out), Console(quiet=True))
    return out


@pytest.fixture(scope="session")
def exit_folder(draft_folder: Path, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An early exit behind the target's first layer."""
    out = tmp_path_factory.mktemp("exit") / "exit"
    asked = replace(job(target_folder, out, tokens=6000), data=draft_folder / "work" / "corpus")
    train_draft(replace(asked, shape=TraineeShape(TrainedKind.EXIT, exit_layer=1)), Console(quiet=True))
    return out


@pytest.fixture
def draft_copy(draft_folder: Path, tmp_path: Path) -> Path:
    """The draft, to be damaged."""
    return shutil.copytree(draft_folder, tmp_path / "copy", ignore=shutil.ignore_patterns("work"))
