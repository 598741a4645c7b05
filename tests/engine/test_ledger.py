"""Rules of a valid step, which all engines share."""

from __future__ import annotations

import pytest

from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.ledger import Ledger
from paceline.engine.table.engine import TableEngine
from paceline.models.table_names import TableSpec
from paceline.protocol.errors import InvalidInput, PacelineError, PrefixMismatch
from paceline.runtime.config import EngineSettings

TRUNK = StepItem(1, 0, (1, 2, 3))
TREE = (TRUNK, StepItem(1, 3, (4, 5, 6, 7), (-1, -1, 0, 1)))
"""Rows 3 and 4 follow row 2, row 5 follows 3, row 6 follows 4."""
KEPT = (TRUNK, StepItem(1, 3, (4, 5), (-1, -1)), StepItem(1, 5, (6, 7, 8), (-1, -1, 0, 1, 0), trunk_length=3))
"""The same tree, grown in two steps, and row 7 behind row 3."""


def ledger_behind(*items: StepItem) -> Ledger[None]:
    ledger: Ledger[None] = Ledger(
        TableEngine(TableSpec(vocab=10, max_length=12, max_kv_rows=100)).info, EngineSettings(max_num_seqs=4)
    )
    ledger.open(1, 20)
    for item in items:
        ledger.check(StepPlan((item,)))
        ledger.apply(StepPlan((item,)))
    return ledger


@pytest.mark.parametrize(
    ("before", "item", "message"),
    [
        (TREE, StepItem(1, 8, (1,)), "base_length = 8"),
        (TREE, StepItem(1, 5, (1,)), "kept row 4"),
        (TREE, StepItem(1, 5, (1,), kept_rows=(3, 6)), "kept row 6"),
        (TREE, StepItem(1, 5, (1,), kept_rows=(4, 7)), "kept row 7"),
        (TREE, StepItem(1, 4, (1,), kept_rows=(5,)), "kept row 5"),
        (TREE, StepItem(1, 5, (1,), kept_rows=(5, 3)), "kept row 5"),
        (TREE, StepItem(1, 1, (1,), kept_rows=(1, 2)), "base_length = 1"),
        (TREE, StepItem(1, 3, ()), "new rows = 0"),
        (TREE, StepItem(1, 3, (10,)), "token id = 10"),
        (TREE, StepItem(1, 3, (-1,)), "token id = -1"),
        (TREE, StepItem(1, 3, (1, 2), (0, 1)), "parent of row 0 = 0"),
        (TREE, StepItem(1, 3, (1, 2), (-1,)), "parents = 1"),
        (TREE, StepItem(1, 3, (1, 2), logit_rows=(2,)), "logit row = 2"),
        (TREE, StepItem(1, 3, (1,) * 18), "rows = 21: must be at most 20"),
        (TREE, StepItem(1, 3, (1,) * 10), "length = 13: must be at most 12"),
        (KEPT, StepItem(1, 8, (1,), (-1, -1, 0, 1, 1, 4), trunk_length=3), "kept row 7"),
        (KEPT, StepItem(1, 6, (1,), (-1, 0, 1, 1), kept_rows=(3, 4, 5), trunk_length=3), "kept row 4"),
        (KEPT, StepItem(1, 6, (1,), (-1, -1, 0, 0), kept_rows=(4, 3, 6), trunk_length=3), "kept row 3"),
        (KEPT, StepItem(1, 5, (1,), (-1, -1, 0), kept_rows=(5, 6), trunk_length=3), "kept row 5"),
        (KEPT, StepItem(1, 5, (1,), (-1, 0), trunk_length=3), "parents = 2: must be 3"),
        (KEPT, StepItem(1, 5, (1,), trunk_length=6), "trunk_length = 6"),
        (KEPT, StepItem(1, 5, (1,), (-1, -1, 2), trunk_length=3), "parent of row 2 = 2"),
    ],
)
def test_bad_items_are_refused(before: tuple[StepItem, ...], item: StepItem, message: str) -> None:
    error = PrefixMismatch if message.startswith(("kept row", "base_length")) else InvalidInput
    with pytest.raises(PacelineError, match=message) as caught:
        ledger_behind(*before).check(StepPlan((item,)))
    assert isinstance(caught.value, error)


@pytest.mark.parametrize(
    ("before", "item"),
    [
        (TREE, StepItem(1, 5, (1,), kept_rows=(4, 6))),
        (TREE, StepItem(1, 3, (1,), kept_rows=(1, 2))),
        (TREE, StepItem(1, 3, (1,) * 16, (-1,) * 16)),
        (KEPT, StepItem(1, 8, (1,), (-1, -1, 0, 1, 0, 4), trunk_length=3)),
        (KEPT, StepItem(1, 6, (1, 2), (-1, -1, 1, 2), kept_rows=(3, 5, 7), trunk_length=4)),
        (KEPT, StepItem(1, 5, (1,), (), kept_rows=(4, 6), trunk_length=3)),
        (KEPT, StepItem(1, 5, (1,), (-1, 0, 1, 2, 2, 3), trunk_length=0)),
        (KEPT, StepItem(1, 2, (1,))),
    ],
)
def test_paths_branches_and_rollbacks_are_taken(before: tuple[StepItem, ...], item: StepItem) -> None:
    rows = ledger_behind(*before, item).rows(1)
    assert rows == item.base_length + len(item.token_ids)


def test_empty_steps_and_open_ids_are_refused() -> None:
    ledger = ledger_behind()
    with pytest.raises(InvalidInput, match="step items"):
        ledger.check(StepPlan(()))
    with pytest.raises(InvalidInput, match="session = 1"):
        ledger.open(1, 1)
    assert ledger.kv_rows == 20
