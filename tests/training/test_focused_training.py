"""Positions count by the kinds of text that a report says: in the loss, in the recipe, in the manifest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from paceline.drafters.layers.manifest import load_manifest
from paceline.drafters.layers.student import build_student
from paceline.models.tokenizer import TransformersTokenizer
from paceline.protocol.errors import InvalidInput
from paceline_training.checkpoint import StackTrainee
from paceline_training.corpus import Row, split_rows
from paceline_training.distill import Distiller, load_state, save_state
from paceline_training.focus import BRANCHING, cell_weights
from paceline_training.losses import Loss
from paceline_training.make_draft import train_draft
from paceline_training.recipe import TrainRecipe
from paceline_training.vocabulary import choose_vocabulary
from tests.models.saving import byte_level_tokenizer
from tests.training.tiny_target import LAYERS, load_target, wanted, writer, written

RECIPE = TrainRecipe(loss=Loss.KL, tokens=500, batch_rows=4, focus={"text/number": 2.0})
Counts = dict[Row, NDArray[np.float32]]


class FocusedRun:
    """Distillers of the same texts and beginnings, whose positions count differently."""

    def __init__(self, folder: Path) -> None:
        self.target = load_target(folder)
        self.split = split_rows(written(writer(folder), range(16)))
        size = self.target.tokenizer.vocab_size
        self.vocabulary = choose_vocabulary(self.split.train, 200, size, always=(1,))

    def distiller(self, counts: Counts, recipe: TrainRecipe = RECIPE) -> Distiller:
        stack = StackTrainee(build_student(self.target.model, LAYERS, self.vocabulary), self.vocabulary)
        return Distiller(self.target.model, stack, self.split, recipe, counts)

    def loss(self, counts: Counts) -> float:
        """Of the first step."""
        return self.distiller(counts).step().loss

    def counts(self, first: float, second: float) -> Counts:
        """Every text's first and second half of learned tokens count so much."""
        found: Counts = {}
        for row in self.split.train:
            learned = int(row.loss_mask[1:].sum())
            found[row] = np.where(np.arange(learned) < learned // 2, first, second).astype(np.float32)
        return found


@pytest.fixture(scope="module")
def runs(target_folder: Path) -> FocusedRun:
    return FocusedRun(target_folder)


def test_a_position_s_loss_counts_as_much_as_it_weighs(runs: FocusedRun) -> None:
    plain = runs.loss({})
    assert runs.loss(runs.counts(1, 1)) == plain, "bit for bit"
    assert runs.loss(runs.counts(2, 2)) == pytest.approx(2 * plain)
    halves = runs.loss(runs.counts(1, 0)), runs.loss(runs.counts(0, 1))
    assert sum(halves) == pytest.approx(plain)
    assert min(halves) > 0.05 * plain
    assert runs.loss(runs.counts(3, 0.5)) == pytest.approx(3 * halves[0] + 0.5 * halves[1])


def test_a_run_goes_on_with_its_own_focus_alone(runs: FocusedRun, tmp_path: Path) -> None:
    save_state(tmp_path / "c.pt", runs.distiller(runs.counts(1, 1)).state())
    other = runs.distiller({}, replace(RECIPE, focus={}))
    with pytest.raises(InvalidInput, match="focus"):
        other.restore(load_state(tmp_path / "c.pt"))
    state = load_state(tmp_path / "c.pt")
    del state["recipe"]["focus"]  # of a time before there was one
    other.restore(state)


def test_a_report_s_weights_are_the_recipe_s(target_folder: Path, tmp_path: Path) -> None:
    losses = {"text/number": (100, 60.0), "text/special": (300, 40.0)}
    cells = {name: {"positions": positions, "lost": lost} for name, (positions, lost) in losses.items()}
    fingerprint = TransformersTokenizer(byte_level_tokenizer()).fingerprint
    file = tmp_path / "branches.json"
    file.write_text(json.dumps({"report": BRANCHING, "tokenizer": fingerprint, "cells": cells}))
    run = replace(
        wanted(target_folder, tmp_path / "out", tokens=300), self_generate=300, evaluation_rows=1, focus=file
    )
    train_draft(run, Console(quiet=True))
    assert load_manifest(tmp_path / "out").training["focus"] == cell_weights(losses)
