"""Drafters that read features are replayed from every place where a round may begin, with what is known there."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.drafters.heads.own_features import OwnFeaturesEngine
from paceline.protocol.sampling import NoiseKey
from paceline_lab.predict.passes import SampleText, chances_of, drafter_pass
from paceline_lab.predict.positions import TargetPositions
from paceline_training.corpus import Role, Row
from paceline_training.evaluate import MAX_K, Reading, coupled_acceptance, overlap
from tests.drafters.heads.sum_network import VOCAB, SumNetwork, sum_features

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
