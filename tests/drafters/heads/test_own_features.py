"""Engines that go on from their own features: every row reads what the definition says, however steps are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.drafters.heads.own_features import OWN_REACH, OwnFeaturesEngine
from paceline.engine.features import FeatureEngine
from paceline.engine.interface import Logits, StepItem, StepPlan
from paceline.protocol.errors import InvalidInput, PrefixMismatch
from tests.drafters.heads.sum_network import SumNetwork
from tests.drafters.heads.sum_network import sum_features as features

SESSION = 7


@pytest.fixture
def network() -> SumNetwork:
    return SumNetwork()


@pytest.fixture
def engine(network: SumNetwork) -> OwnFeaturesEngine:
    engine = OwnFeaturesEngine(network)
    engine.open(SESSION, 512)
    return engine


def chain(tokens: Sequence[int], base: int = 0, kept: Sequence[int] = ()) -> StepItem:
    return StepItem(SESSION, base, tuple(tokens), kept_rows=tuple(kept), logit_rows=tuple(range(len(tokens))))


def step(engine: OwnFeaturesEngine, item: StepItem) -> Logits:
    return engine.step(StepPlan((item,)))[0]


TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)


def test_engine_is_a_feature_engine(engine: OwnFeaturesEngine) -> None:
    assert isinstance(engine, FeatureEngine)


@pytest.mark.parametrize("known", [{}, {0: 1}, {0: 8}, {0: 3, 5: 2}, {2: 2}])
@pytest.mark.parametrize("cuts", [[8], [3, 5], [1, 1, 6]])
def test_chain_reads_given_features_then_its_own(
    engine: OwnFeaturesEngine, network: SumNetwork, known: dict[int, int], cuts: list[int]
) -> None:
    given: dict[int, np.ndarray] = {}
    for first, count in known.items():
        rows = features(count, first)
        engine.give(SESSION, first, rows)
        given |= {first + place: row for place, row in enumerate(rows)}
    found, base = [], 0
    for cut in cuts:
        found.append(step(engine, chain(TOKENS[base : base + cut], base)))
        base += cut
    np.testing.assert_allclose(np.concatenate(found), network.by_definition(TOKENS, given), rtol=1e-5, atol=1e-6)


def test_tree_of_several_levels_in_one_step(engine: OwnFeaturesEngine, network: SumNetwork) -> None:
    rows = features(3)
    given = dict(enumerate(rows))
    engine.give(SESSION, 0, rows)
    step(engine, chain(TOKENS[:4]))
    # Two children of the root, a child of each, out of order of depth.
    item = StepItem(SESSION, 4, (5, 7, 6, 8), parents=(-1, 0, -1, 2), logit_rows=(0, 1, 2, 3))
    found = step(engine, item)
    for row, path in enumerate([(5,), (5, 7), (6,), (6, 8)]):
        wanted = network.by_definition((*TOKENS[:4], *path), given)[-1]
        np.testing.assert_allclose(found[row], wanted, rtol=1e-5, atol=1e-6)
    # The second branch is kept: its own features move with it.
    more = step(engine, chain((9,), 6, kept=(6, 7)))
    wanted = network.by_definition((*TOKENS[:4], 6, 8, 9), given)[-1]
    np.testing.assert_allclose(more[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("asked", [(3, 0), (2, 3, 1), ()])
def test_logits_come_in_the_order_that_was_asked(engine: OwnFeaturesEngine, asked: tuple[int, ...]) -> None:
    engine.give(SESSION, 0, features(3))
    step(engine, chain(TOKENS[:4]))
    item = StepItem(SESSION, 4, (5, 7, 6, 8), parents=(-1, 0, -1, 2), logit_rows=(0, 1, 2, 3))
    in_order = step(engine, item)
    found = step(engine, replace(item, logit_rows=asked))
    np.testing.assert_allclose(found, in_order[[*asked]], rtol=1e-6)


def test_rows_computed_again_read_what_came_since(engine: OwnFeaturesEngine, network: SumNetwork) -> None:
    rows = features(8)
    engine.give(SESSION, 0, rows[:3])
    step(engine, chain(TOKENS))
    engine.give(SESSION, 3, rows[3:])
    again = step(engine, chain(TOKENS[4:], 4))
    wanted = network.by_definition(TOKENS, dict(enumerate(rows)))
    np.testing.assert_allclose(again, wanted[4:], rtol=1e-5, atol=1e-6)


def test_features_shifted_by_one_are_told(engine: OwnFeaturesEngine, network: SumNetwork) -> None:
    rows = features(8)
    engine.give(SESSION, 1, rows[:7])  # the bug: position p is given what the target computed at p - 1
    found = step(engine, chain(TOKENS))
    wanted = network.by_definition(TOKENS, dict(enumerate(rows)))
    assert not np.isclose(found[1:], wanted[1:], atol=1e-3).all(axis=1).any()


def test_unknown_prompt_is_not_computed_row_by_row(engine: OwnFeaturesEngine, network: SumNetwork) -> None:
    engine.give(SESSION, 100, features(1))
    step(engine, chain([1] * 300))
    assert network.steps <= OWN_REACH + 1


@pytest.mark.parametrize(
    ("give", "named"),
    [
        (lambda engine: engine.give(SESSION, 0, np.zeros((2, 5), np.float32)), r"features shape.*\[rows, 8\]"),
        (lambda engine: engine.give(SESSION, -1, features(1)), "first_position"),
        (lambda engine: engine.give(SESSION, 0, features(1) * np.inf), "finite"),
    ],
)
def test_refused_features(engine: OwnFeaturesEngine, give: Callable[[OwnFeaturesEngine], None], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        give(engine)


def test_refused_plan_changes_nothing(engine: OwnFeaturesEngine, network: SumNetwork) -> None:
    engine.give(SESSION, 0, features(3))
    first = step(engine, chain(TOKENS[:4]))
    with pytest.raises(PrefixMismatch):
        step(engine, chain((1, 2), 9))
    again = step(engine, chain(TOKENS[2:4], 2))
    np.testing.assert_allclose(again, first[2:], rtol=1e-6)
    engine.close(SESSION)
    assert engine.kv_rows == 0
