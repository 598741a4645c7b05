"""Positions count by the kinds of text that a report says: in the loss, in the recipe, in the manifest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from paceline.drafters.layers.manifest import load_manifest
from paceline.models.tokenizer import TransformersTokenizer
from paceline.protocol.errors import InvalidInput
from paceline_training.distill import load_state, save_state
from paceline_training.focus import BRANCHING, cell_weights
from paceline_training.losses import Loss
from paceline_training.make_draft import train_draft
from paceline_training.recipe import TrainRecipe
from tests.models.saving import byte_level_tokenizer
from tests.training.tiny_target import Bench, Counts, job, writer, written

RECIPE = TrainRecipe(loss=Loss.KL, tokens=500, batch_rows=4, focus={"text/number": 2.0})


def loss(bench: Bench, counts: Counts) -> float:
    """Of the first step."""
    return bench.distiller(RECIPE, counts).step().loss


def halves(bench: Bench, first: float, second: float) -> Counts:
    """Every text's first and second half of learned tokens count so much."""
    counts: Counts = {}
    for row in bench.split.train:
        learned = int(row.loss_mask[1:].sum())
        counts[row] = np.where(np.arange(learned) < learned // 2, first, second).astype(np.float32)
    return counts


@pytest.fixture(scope="module")
def bench(target_folder: Path) -> Bench:
    return Bench.of(target_folder, written(writer(target_folder), range(16)))


def test_a_position_s_loss_counts_as_much_as_it_weighs(bench: Bench) -> None:
    plain = loss(bench, {})
    assert loss(bench, halves(bench, 1, 1)) == plain, "bit for bit"
    assert loss(bench, halves(bench, 2, 2)) == pytest.approx(2 * plain)
    first, second = loss(bench, halves(bench, 1, 0)), loss(bench, halves(bench, 0, 1))
    assert first + second == pytest.approx(plain)
    assert min(first, second) > 0.05 * plain
    assert loss(bench, halves(bench, 3, 0.5)) == pytest.approx(3 * first + 0.5 * second)


def test_a_run_goes_on_with_its_own_focus_alone(bench: Bench, tmp_path: Path) -> None:
    save_state(tmp_path / "c.pt", bench.distiller(RECIPE, halves(bench, 1, 1)).state())
    other = bench.distiller(replace(RECIPE, focus={}))
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
    run = replace(job(target_folder, tmp_path / "out", tokens=300), self_generate=300, evaluation_rows=1, focus=file)
    train_draft(run, Console(quiet=True))
    assert load_manifest(tmp_path / "out").training["focus"] == cell_weights(losses)
