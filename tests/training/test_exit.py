"""An early exit: the target's own first layers, neither trained nor stored, and a trained one behind them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from paceline.drafters.layers.manifest import TrainedKind, load_manifest
from paceline.drafters.layers.stack import WEIGHTS_FILE, load_draft
from paceline.protocol.errors import InvalidInput
from paceline_training.kinds import TraineeShape
from paceline_training.make_draft import train_draft
from tests.training.tiny_target import job, load_target, served_as_trained


@pytest.fixture(scope="module")
def exit_folder(corpus_folder: Path, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An early exit behind the target's first layer."""
    asked = job(target_folder, tmp_path_factory.mktemp("exit") / "exit", tokens=6000)
    shape = TraineeShape(TrainedKind.EXIT, exit_layer=1)
    train_draft(replace(asked, data=corpus_folder, shape=shape), Console(quiet=True))
    return asked.out


def test_only_the_exit_is_stored_and_it_learned(exit_folder: Path, target_folder: Path) -> None:
    tensors = load_file(exit_folder / WEIGHTS_FILE)
    assert {name.rpartition("layers.")[2][0] for name in tensors if "layers" in name} == {"1"}
    assert "model.norm.weight" in tensors
    manifest = load_manifest(exit_folder)
    assert (manifest.kind, manifest.layers, manifest.borrowed_layers) == ("exit", (0, 2), 1)
    assert manifest.training["held_out_overlap"] > 0.2
    own = dict(load_target(target_folder).model.named_parameters())
    student = load_draft(exit_folder, load_target(target_folder)).student
    for name, weight in student.named_parameters():
        if "layers.0." in name:
            assert torch.equal(weight, own[name]), name
        elif "layers.1.mlp" in name:
            assert not torch.equal(weight, own[name.replace("layers.1", "layers.2")]), name


def test_the_served_exit_is_the_trained_one(exit_folder: Path, target_folder: Path) -> None:
    served_as_trained(exit_folder, target_folder)


@pytest.mark.parametrize("layer", [-1, 3])
def test_an_exit_that_the_target_lacks_is_refused(layer: int, target_folder: Path) -> None:
    with pytest.raises(InvalidInput, match=rf"exit_layer = {layer}: must be in \[1, 2\]"):
        TraineeShape(TrainedKind.EXIT, exit_layer=layer).on(load_target(target_folder))
