"""Trees that grow step by step, lose branches and become trunk, against recomputation of every row's history."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.engine import attention
from paceline.engine.cpu import row_attention
from paceline.engine.cpu.row_attention import FEW_KEYS
from paceline.engine.interface import Engine, StepItem, StepPlan
from paceline.engine.ledger import Ledger
from paceline.engine.table.engine import SimulatedEngine, TableEngine, TableModel
from paceline.engine.transformer import TransformerEngine
from paceline.models.table_names import TableSpec
from paceline.protocol.errors import PacelineError, PrefixMismatch
from paceline.protocol.proposal import ROOT
from paceline.runtime.config import EngineSettings
from tests.engine import tiny

VOCAB = 40
MAX_ROWS = 120


@dataclass
class Grower:
    """A session whose tree takes random steps; `rows` are the token paths that its rows must hold."""

    session: int
    random: random.Random
    trunk: int = 0
    rows: list[tuple[int, ...]] = field(default_factory=list)

    def step(self) -> tuple[StepItem, list[tuple[int, ...]]]:
        """A step, and the history of each of its new rows."""
        kept, trunk = self._keep()
        paths = [self.rows[row] for row in kept]
        new: list[tuple[int, ...]] = []
        for _ in range(self.random.randint(1, 5)):
            above = self.random.choice([*paths[max(0, trunk - 1) :], *new] or [()])
            free = [token for token in range(VOCAB) if (*above, token) not in (*paths, *new)]
            new.append((*above, self.random.choice(free)))
        start = next((i for i, row in enumerate(kept) if row != i), len(kept))
        item = StepItem(
            session=self.session,
            base_length=len(kept),
            token_ids=tuple(path[-1] for path in new),
            parents=_parents([*paths, *new], trunk),
            kept_rows=tuple(kept[start:]),
            logit_rows=tuple(range(len(new))),
            trunk_length=trunk,
        )
        self.trunk, self.rows = trunk, [*paths, *new]
        return item, new

    def _keep(self) -> tuple[list[int], int]:
        """Rows to keep, each with its ancestors: a path that becomes trunk, and part of what hangs from it."""
        if not self.rows or self.random.random() < 0.1:
            shorter = self.random.randint(0, self.trunk)
            return list(range(shorter)), shorter
        tip = self.rows[self.random.randrange(max(0, self.trunk - 1), len(self.rows))]
        path = [self.rows.index(tip[:length]) for length in range(1, len(tip) + 1)]
        kept = set(path)
        for row in range(path[-1] + 1, len(self.rows)):
            above = self.rows[row][:-1]
            if self.random.random() < 0.7 and any(self.rows[each] == above for each in kept if each >= path[-1]):
                kept.add(row)
        return sorted(kept), len(path)


def _parents(paths: Sequence[tuple[int, ...]], trunk: int) -> tuple[int, ...]:
    """The tree's parents, by the paths of all rows."""
    tree = paths[trunk:]
    return tuple(ROOT if len(path) == trunk + 1 else tree.index(path[:-1]) for path in tree)


def check_growth(
    engine: Engine, expected: Callable[[Sequence[int]], NDArray[Any]], seed: int, tolerance: float
) -> None:
    source = random.Random(seed)
    growers = [Grower(session, random.Random(source.random())) for session in (1, 2)]
    try:
        for grower in growers:
            engine.open(grower.session, MAX_ROWS)
        for _ in range(8):
            stepping = source.sample(growers, k=source.randint(1, 2))
            steps = [grower.step() for grower in stepping]
            outputs = engine.step(StepPlan(tuple(item for item, _ in steps)))
            for (_, histories), logits in zip(steps, outputs, strict=True):
                for history, row in zip(histories, logits, strict=True):
                    np.testing.assert_allclose(row, expected(history), atol=tolerance, rtol=0)
    finally:
        for grower in growers:
            engine.close(grower.session)


