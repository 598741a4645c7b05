"""Weights of the training loss: kinds of text in which a draft disagrees with its target count more.

A report of branching points (`paceline branches`) says for each cell of text (`text_kinds`) how many
positions it has, and how many drafted tokens are lost there. The weight of a position is its cell's lost share
relative to the mean. Weights concern the draft's loss alone: the labels stay the target's distributions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.given_files import read_json
from paceline_training.corpus import Row
from paceline_training.text_kinds import CELLS, TextKinds

BRANCHING = "paceline branching points"
"""Value of `report` in a report of branching points."""
LEAST_WEIGHT, MOST_WEIGHT = 0.5, 2.0
"""Bounds of a cell's weight, so that no cell is neglected and none dominates. Chosen, not tuned."""
PRIOR_POSITIONS = 32.0
"""Positions at the mean loss that are added to each cell, since few positions say little. Chosen, not tuned."""

Weights = Mapping[str, float]
"""By cell."""


def read_focus(file: Path, tokenizer: Tokenizer) -> dict[str, float]:
    """Weights from a report of branching points.

    Raises:
        InvalidInput: no such report, or one in another vocabulary.
    """
    report = read_json("focus", file)
    is_report = report.get("report") == BRANCHING
    require(is_report, "focus", str(file), "a report of paceline branches, its JSON file")
    vocabulary = report.get("tokenizer")
    require(vocabulary == tokenizer.fingerprint, "focus: tokenizer", vocabulary, "the target's own")
    return cell_weights(_losses(file, report.get("cells")))


def _losses(file: Path, cells: object) -> dict[str, tuple[float, float]]:
    """Positions and lost tokens of each cell."""
    losses: dict[str, tuple[float, float]] = {}
    for name, each in (cells if isinstance(cells, dict) else {}).items():
        require(name in CELLS, f"focus {file.name}: cell", name, f"one of {', '.join(CELLS)}")
        match each:
            case {"positions": int(positions), "lost": int() | float() as loss} if 0 <= loss <= positions:
                losses[name] = positions, loss
            case _:
                limit = "an object with positions, and lost in [0, positions]"
                raise InvalidInput.of(f"focus {file.name}: {name}", each, limit)
    require(any(loss > 0 for _, loss in losses.values()), f"focus {file.name}: lost", 0, "above 0 in some cell")
    return losses


def cell_weights(losses: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The weight of each cell: its lost share over the lost share of all, within bounds.

    Args:
        losses: positions and lost tokens by cell, with at least one lost token.
    """
    mean = sum(loss for _, loss in losses.values()) / sum(positions for positions, _ in losses.values())
    weights: dict[str, float] = {}
    for name, (positions, loss) in losses.items():
        share = (loss + PRIOR_POSITIONS * mean) / (positions + PRIOR_POSITIONS)
        weights[name] = round(min(MOST_WEIGHT, max(LEAST_WEIGHT, share / mean)), 4)
    return weights


def position_weights(rows: Sequence[Row], weights: Weights, kinds: TextKinds) -> dict[Row, NDArray[np.float32]]:
    """The weight of each learned token of each row, 1 in cells without one; their mean over all rows is 1.

    Returns:
        For each row [learned tokens that have one before them].
    """
    row_weights = {row: np.array([weights.get(cell, 1.0) for cell in kinds.cells(row)], np.float32) for row in rows}
    total = sum(float(each.sum()) for each in row_weights.values())
    count = sum(each.size for each in row_weights.values())
    return {row: each * np.float32(count / total) for row, each in row_weights.items()} if count else row_weights
