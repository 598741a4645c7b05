"""What kind of text a token is, and that training looks more at those in which a draft parts from its target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from paceline.drafters.layers.manifest import load_manifest
from paceline.models.tokenizer import TableTokenizer, TransformersTokenizer
from paceline.protocol.errors import InvalidInput
from paceline_training.corpus import Role, Row
from paceline_training.distill import load_state, save_state
from paceline_training.focus import BRANCHING, MOST_WEIGHT, cell_weights, position_weights, read_focus
from paceline_training.losses import Loss
from paceline_training.make_draft import train_draft
from paceline_training.recipe import TrainRecipe
from paceline_training.text_kinds import CELLS, TextKinds, TokenKind, kind_of
from tests.models.saving import byte_level_tokenizer
from tests.training.tiny_target import Bench, Counts, job, writer, written

BYTES = TableTokenizer(300, None)
RECIPE = TrainRecipe(loss=Loss.KL, tokens=500, batch_rows=4, focus={"text/number": 2.0})
CELL_LOSSES = {"text/number": {"positions": 100, "lost": 60.0}, "text/word inside": {"positions": 300, "lost": 40.0}}


def report(folder: Path, **changes: Any) -> Path:
    file = folder / "branches.json"
    made = {"report": BRANCHING, "tokenizer": BYTES.fingerprint, "cells": CELL_LOSSES} | changes
    file.write_text(json.dumps(made))
    return file


def test_weights_are_shares_of_loss_over_the_mean() -> None:
    # The mean loses .25; 32 positions of it are mixed in: (60 + 8) / 132 / .25, (40 + 8) / 332 / .25.
    weights = cell_weights({"text/number": (100, 60.0), "text/word inside": (300, 40.0)})
    assert weights == {"text/number": pytest.approx(2.0), "text/word inside": pytest.approx(0.5783, abs=1e-4)}
    assert MOST_WEIGHT < 68 / 132 / 0.25, "bounded"
    few = cell_weights({"text/number": (1, 1.0), "text/word inside": (399, 99.0)})
    assert few["text/number"] == pytest.approx((1 + 8) / 33 / 0.25, abs=1e-4), "a single position says little"


def test_positions_count_by_their_cells_and_one_on_average() -> None:
    row = Row(np.array(BYTES.encode("ab 1c"), np.int32), np.full(5, Role.ANSWER, np.int8), 1.0)
    weights = position_weights([row], {"text/number": 2.0, "text/word inside": 0.5}, TextKinds(BYTES))[row]
    assert weights == pytest.approx(np.array([0.5, 1.0, 2.0, 0.5]) / 1.0)
    other = Row(np.array(BYTES.encode("12"), np.int32), np.full(2, Role.ANSWER, np.int8), 1.0)
    both = position_weights([row, other], {"text/number": 2.0, "text/word inside": 0.5}, TextKinds(BYTES))
    assert np.concatenate([*both.values()]).mean() == pytest.approx(1)
    assert both[other][0] / both[row][0] == pytest.approx(4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"report": "another"}, "a report of paceline branches"),
        ({"tokenizer": "ab"}, "focus: tokenizer = 'ab': must be the target's own"),
        ({"cells": {"poem/number": {"positions": 1, "lost": 1}}}, "cell = 'poem/number'"),
        ({"cells": {"text/number": {"positions": 1, "lost": 2}}}, "text/number"),
        ({"cells": {"text/number": {"positions": 5, "lost": 0}}}, "lost = 0: must be above 0"),
        ({"cells": None}, "lost"),
    ],
)
def test_what_is_no_such_report_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        read_focus(report(tmp_path, **changes), BYTES)


@pytest.mark.parametrize(
    ("text", "before", "kind"),
    [
        (" the", "of", TokenKind.WORD_START),
        ("the", " of", TokenKind.WORD_INSIDE),
        ("s", "9", TokenKind.WORD_INSIDE),
        ("the", "(", TokenKind.WORD_START),
        ("\n\n", ".", TokenKind.SPACE),
        (" 12", "is", TokenKind.NUMBER),
        (").", "x", TokenKind.PUNCTUATION),
        ("_name", "my", TokenKind.PUNCTUATION),
        ("", "x", TokenKind.SPECIAL),
    ],
)
def test_kinds(text: str, before: str, kind: TokenKind) -> None:
    assert kind_of(text, before) is kind


def cells_of(text: str, roles: Sequence[int] = ()) -> dict[str, str]:
    """The cell of each byte but the first, by its place; `roles`: of all bytes."""
    tokens = np.array(BYTES.encode(text), np.int32)
    given = np.array(roles or [Role.ANSWER] * tokens.size, np.int8)
    cells = TextKinds(BYTES).cells(Row(tokens, given, 0.0))
    return {
        f"{place}{text[place]}": cell for place, cell in zip(np.flatnonzero(given[1:] >= 2) + 1, cells, strict=True)
    }


def test_text_between_fences_is_code() -> None:
    cells = {"2b": "text/word start", "5`": "text/punctuation", "6x": "code/word start", "81": "code/number"}
    cells |= {"9`": "code/punctuation", "12c": "text/word start"}  # the closing fence stands inside
    assert cells_of("a b```x 1```c").items() >= cells.items()


def test_four_marks_are_one_fence_and_the_prompt_s_do_not_count() -> None:
    assert cells_of("a````b")["5b"] == "code/word start"
    asked = [Role.USER] * 4 + [Role.ANSWER] * 3
    assert cells_of("```qx y", asked)["6y"] == "text/word start"
    assert [*cells_of("```qx y", asked)] == ["4x", "5 ", "6y"], "learned tokens alone"


def test_special_tokens_have_no_text_and_end_words() -> None:
    tokenizer = TransformersTokenizer(byte_level_tokenizer())
    tokens = np.array([*tokenizer.encode("ab"), 1, *tokenizer.encode("c")], np.int32)
    row = Row(tokens, np.full(tokens.size, Role.ANSWER, np.int8), 0.0)
    assert TextKinds(tokenizer).cells(row)[-3:] == ["text/word inside", "text/special", "text/word start"]
    assert set(TextKinds(tokenizer).cells(row)) <= set(CELLS)


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
    file = report(tmp_path, tokenizer=TransformersTokenizer(byte_level_tokenizer()).fingerprint, cells=cells)
    run = replace(job(target_folder, tmp_path / "out", tokens=300), self_generate=300, evaluation_rows=1, focus=file)
    train_draft(run, Console(quiet=True))
    assert load_manifest(tmp_path / "out").training["focus"] == cell_weights(losses)
