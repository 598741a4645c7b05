"""Acceptance rates of n-gram matches, learned whether or not anything was proposed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from paceline.costs.acceptance import AcceptanceRates
from paceline.sampling.match import ONCE_SHARE, Match

SCORE_EDGES = (0.06, 0.12, 0.2, 0.3, 0.42, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Bins of a match's score. For strings that occurred once they separate lengths of 1, 2, 4, 7, 12 and 36 tokens."""
MOST_BELIEVED = 0.95
"""Chance of the surest match before anything is known."""
PRIOR_WEIGHT = 4.0
"""A prior counts as many observations: that of matches and drafters in a pool, and that of a pool in a new request.
One copied passage, or a round or two of a draft, overrules it."""


class NgramShadow:
    """How often the next token of a match is right, by drafter and by the match's score.

    A deeper token of a match counts as the next token of a match that is longer by the right tokens before it. So
    text that comes token by token tells as much about deep tokens as text of whole proposals. A match depends on
    committed tokens alone, so every acceptance rule may use these statistics (`exactness` §7).
    """

    def __init__(self, rates: Mapping[str, AcceptanceRates] | None = None) -> None:
        self._rates = dict(rates or {})

    def learn(self, match: Match | None, committed: Sequence[int]) -> None:
        """Update the rates from the tokens committed after a match; None: there was no match."""
        if match is None:
            return
        rates = self._of(match.drafter)
        for right, (guess, token) in enumerate(zip(match.following, committed, strict=False)):
            rates.add(match.score(right), guess == token)
            if guess != token:
                return

    def prefix_chances(self, match: Match, depth: int) -> list[float]:
        """Chances that the match's first 1, 2, … tokens, up to `depth`, are all right."""
        rates = self._of(match.drafter)
        most = min(depth, len(match.following))
        return [*accumulate((rates.chance(match.score(right)) for right in range(most)), mul)]

    def child(self, weight: float) -> NgramShadow:
        """A copy for one request, in which the rates so far count `weight` observations."""
        return NgramShadow({drafter: rates.child(weight) for drafter, rates in self._rates.items()})

    def _of(self, drafter: str) -> AcceptanceRates:
        if drafter not in self._rates:
            self._rates[drafter] = AcceptanceRates.of(SCORE_EDGES, _prior_chance, PRIOR_WEIGHT)
        return self._rates[drafter]


def _prior_chance(score: float) -> float:
    """Chance of a token before anything is known: length / (length + 4) of what occurred once."""
    return min(MOST_BELIEVED, score / ONCE_SHARE)
