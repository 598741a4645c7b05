"""The analytic models against simulated rounds and against each other."""

from __future__ import annotations

import numpy as np
import pytest

from paceline_lab.bench.simulated.analytic import (
    expected_hit_rate,
    expected_tokens,
    overlap_ceiling,
    overlap_gain,
    whole_proposal_gain,
)

ROUNDS = 40_000


def accepted_counts(acceptance: float, k: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    coins = np.random.default_rng(1).random((ROUNDS, k)) < acceptance
    counts: np.ndarray[tuple[int], np.dtype[np.int64]] = coins.cumprod(axis=1).sum(axis=1)
    return counts


@pytest.mark.parametrize(("acceptance", "k"), [(0.6, 4), (0.9, 4), (0.95, 8)])
def test_rounds_commit_and_hit_as_simulated_ones_do(acceptance: float, k: int) -> None:
    accepted = accepted_counts(acceptance, k)
    assert expected_tokens(acceptance, k) == pytest.approx((accepted + 1).mean(), rel=0.01)
    chances = np.where(accepted == k, 0.95, 0.7)
    assert expected_hit_rate(acceptance, k, 0.95, 0.7) == pytest.approx(chances.mean(), abs=0.005)


def test_edges() -> None:
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert expected_hit_rate(1.0, 4, 0.9, 0.1) == pytest.approx(0.9)
    assert expected_hit_rate(0.0, 4, 0.9, 0.1) == pytest.approx(0.1)


def cache_speedup(
    hit_rate: float, tokens_hit: float, tokens_miss: float, drafting: float, backup_drafting: float
) -> float:
    """Speed-up of a speculation cache over one token a verification (SSD, arXiv 2603.03251).

    Args:
        hit_rate: share of rounds whose proposal was there.
        tokens_hit: tokens committed by a round after a hit.
        tokens_miss: the same after a miss.
        drafting: time to draft for the outcomes, in verifications; hidden unless above 1.
        backup_drafting: time to draft after a miss, in verifications; never hidden.
    """
    tokens = hit_rate * tokens_hit + (1 - hit_rate) * tokens_miss
    return tokens / (hit_rate * max(1.0, drafting) + (1 - hit_rate) * (1 + backup_drafting))


def test_a_cache_that_never_hits_is_plain_speculation_and_a_perfect_one_hides_all_drafting() -> None:
    assert cache_speedup(0.0, 3.0, 3.0, 0.5, 0.5) == pytest.approx(3.0 / 1.5)
    assert cache_speedup(1.0, 3.0, 1.0, 0.5, 9.0) == pytest.approx(3.0)
    assert cache_speedup(1.0, 3.0, 1.0, 1.2, 9.0) == pytest.approx(3.0 / 1.2)


@pytest.mark.parametrize("drafting", [15.0, 30.0, 45.0])
def test_the_gain_is_a_quotient_of_speedups(drafting: float) -> None:
    tokens, verify, hits = expected_tokens(0.8, 4), 30.0, 0.9
    on = cache_speedup(hits, tokens, tokens, drafting / verify, drafting / verify)
    off = cache_speedup(0.0, tokens, tokens, drafting / verify, drafting / verify)
    assert overlap_gain(hits, verify, drafting) == pytest.approx(on / off)
    assert overlap_gain(0.0, verify, drafting) == pytest.approx(1)
    assert overlap_gain(1.0, verify, verify) == pytest.approx(2)


def simulated_speed(
    a: float, guesses: tuple[float, float], times: tuple[float, float], k: int, m: int, n: int
) -> float:
    """Tokens in a unit of time when bonus hits bring m tokens, mismatch hits n and misses k."""
    rng = np.random.default_rng(2)
    verify, step = times
    tokens, seconds, length = 0, 0.0, k
    for coins, guess in zip(rng.random((ROUNDS, k)) < a, rng.random(ROUNDS), strict=True):
        accepted = int(coins[:length].cumprod().sum())
        full = accepted == length
        tokens += accepted + 1
        if guess >= guesses[0 if full else 1]:
            length, spent = k, verify + k * step
        else:
            length, spent = (m, max(verify, (m + 1) * step)) if full else (n, max(verify, n * step))
        seconds += spent
    return tokens / seconds


@pytest.mark.parametrize(("a", "step"), [(0.8, 3.75), (0.8, 7.5), (0.9, 7.5), (0.9, 10.0)])
def test_the_ceiling_is_the_best_simulated_choice_of_lengths(a: float, step: float) -> None:
    bonus, after, verify, k = 0.95, 0.8, 30.0, 4
    sequential = expected_tokens(a, k) / (verify + k * step)
    choices = [(m, n) for m in range(2, k + 1) for n in range(3, k + 1)]
    best = max(simulated_speed(a, (bonus, after), (verify, step), k, m, n) for m, n in choices) / sequential
    assert overlap_ceiling(a, bonus, after, verify, step, k) == pytest.approx(best, rel=0.02)


def test_a_step_more_costs_nothing_while_it_hides() -> None:
    hits = expected_hit_rate(0.8, 4, 0.95, 0.8)
    hidden = overlap_gain(hits, 30.0, 4 * 3.75)
    assert whole_proposal_gain(hits, 30.0, 3.75, 4) == pytest.approx(hidden)
    assert overlap_ceiling(0.8, 0.95, 0.8, 30.0, 3.75, 4) == pytest.approx(hidden)
    assert whole_proposal_gain(1.0, 30.0, 7.5, 4) == pytest.approx(60 / 37.5)
    longer = overlap_gain(hits, 30.0, 30.0)
    assert whole_proposal_gain(hits, 30.0, 7.5, 4) < overlap_ceiling(0.8, 0.95, 0.8, 30.0, 7.5, 4) < longer
