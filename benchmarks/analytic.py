"""What rounds should bring, from acceptance, hit rate and times alone. Pure.

Symbols: a, the chance that a drafted token is accepted, the same at every depth and independent;
k, tokens proposed in a round. Times share one unit.
"""

from __future__ import annotations


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


def overlap_gain(hit_rate: float, verify: float, drafting: float) -> float:
    """Speed with drafting hidden behind verification over speed with one after the other.

    Both draft the same k tokens in `drafting`, so rounds commit the same tokens
    and only their times differ: verify + drafting one after the other, the
    longer of the two after a hit, and the sum after a miss. It is the quotient
    of `cache_speedup` at this hit rate and at 0.
    """
    sequential = verify + drafting
    return sequential / (hit_rate * max(verify, drafting) + (1 - hit_rate) * sequential)
