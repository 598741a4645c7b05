"""The replayed distribution against plain definitions and simulated rounds; exactness with a draft that lacks ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.drafters.layers.vocabulary import DraftVocabulary
from paceline.engine.table.engine import load_table
from paceline.protocol.sampling import NoiseKey
from paceline.protocol.target import Round
from paceline.sampling.noise import Stream
from paceline.sampling.racing import race
from paceline_training.corpus import Role, Row
from paceline_training.evaluate import acceptance_tables, coupled_acceptance, coupled_match, overlap, rounds_of
from tests.e2e.statistics import LEVEL, chi_square_p, is_given_away
from tests.mutants.rounds import MIDDLING, VOCAB, BlockRounds, Rounds, Scores, enumerate_distribution

RANDOM = np.random.Generator(np.random.Philox(7))


def pair(size: int = 7) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two distributions, each with an id that it excludes."""
    p, q = RANDOM.dirichlet(np.ones(size)), RANDOM.dirichlet(np.ones(size))
    p[0] = q[-1] = 0
    return p / p.sum(), q / q.sum()


def test_match_is_the_sum_over_tokens_and_lies_between_its_bounds() -> None:
    for _ in range(50):
        p, q = pair()
        by_token = sum(p[token] * coupled_acceptance(p, q, token) for token in range(p.size))
        assert coupled_match(p, q) == pytest.approx(by_token, abs=1e-12)
        shared = overlap(p, q)
        assert shared / (2 - shared) - 1e-12 <= by_token <= shared + 1e-12


def test_match_is_what_shared_noise_does() -> None:
    """False-failure odds below 1e-6: 5 standard deviations of 4,000 draws."""
    p, q = pair()
    with np.errstate(divide="ignore"):
        scores = np.log(p), np.log(q)
    draws = 4000
    same = sum(
        len({race(each, NoiseKey(3), Stream.DRAFT, position) for each in scores}) == 1 for position in range(draws)
    )
    expected = coupled_match(p, q)
    assert abs(same / draws - expected) < 5 * np.sqrt(expected * (1 - expected) / draws)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_rounds_follow_simulation(k: int) -> None:
    """False-failure odds below 1e-6: 5 standard errors of 2,000 simulated replays."""
    accepted = RANDOM.uniform(0.2, 0.95, (40, k))  # what is accepted may depend on the depth
    counts = np.array([simulated_rounds(accepted, k) for _ in range(2000)])
    rounds, reached = rounds_of(accepted, k)
    assert abs(counts.mean() - rounds) < 5 * counts.std() / np.sqrt(counts.size)
    assert 0 < reached.sum() <= len(accepted)
    assert (np.diff(reached) <= 0).all()


def simulated_rounds(accepted: NDArray[np.float64], k: int) -> int:
    at = rounds = 0
    while at + k <= len(accepted):
        rounds += 1
        depth = 0
        while depth < k and RANDOM.random() < accepted[at + depth, depth]:
            depth += 1
        at += depth + 1
    return rounds


def test_a_perfect_draft_accepts_all_and_parts_are_told_apart() -> None:
    engines = [load_table("table:vocab=16,seed=1") for _ in range(2)]
    roles = np.array([0] * 5 + [Role.THINKING] * 70 + [Role.ANSWER] * 30, np.int8)
    row = Row(RANDOM.integers(0, 16, roles.size).astype(np.int32), roles, 1.0)
    answer, thinking = acceptance_tables(engines[0], engines[1], [row])
    assert (answer.part, thinking.part) == ("answer", "thinking")
    assert (answer.positions, thinking.positions) == (30, 70)
    assert thinking.overlap == pytest.approx(1)
    assert thinking.by_depth == pytest.approx((1,) * 8)
    assert engines[0].kv_rows == engines[1].kv_rows == 0


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


@pytest.mark.parametrize("algorithm", [ReducedRounds, pytest.param(ReducedBlockRounds, marks=pytest.mark.full)])
def test_the_distribution_is_the_targets(algorithm: type[Rounds]) -> None:
    texts = [algorithm(seed).text(LENGTH) for seed in range(SAMPLES)]
    assert {token for text in texts for token in text} == set(range(VOCAB))
    assert chi_square_p(texts, DISTRIBUTION) > LEVEL


def test_a_confined_target_is_given_away() -> None:
    assert is_given_away(lambda seed: RenormalisedTarget(seed).text(LENGTH), DISTRIBUTION, SAMPLES)
