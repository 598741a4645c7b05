"""Engines that go on from their own features: every row reads what the definition says, however steps are cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.drafters.heads.own_features import OWN_REACH, OwnFeaturesEngine
from paceline.engine.features import FeatureEngine
from paceline.engine.interface import Logits, StepItem
from paceline.protocol.errors import InvalidInput, PrefixMismatch
from tests.drafters.heads.sum_network import SumNetwork
from tests.drafters.heads.sum_network import sum_features as features
from tests.engine.tiny import step

SESSION = 7


@pytest.fixture
def network() -> SumNetwork:
    return SumNetwork()


@pytest.fixture
def engine(network: SumNetwork) -> OwnFeaturesEngine:
    engine = OwnFeaturesEngine(network)
    assert isinstance(engine, FeatureEngine)
    engine.open(SESSION, 512)
    return engine


def assert_rows(rows: Logits, network: SumNetwork, text: Sequence[int], features: Mapping[int, np.ndarray]) -> None:
    """Logits of the last tokens of a text."""
    right = network.by_definition(text, features)[-len(rows) :]
    np.testing.assert_allclose(rows, right, rtol=1e-5, atol=1e-6)


def chain(tokens: Sequence[int], base: int = 0, kept: Sequence[int] = ()) -> StepItem:
    return StepItem(SESSION, base, tuple(tokens), kept_rows=tuple(kept), logit_rows=tuple(range(len(tokens))))


TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.mark.parametrize(
    ("known", "cuts"), [({}, [3, 5]), ({0: 8}, [1, 1, 6]), ({0: 3, 5: 2}, [8]), ({0: 3, 5: 2}, [3, 5]), ({2: 2}, [8])]
)
def test_chain_reads_given_features_then_its_own(
    engine: OwnFeaturesEngine, network: SumNetwork, known: dict[int, int], cuts: list[int]
) -> None:
    given: dict[int, np.ndarray] = {}
    for first, count in known.items():
        rows = features(count, first)
        engine.give(SESSION, first, rows)
        given |= {first + place: row for place, row in enumerate(rows)}
    for start, end in itertools.pairwise((0, *itertools.accumulate(cuts))):
        assert_rows(step(engine, chain(TOKENS[start:end], start)), network, TOKENS[:end], given)


@pytest.mark.parametrize("asked", [(3, 0), (2, 3, 1), ()])
def test_logits_come_in_the_order_that_was_asked(engine: OwnFeaturesEngine, asked: tuple[int, ...]) -> None:
    engine.give(SESSION, 0, features(3))
    step(engine, chain(TOKENS[:4]))
    item = StepItem(SESSION, 4, (5, 7, 6, 8), parents=(-1, 0, -1, 2), logit_rows=(0, 1, 2, 3))
    in_order = step(engine, item)
    np.testing.assert_allclose(step(engine, replace(item, logit_rows=asked)), in_order[[*asked]], rtol=1e-6)


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
