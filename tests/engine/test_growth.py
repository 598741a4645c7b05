"""Trees that grow step by step, lose branches and become trunk, against recomputation of every row's history."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine import attention
from paceline.engine.cpu import row_attention
from paceline.engine.cpu.row_attention import FEW_KEYS
from paceline.engine.interface import Engine, StepItem, StepPlan
from paceline.engine.table.engine import SimulatedEngine, TableEngine, TableModel
from paceline.models.table_names import TableSpec
from paceline.protocol.proposal import ROOT
from tests.engine import tiny
from tests.engine.tiny import TOLERANCE

VOCAB = 40
MAX_ROWS = 120


@dataclass
class Grower:
    """A session whose tree takes random steps; `rows` are the token paths that its rows must hold."""

    session: int
    random: random.Random
    goes_back: bool = True
    """Whether it may lose a part of its trunk; else all of it, or none."""
    trunk: int = 0
    rows: list[tuple[int, ...]] = field(default_factory=list)

    def step(self) -> tuple[StepItem, list[tuple[int, ...]]]:
        """A step, and the history of each row that it asks for."""
        kept, trunk = self._keep()
        paths = [self.rows[row] for row in kept]
        new: list[tuple[int, ...]] = []
        for _ in range(self.random.randint(1, 5)):
            above = self.random.choice([*paths[max(0, trunk - 1) :], *new] or [()])
            free = [token for token in range(VOCAB) if (*above, token) not in (*paths, *new)]
            new.append((*above, self.random.choice(free)))
        asked = self.random.sample(range(len(new)), len(new))
        start = next((i for i, row in enumerate(kept) if row != i), len(kept))
        item = StepItem(
            session=self.session,
            base_length=len(kept),
            token_ids=tuple(path[-1] for path in new),
            parents=_parents([*paths, *new], trunk),
            kept_rows=tuple(kept[start:]),
            logit_rows=tuple(asked),
            trunk_length=trunk,
        )
        self.trunk, self.rows = trunk, [*paths, *new]
        return item, [new[row] for row in asked]

    def _keep(self) -> tuple[list[int], int]:
        """Rows to keep, each with its ancestors: a path that becomes trunk, and part of what hangs from it."""
        if not self.rows or self.random.random() < 0.1:
            shorter = self.random.randint(0, self.trunk) if self.goes_back else self.random.choice((0, self.trunk))
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
    tree = paths[trunk:]
    return tuple(ROOT if len(path) == trunk + 1 else tree.index(path[:-1]) for path in tree)


def check_growth(engine: Engine, model: tiny.Plain | TableModel, seed: int) -> None:
    goes_back = not engine.info.session_rows
    tolerance = TOLERANCE if isinstance(model, tiny.Plain) else 0
    source = random.Random(seed)
    growers = [Grower(session, random.Random(source.random()), goes_back) for session in (1, 2)]
    try:
        for grower in growers:
            engine.open(grower.session, MAX_ROWS)
        for _ in range(8):
            stepping = source.sample(growers, k=source.randint(1, 2))
            steps = [grower.step() for grower in stepping]
            outputs = engine.step(StepPlan(tuple(item for item, _ in steps)))
            for (_, histories), logits in zip(steps, outputs, strict=True):
                for history, row in zip(histories, logits, strict=True):
                    np.testing.assert_allclose(row, model.logits(history), atol=tolerance, rtol=0)
    finally:
        for grower in growers:
            engine.close(grower.session)


@given(st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_tables_grow_trees(seed: int) -> None:
    spec = TableSpec(vocab=VOCAB, contexts=4_099, order=seed % 3)
    for engine in (TableEngine(spec), SimulatedEngine(TableEngine(spec), 0.01)):
        check_growth(engine, TableModel(spec), seed)


@pytest.fixture(scope="module", params=["compiled steps", "few rows", "many rows"])
def llama(request: pytest.FixtureRequest) -> tuple[Engine, tiny.Plain]:
    """Computed as steps of few rows are, as few rows beside many are, and as steps of many."""
    engine, plain = tiny.engine_and_plain(tiny.llama())
    if request.param == "compiled steps" and engine.row_decoder is None:
        pytest.skip("this CPU has no vectors of 512 bits")
    if request.param == "few rows" and tiny.DEVICE.type != "cpu":
        pytest.skip("their loops are those of a CPU")
    engine.row_decoder = engine.row_decoder if request.param == "compiled steps" else None
    engine.few_keys = 0 if request.param == "many rows" else FEW_KEYS
    return engine, plain


@pytest.mark.parametrize("seed", range(2))
def test_a_transformer_grows_trees(llama: tuple[Engine, tiny.Plain], seed: int) -> None:
    check_growth(*llama, seed)


def positions_by_row(item: StepItem) -> tuple[int, ...]:
    return tuple(range(item.kept_tree + 1, item.tree_rows + 1))


@pytest.mark.parametrize("mutant", ["positions by row", "a kept tree that all rows see"])
def test_the_comparison_catches(
    llama: tuple[Engine, tiny.Plain], monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    def bare(item: StepItem) -> StepItem:
        return StepItem(item.session, item.base_length, item.token_ids)

    keys, seen = attention.visible_keys, row_attention._visible_slots
    if mutant == "positions by row":
        monkeypatch.setattr("paceline.engine.transformer.depths", positions_by_row)
    else:
        monkeypatch.setattr(attention, "visible_keys", lambda item, *rest: keys(bare(item), *rest))
        monkeypatch.setattr(row_attention, "_visible_slots", lambda item, horizon: seen(bare(item), horizon))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        for seed in range(4):
            check_growth(*llama, seed)
