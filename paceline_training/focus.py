"""What training looks at more: the kinds of text in which a draft parts from its target.

A report of branching points (`paceline branches`) says for each cell of text (`text_kinds`) how many
positions it has, and how many drafted tokens are lost there. A position's loss counts as much as its cell loses,
relative to the mean. Only the draft's training is weighed: the target's distributions are the labels as before.
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
"""What a report of branching points says that it is, as `report`."""
LEAST_WEIGHT, MOST_WEIGHT = 0.5, 2.0
"""Bounds of a cell's weight: what a draft does well is still practised, what it does badly doesn't take over. Chosen,
not tuned."""
PRIOR_POSITIONS = 32.0
"""Positions of the mean that a cell's loss is mixed with: a cell of few positions says little. Chosen, not tuned."""

Weights = Mapping[str, float]
"""By cell."""


def read_focus(file: Path, tokenizer: Tokenizer) -> dict[str, float]:
    """Weights from a report of branching points.

    Raises:
        InvalidInput: no such report, or one in another vocabulary.
    """
    report = read_json("focus", file)
    known = report.get("report") == BRANCHING
    require(known, "focus", str(file), "a report of paceline branches, its JSON file")
    vocabulary = report.get("tokenizer")
    require(vocabulary == tokenizer.fingerprint, "focus: tokenizer", vocabulary, "the target's own")
    return cell_weights(_losses(file, report.get("cells")))


def _losses(file: Path, cells: object) -> dict[str, tuple[float, float]]:
    """Positions and lost tokens of each cell."""
    found: dict[str, tuple[float, float]] = {}
    for name, each in (cells if isinstance(cells, dict) else {}).items():
        require(name in CELLS, f"focus {file.name}: cell", name, f"one of {', '.join(CELLS)}")
        match each:
            case {"positions": int(positions), "lost": int() | float() as lost} if 0 <= lost <= positions:
                found[name] = positions, lost
            case _:
                limit = "positions, and lost of them"
                raise InvalidInput.of(f"focus {file.name}: {name}", each, limit)
    require(any(lost > 0 for _, lost in found.values()), f"focus {file.name}: lost", 0, "above 0 in some cell")
    return found


def cell_weights(losses: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Each cell's weight: the share that it loses over the share that all lose, within bounds.

    Args:
        losses: positions and lost tokens by cell; some are lost.
    """
    mean = sum(lost for _, lost in losses.values()) / sum(positions for positions, _ in losses.values())
    found: dict[str, float] = {}
    for name, (positions, lost) in losses.items():
        share = (lost + PRIOR_POSITIONS * mean) / (positions + PRIOR_POSITIONS)
        found[name] = round(min(MOST_WEIGHT, max(LEAST_WEIGHT, share / mean)), 4)
    return found


def position_weights(rows: Sequence[Row], weights: Weights, kinds: TextKinds) -> dict[Row, NDArray[np.float32]]:
    """The weight of each learned token of each row, 1 in cells without one; their mean over all rows is 1.

    Returns:
        For each row [learned tokens that have one before them].
    """
    found = {row: np.array([weights.get(cell, 1.0) for cell in kinds.cells(row)], np.float32) for row in rows}
    total, count = sum(float(each.sum()) for each in found.values()), sum(each.size for each in found.values())
    return {row: each * np.float32(count / total) for row, each in found.items()} if count else found
