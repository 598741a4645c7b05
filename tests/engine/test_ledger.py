"""Rules of a valid step, which all engines share."""

from __future__ import annotations

import pytest

from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.ledger import Ledger, depths
from paceline.engine.table.engine import TableEngine
from paceline.models.table_names import TableSpec
from paceline.protocol.errors import InvalidInput, PacelineError, PrefixMismatch
from paceline.runtime.config import EngineSettings


@pytest.fixture
def ledger() -> Ledger[None]:
    """A session of 3 chain rows, then a tree: rows 3 and 4 follow row 2, row 5 follows 3, row 6 follows 4."""
    made: Ledger[None] = Ledger(
        TableEngine(TableSpec(vocab=10, max_length=12, max_kv_rows=100)).info, EngineSettings(max_num_seqs=4)
    )
    made.open(1, 20)
    for item in (StepItem(1, 0, (1, 2, 3)), StepItem(1, 3, (4, 5, 6, 7), (-1, -1, 0, 1))):
        plan = StepPlan((item,))
        made.check(plan)
        made.apply(plan)
    return made


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        (StepItem(1, 8, (1,)), PrefixMismatch, "base_length = 8"),
        (StepItem(1, 5, (1,)), PrefixMismatch, "kept row 4"),
        (StepItem(1, 5, (1,), kept_rows=(3, 6)), PrefixMismatch, "kept row 6"),
        (StepItem(1, 5, (1,), kept_rows=(4, 7)), PrefixMismatch, "kept row 7"),
        (StepItem(1, 4, (1,), kept_rows=(5,)), PrefixMismatch, "kept row 5"),
        (StepItem(1, 5, (1,), kept_rows=(5, 3)), PrefixMismatch, "kept row 5"),
        (StepItem(1, 1, (1,), kept_rows=(1, 2)), PrefixMismatch, "base_length = 1"),
        (StepItem(1, 3, ()), InvalidInput, "new rows = 0"),
        (StepItem(1, 3, (10,)), InvalidInput, "token id = 10"),
        (StepItem(1, 3, (-1,)), InvalidInput, "token id = -1"),
        (StepItem(1, 3, (1, 2), (0, 1)), InvalidInput, "parent of row 0 = 0"),
        (StepItem(1, 3, (1, 2), (-1,)), InvalidInput, "parents = 1"),
        (StepItem(1, 3, (1, 2), logit_rows=(2,)), InvalidInput, "logit row = 2"),
        (StepItem(1, 3, (1,) * 18), InvalidInput, "rows = 21: must be at most 20"),
        (StepItem(1, 3, (1,) * 10), InvalidInput, "length = 13: must be at most 12"),
    ],
)
def test_bad_items_are_refused(
    ledger: Ledger[None], item: StepItem, error: type[PacelineError], message: str
) -> None:
    with pytest.raises(error, match=message):
        ledger.check(StepPlan((item,)))


@pytest.mark.parametrize(
    "item",
    [
        StepItem(1, 5, (1,), kept_rows=(4, 6)),
        StepItem(1, 5, (1,), kept_rows=(3, 5)),
        StepItem(1, 4, (1,)),
        StepItem(1, 3, (1,), kept_rows=(1, 2)),
        StepItem(1, 0, (1,)),
        StepItem(1, 3, (1,) * 16, (-1,) * 16),
    ],
)
def test_paths_and_rollbacks_are_taken(ledger: Ledger[None], item: StepItem) -> None:
    ledger.check(StepPlan((item,)))
    ledger.apply(StepPlan((item,)))
    assert ledger.rows(1) == item.base_length + len(item.token_ids)


def test_empty_steps_and_open_ids_are_refused(ledger: Ledger[None]) -> None:
    with pytest.raises(InvalidInput, match="step items"):
        ledger.check(StepPlan(()))
    with pytest.raises(InvalidInput, match="session = 1"):
        ledger.open(1, 1)
    assert ledger.kv_rows == 20


def test_depths() -> None:
    assert depths(StepItem(1, 5, (1, 2, 3))) == (1, 2, 3)
    assert depths(StepItem(1, 5, (1, 2, 3, 4), (-1, 0, -1, 1))) == (1, 2, 1, 3)
