"""Training looks more at the kinds of text in which a draft parts from its target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import InvalidInput
from paceline_training.corpus import Role, Row
from paceline_training.focus import BRANCHING, MOST_WEIGHT, cell_weights, position_weights, read_focus
from paceline_training.text_kinds import TextKinds

BYTES = TableTokenizer(300, None)
CELL_LOSSES = {"text/number": {"positions": 100, "lost": 60.0}, "text/word inside": {"positions": 300, "lost": 40.0}}


def report(folder: Path, **changes: Any) -> Path:
    file = folder / "branches.json"
    made = {"report": BRANCHING, "tokenizer": BYTES.fingerprint, "cells": CELL_LOSSES} | changes
    file.write_text(json.dumps(made))
    return file


def test_weights_are_shares_of_loss_over_the_mean() -> None:
    # The mean loses .25; 32 positions of it are mixed in: (60 + 8) / 132 / .25, (40 + 8) / 332 / .25.
    found = cell_weights({"text/number": (100, 60.0), "text/word inside": (300, 40.0)})
    assert found == {"text/number": pytest.approx(2.0), "text/word inside": pytest.approx(0.5783, abs=1e-4)}
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


def test_a_report_gives_weights(tmp_path: Path) -> None:
    assert read_focus(report(tmp_path), BYTES) == cell_weights(
        {name: (each["positions"], each["lost"]) for name, each in CELL_LOSSES.items()}
    )


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


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none\.json"):
        read_focus(tmp_path / "none.json", BYTES)
