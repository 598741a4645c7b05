from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from paceline_training.make_draft import train_draft
from paceline_training.writing import self_generate
from tests.training.tiny_target import GENERATED_TOKENS, job, save_target, writer


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def corpus_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that the target wrote: those that `draft_folder` learns from."""
    folder = tmp_path_factory.mktemp("corpus")
    self_generate(writer(target_folder), folder, GENERATED_TOKENS, "digest")
    return folder


@pytest.fixture(scope="session")
def draft_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft made by the command, from nothing but the target."""
    out = tmp_path_factory.mktemp("draft") / "draft"
    train_draft(job(target_folder, out), Console(quiet=True))
    return out


@pytest.fixture
def draft_copy(draft_folder: Path, tmp_path: Path) -> Path:
    """The draft, to be damaged."""
    return shutil.copytree(draft_folder, tmp_path / "copy", ignore=shutil.ignore_patterns("work"))
