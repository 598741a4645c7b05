"""Chi-square tests with fixed seeds: pooled cells, and a level at which a false alarm is not to be expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from scipy import stats

MIN_EXPECTED = 5.0
LEVEL = 1e-6
"""A test of a right distribution fails once in a million seeds; seeds are fixed, so it does not flake."""

Tokens = tuple[int, ...]


def chi_square_p(samples: Sequence[Tokens], distribution: Mapping[Tokens, float]) -> float:
    """p-value of the samples under the distribution; cells of fewer than 5 expected are pooled into one."""
    observed = Counter(samples)
    unknown = sum(count for cell, count in observed.items() if distribution.get(cell, 0.0) == 0.0)
    if unknown:
        return 0.0
    total = len(samples)
    kept = {cell: p for cell, p in distribution.items() if p * total >= MIN_EXPECTED}
    rest = 1.0 - sum(kept.values())
    seen = [observed[cell] for cell in kept]
    expected = [p * total for p in kept.values()]
    if rest * total >= MIN_EXPECTED:
        seen.append(total - sum(seen))
        expected.append(rest * total)
    else:
        scale = sum(seen) / sum(expected)
        expected = [value * scale for value in expected]
    p_value: float = stats.chisquare(seen, expected).pvalue
    return p_value


def is_given_away(text: Callable[[int], Tokens], distribution: Mapping[Tokens, float], samples: int) -> bool:
    """Whether a mutant's texts by seed part from the distribution. One that is far off shows in an eighth of them."""
    texts: list[Tokens] = []
    for share in (8, 4, 2, 1):
        texts += [text(seed) for seed in range(len(texts), samples // share)]
        if chi_square_p(texts, distribution) < LEVEL:
            return True
    return False
