"""Exactness with a draft that lacks half of the vocabulary: the distribution of the text is the target's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.protocol.target import Round
from tests.e2e.statistics import LEVEL, chi_square_p, is_given_away
from tests.mutants.rounds import MIDDLING, VOCAB, BlockRounds, Rounds, Scores, enumerate_distribution

REDUCED = DraftVocabulary(np.array([1, 3], np.int32), VOCAB)
LENGTH = 4
SAMPLES = 2_000
DISTRIBUTION = enumerate_distribution(LENGTH)


class ReducedRounds(Rounds):
    """Rejection, with a draft that can't propose ids 0 and 2."""

    draft = MIDDLING

    def draft_scores(self, history: Sequence[int]) -> Scores:
        scores: Scores = REDUCED.scatter(super().draft_scores(history)[np.newaxis, REDUCED.d2t])[0]
        return scores


class ReducedBlockRounds(ReducedRounds, BlockRounds):
    """Block acceptance, likewise."""


class RenormalisedTarget(ReducedRounds):
    """Not exact: the target's own draws are confined to the draft's vocabulary."""

    def target_scores(self, round_: Round) -> Scores:
        return REDUCED.scatter(super().target_scores(round_)[:, REDUCED.d2t])


@pytest.mark.parametrize("algorithm", [ReducedRounds, ReducedBlockRounds])
def test_the_distribution_is_the_targets(algorithm: type[Rounds]) -> None:
    texts = [algorithm(seed).text(LENGTH) for seed in range(SAMPLES)]
    assert {token for text in texts for token in text} == set(range(VOCAB))
    assert chi_square_p(texts, DISTRIBUTION) > LEVEL


def test_a_confined_target_is_given_away() -> None:
    assert is_given_away(lambda seed: RenormalisedTarget(seed).text(LENGTH), DISTRIBUTION, SAMPLES)
