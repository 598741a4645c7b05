"""Table models follow their written-down distribution through any schedule; simulated engines take their time."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.table.engine import SimulatedEngine, TableEngine, TableModel, load_table
from paceline.models.table_names import TableSpec
from paceline.protocol.errors import InvalidInput


def test_the_distribution_sees_every_token_of_the_history_or_the_last_ones() -> None:
    whole, order = (TableModel(TableSpec.parse(f"table:vocab=8,{name}")) for name in ("contexts=100003", "order=2"))
    history = [1, 2, 3, 4, 5, 6]
    for place in range(len(history)):
        changed = [*history]
        changed[place] = 7
        assert not np.array_equal(whole.logits(history), whole.logits(changed))
        assert np.array_equal(order.logits(history), order.logits(changed)) is (place < 4)


def test_noise_resembles_and_invert_opposes() -> None:
    target = TableModel(TableSpec.parse("table:vocab=64")).logits([1])
    close = TableModel(TableSpec.parse("table:vocab=64,noise=0.1")).logits([1])
    opposite = TableModel(TableSpec.parse("table:vocab=64,invert=1")).logits([1])
    np.testing.assert_array_equal(opposite, -target)
    assert 0.9 < np.corrcoef(target, close)[0, 1] < 1
    assert np.std(target) == pytest.approx(2.0, rel=0.3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("table:colour=1", "table key = 'colour'"),
        ("table:vocab=1", "table vocab = 1"),
        ("table:vocab=x", "table vocab = 'x'"),
        ("table:vocab=8,eos=8", "table eos = 8"),
        ("table:sharpness=nan", "table sharpness = nan"),
        ("table:noise=1.5", "table noise = 1.5"),
        ("table:disturb=-1", "table disturb = -1"),
        ("table:distribution=muddled", "table distribution = 'muddled': must be one of text, close, middling, poor"),
    ],
)
def test_bad_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_table(name)


def test_the_numeric_fingerprint_is_the_distribution_alone() -> None:
    one = load_table("table:vocab=8,seed=3").info.fingerprint
    same = load_table("table:vocab=8,seed=3,step_ms=1,max_length=64").info.fingerprint
    other = load_table("table:vocab=8,seed=4").info.fingerprint
    assert one == same
    assert one.numeric != other.numeric
    assert one.tokenizer == other.tokenizer
    named = TableSpec.parse("table:distribution=middling,disturb=0.6,step_ms=30")
    assert named == replace(TableSpec.parse("table:distribution=middling"), disturb=0.6, step_ms=30.0)
    assert TableSpec.parse(named.distribution) == replace(named, step_ms=0.0)


def test_a_timed_step_waits_for_its_rows_and_does_not_spin() -> None:
    engine = load_table("table:vocab=8,step_ms=20,row_ms=10")
    assert isinstance(engine, SimulatedEngine)
    assert isinstance(load_table("table:"), TableEngine), "no wait"
    engine.open(1, 8)
    began, cpu = time.perf_counter(), time.thread_time()
    engine.step(StepPlan((StepItem(1, 0, (1, 2, 3)),)))
    elapsed = time.perf_counter() - began
    assert elapsed >= 0.05
    assert time.thread_time() - cpu < 0.5 * elapsed
    engine.close(1)
    assert engine.kv_rows == 0


def test_a_spread_leaves_the_median_and_varies_the_contexts() -> None:
    plain = TableModel(TableSpec.parse("table:vocab=512,contexts=64,sharpness=3"))
    spread = TableModel(TableSpec.parse("table:vocab=512,contexts=64,sharpness=3,sharpness_spread=0.7"))
    ratios = np.array([np.std(spread.context(row)) / np.std(plain.context(row)) for row in range(64)])
    assert np.median(ratios) == pytest.approx(1, rel=0.05)
    assert np.std(np.log(ratios)) == pytest.approx(0.7, rel=0.1)


@pytest.mark.parametrize("tail", [0.0, 0.8])
def test_a_disturbance_has_the_stated_size_whatever_its_tail(tail: float) -> None:
    target = TableModel(TableSpec.parse("table:vocab=4096,contexts=16"))
    draft = TableModel(TableSpec.parse(f"table:vocab=4096,contexts=16,disturb=0.5,disturb_tail={tail}"))
    off = np.stack([draft.context(row) - target.context(row) for row in range(16)])
    assert np.std(off) == pytest.approx(0.5, rel=0.05)
    kurtosis = np.mean(off**4) / np.var(off) ** 2
    assert kurtosis > 10 if tail else kurtosis == pytest.approx(3, rel=0.1)
