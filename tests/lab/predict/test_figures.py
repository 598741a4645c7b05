"""Ranks under shared noise against races, figures against hand-computed ones, and passes with features."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.drafters.heads.own_features import OwnFeaturesEngine
from paceline.protocol.sampling import NoiseKey
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race, race_rows
from paceline_lab.predict.figures import LEAST_Q, RANKS, calibration_error, divergence, entropy, rank_reach
from paceline_lab.predict.passes import SampleText, chances_of, drafter_pass
from paceline_lab.predict.positions import TargetPositions
from paceline_training.corpus import Role, Row
from paceline_training.evaluate import MAX_K, Reading, coupled_acceptance, overlap
from tests.drafters.heads.sum_network import VOCAB, SumNetwork, sum_features

RANDOM = np.random.Generator(np.random.Philox(29))


def drawn_pair(size: int, sharpness: float = 1.0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    p, q = RANDOM.dirichlet(np.full(size, sharpness)), RANDOM.dirichlet(np.full(size, sharpness))
    return p, q


@pytest.mark.full
@pytest.mark.parametrize("size", [5, 200])
def test_ranks_fall_as_races_say(size: int) -> None:
    """False-failure odds below 1e-5: 5 standard deviations of each of 8 shares of 6,000 draws."""
    p, q = drawn_pair(size, 0.3)
    draws = 6_000
    scores = np.log(p), np.tile(np.log(q), (draws, 1))
    tokens = np.array([race(scores[0], NoiseKey(3), Stream.DRAFT, place) for place in range(draws)])
    orders = race_rows(scores[1], RANKS, NoiseKey(3), Stream.DRAFT, range(draws))
    weights = np.bincount(tokens, minlength=size) / draws
    expected = sum(weights[token] * rank_reach(p, q, int(token)) for token in np.flatnonzero(weights))
    seen = np.array([(orders[:, :rank] == tokens[:, None]).any(axis=1).mean() for rank in range(1, RANKS + 1)])
    assert np.abs(seen - expected) == pytest.approx(0, abs=5 * 0.5 / np.sqrt(draws))


@pytest.mark.parametrize("size", [3, 7, 500])
def test_the_first_rank_is_coupled_acceptance_and_enough_ranks_hold_every_token(size: int) -> None:
    p, q = drawn_pair(size)
    for token in range(min(size, 7)):
        reach = rank_reach(p, q, token)
        assert reach[0] == pytest.approx(coupled_acceptance(p, q, token), abs=1e-12)
        assert (np.diff(reach) >= 0).all()
        if size <= RANKS:
            assert reach[size - 1] == pytest.approx(1, abs=1e-6)


def test_divergence_and_entropy_by_hand() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.0, 0.75])
    assert entropy(p) == pytest.approx(np.log(2))
    assert divergence(p, q) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(0.5 / LEAST_Q))


def test_calibration_error_is_the_weighted_gap_of_each_bin() -> None:
    confidence, right = np.array([0.95, 0.97, 0.15, 1.0]), np.array([1.0, 0.0, 0.15, 1.0])
    assert calibration_error(confidence, right) == pytest.approx(abs(2 - 2.92) / 4)
    assert calibration_error(np.empty(0), np.empty(0)) == 0


LENGTH, PROMPT = 14, 4


def test_each_depth_knows_features_up_to_its_rounds_root() -> None:
    random = np.random.Generator(np.random.Philox(5))
    tokens = random.integers(0, VOCAB, LENGTH).astype(np.int32)
    roles = np.array([0] * PROMPT + [Role.ANSWER] * (LENGTH - PROMPT), np.int8)
    text = SampleText(Row(tokens, roles, 1.0), NoiseKey(3), own=True)
    learned = text.answer_places
    logits = random.normal(size=(learned.size, VOCAB)).astype(np.float32)
    features = sum_features(LENGTH - 1)
    ids, figures = np.zeros((3, learned.size), np.int32), np.zeros((4, learned.size))
    ids[1] = tokens[learned]
    target = TargetPositions(learned.astype(np.int32), roles[learned], ids[1], ids[1], ids[2], *figures)
    network = SumNetwork()
    found = drafter_pass(OwnFeaturesEngine(network), text, target, Reading(logits, features))
    assert found.reach.shape[:2] == (learned.size, MAX_K)
    for place, at in enumerate(learned.tolist()):
        p = chances_of(logits[place], text.params)
        for depth in range(min(MAX_K, at)):
            root = at - 1 - depth
            given = dict(enumerate(features[:root]))
            q = chances_of(network.by_definition(tokens[:at].tolist(), given)[-1], text.params)
            assert found.reach[place, depth, 0] == pytest.approx(coupled_acceptance(p, q, int(tokens[at])), rel=1e-3)
            if depth == 0:
                assert found.overlaps[place] == pytest.approx(overlap(p, q), rel=1e-3)
    assert np.ptp(found.reach[-1, :, 0]) > 1e-3  # depths differ