@given(st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_tables_grow_trees(seed: int) -> None:
    spec = TableSpec(vocab=VOCAB, contexts=100_003, order=seed % 3)
    check_growth(TableEngine(spec), TableModel(spec).logits, seed, tolerance=0)


@pytest.fixture(scope="module", params=["compiled steps", "few rows", "many rows"])
def llama(request: pytest.FixtureRequest) -> tuple[Engine, Callable[[Sequence[int]], NDArray[Any]]]:
    """Computed as steps of few rows are, as few rows beside many are, and as steps of many."""
    engine, plain = tiny.engine_and_plain(tiny.llama())
    assert isinstance(engine, TransformerEngine)
    if request.param == "compiled steps" and engine.row_decoder is None:
        pytest.skip("this CPU has no vectors of 512 bits")
    engine.row_decoder = engine.row_decoder if request.param == "compiled steps" else None
    engine.few_keys = 0 if request.param == "many rows" else FEW_KEYS
    return engine, lambda history: plain.logits(history).numpy()


@pytest.mark.parametrize("seed", range(4))
def test_a_transformer_grows_trees(llama: tuple[Engine, Callable[[Sequence[int]], NDArray[Any]]], seed: int) -> None:
    check_growth(*llama, seed, tolerance=2e-4)


def _rows_as_depths(item: StepItem) -> tuple[int, ...]:
    return tuple(range(item.kept_tree + 1, item.tree_rows + 1))


def _positions_by_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("paceline.engine.transformer.depths", _rows_as_depths)


def _kept_tree_seen_by_all(patch: pytest.MonkeyPatch) -> None:
    """Every row sees all kept rows, the tree's too."""

    def bare(item: StepItem) -> StepItem:
        return StepItem(item.session, item.base_length, item.token_ids)

    keys, seen = attention.visible_keys, row_attention._visible_slots
    patch.setattr(attention, "visible_keys", lambda item, horizon: keys(bare(item), horizon))
    patch.setattr(row_attention, "_visible_slots", lambda item, horizon: seen(bare(item), horizon))


@pytest.mark.parametrize("mutate", [_positions_by_row, _kept_tree_seen_by_all])
def test_the_comparison_catches(
    llama: tuple[Engine, Callable[[Sequence[int]], NDArray[Any]]],
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
) -> None:
    engine, distribution = llama
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        for seed in range(4):
            check_growth(engine, distribution, seed, tolerance=2e-4)


def test_timed_engines_grow_trees() -> None:
    spec = TableSpec(vocab=VOCAB)
    check_growth(SimulatedEngine(TableEngine(spec), 0.01), TableModel(spec).logits, 5, tolerance=0)


@pytest.fixture
def ledger() -> Ledger[None]:
    """3 trunk rows; row 3 and 4 follow row 2, row 5 follows 3, row 6 follows 4, row 7 follows 3."""
    made: Ledger[None] = Ledger(
        TableEngine(TableSpec(vocab=10, max_length=12, max_kv_rows=100)).info, EngineSettings(max_num_seqs=4)
    )
    made.open(1, 20)
    for item in (
        StepItem(1, 0, (1, 2, 3)),
        StepItem(1, 3, (4, 5), (-1, -1)),
        StepItem(1, 5, (6, 7, 8), (-1, -1, 0, 1, 0), trunk_length=3),
    ):
        made.check(StepPlan((item,)))
        made.apply(StepPlan((item,)))
    return made


@pytest.mark.parametrize(
    "item",
    [
        StepItem(1, 8, (1,), (-1, -1, 0, 1, 0, 4), trunk_length=3),
        StepItem(1, 6, (1,), (-1, 0, 0, 2), kept_rows=(3, 5, 7), trunk_length=3),
        StepItem(1, 6, (1, 2), (-1, -1, 1, 2), kept_rows=(3, 5, 7), trunk_length=4),
        StepItem(1, 5, (1,), (), kept_rows=(4, 6), trunk_length=3),
        StepItem(1, 5, (1,), (-1, 0, 1, 2, 2, 3), trunk_length=0),
        StepItem(1, 2, (1,)),
    ],
    ids=["all kept", "one branch", "a path joins the trunk", "an implicit chain", "trunk becomes tree", "rollback"],
)
def test_what_a_ledger_takes(ledger: Ledger[None], item: StepItem) -> None:
    ledger.check(StepPlan((item,)))
    ledger.apply(StepPlan((item,)))
    assert ledger.rows(1) == item.base_length + len(item.token_ids)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (StepItem(1, 8, (1,), (-1, -1, 0, 1, 1, 4), trunk_length=3), "kept row 7"),
        (StepItem(1, 6, (1,), (-1, 0, 1, 1), kept_rows=(3, 4, 5), trunk_length=3), "kept row 4"),
        (StepItem(1, 6, (1,), (-1, -1, 0, 0), kept_rows=(4, 3, 6), trunk_length=3), "kept row 3"),
        (StepItem(1, 5, (1,), (-1, -1, 0), kept_rows=(5, 6), trunk_length=3), "kept row 5"),
        (StepItem(1, 5, (1,), (-1, 0), trunk_length=3), "parents = 2: must be 3"),
        (StepItem(1, 5, (1,), trunk_length=6), "trunk_length = 6"),
        (StepItem(1, 5, (1,), (-1, -1, 2), trunk_length=3), "parent of row 2 = 2"),
    ],
)
def test_what_a_ledger_refuses(ledger: Ledger[None], item: StepItem, message: str) -> None:
    with pytest.raises(PacelineError, match=message) as caught:
        ledger.check(StepPlan((item,)))
    assert isinstance(caught.value, PrefixMismatch) == ("kept row" in message)
