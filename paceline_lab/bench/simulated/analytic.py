"""What rounds should bring, from acceptance, hit rate and times alone. Pure.

Symbols: a, the chance that a drafted token is accepted, the same at every depth and independent;
k, tokens proposed in a round; T_p, the time to draft ahead. Times share one unit.

Guessing the bonus needs the row of the last drafted token, so m tokens are drafted ahead in T_p = (m + 1) ·
T_draft, not m · T_draft, unless a token before was a mismatch: where (k + 1) · T_draft > T_verify a hit's
round with a whole proposal can't be shorter than that, and one with a shorter proposal carries fewer tokens.
"""

from __future__ import annotations

import numpy as np


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens a round commits: (1 - a^(k+1)) / (1 - a), the bonus included (Leviathan et al., arXiv 2211.17192)."""
    return sum(acceptance**accepted for accepted in range(k + 1))


def expected_hit_rate(acceptance: float, k: int, bonus: float, after_mismatch: float) -> float:
    """Share of rounds whose outcome was drafted for.

    Args:
        acceptance: a; k tokens are all accepted with a^k.
        k: tokens proposed.
        bonus: chance that the token after k accepted ones is among those drafted for.
        after_mismatch: the same of the token that replaces the first mismatch.
    """
    all_accepted = acceptance**k
    return all_accepted * bonus + (1 - all_accepted) * after_mismatch


def overlap_gain(hit_rate: float, verify: float, drafting: float) -> float:
    """Speed with drafting hidden behind verification over speed with one after the other.

    Both draft the same k tokens in `drafting`, so rounds commit the same tokens
    and only their times differ: verify + drafting one after the other, the
    longer of the two after a hit, and the sum after a miss. It is the quotient, at
    this hit rate and at 0, of the speed-up of a speculation cache (SSD, arXiv 2603.03251).
    """
    sequential = verify + drafting
    return sequential / (hit_rate * max(verify, drafting) + (1 - hit_rate) * sequential)


def whole_proposal_gain(hit_rate: float, verify: float, step: float, k: int) -> float:
    """`overlap_gain` where every hit brings all k tokens: T_p is k + 1 steps of the draft, after a miss k."""
    sequential = verify + k * step
    return sequential / (hit_rate * max(verify, (k + 1) * step) + (1 - hit_rate) * sequential)


def overlap_ceiling(
    acceptance: float, bonus: float, after_mismatch: float, verify: float, step: float, k: int
) -> float:
    """The best `overlap_gain` that T_p allows, over the lengths that a hit's proposal may have.

    Args:
        acceptance: a.
        bonus: as in `expected_hit_rate`.
        after_mismatch: the same.
        verify: T_verify.
        step: T_draft, of one step.
        k: tokens proposed after a miss, and at most.
    """
    sequential = expected_tokens(acceptance, k) / (verify + k * step)
    hits = ((m, n) for m in range(k + 1) for n in range(k + 1))
    return max(_speed(acceptance, bonus, after_mismatch, verify, step, (m, n, k)) for m, n in hits) / sequential


def _speed(
    acceptance: float, bonus: float, after_mismatch: float, verify: float, step: float, lengths: tuple[int, int, int]
) -> float:
    """Tokens in a unit of time when rounds after a bonus hit, a mismatch hit and a miss carry so many tokens.

    A round's length sets the chances of the next round's kind, so kinds are a Markov chain.
    """
    after_bonus, after_wrong, after_miss = lengths
    times = (
        max(verify, (after_bonus + 1) * step),
        max(verify, after_wrong * step),
        verify + after_miss * step,
    )
    chain = np.empty((3, 3))
    for row, length in enumerate(lengths):
        full = acceptance**length
        hits = full * bonus, (1 - full) * after_mismatch
        chain[row] = *hits, 1 - sum(hits)
    shares = np.linalg.matrix_power(chain, 1 << 10)[-1]
    tokens = [expected_tokens(acceptance, length) for length in lengths]
    return float(shares @ np.array(tokens) / (shares @ np.array(times)))
