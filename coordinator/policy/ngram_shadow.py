"""What matches would have brought, whether or not anything was proposed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from paceline.costs.acceptance import AcceptanceRates
from paceline.sampling.match import ONCE_SHARE, Match

SCORE_EDGES = (0.06, 0.12, 0.2, 0.3, 0.42, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Bins of a match's score. Of strings that occurred once they part lengths of 1, 2, 4, 7, 12 and 36 tokens."""
MOST_BELIEVED = 0.95
"""Chance of the surest match before anything is known."""
PRIOR_WEIGHT = 4.0
"""Observations that what is believed beforehand counts, of matches as of drafters, in a pool and of a pool in a new
request: one copied passage, or a round or two of a draft, overrules it."""


class NgramShadow:
    """How often the next token of a match is right, by drafter and by the match's score.

    A token deeper behind a match counts as the next one of a match that is longer by what was right before it. So
    text that comes token by token says as much of deep tokens as text of whole proposals. A match depends on
    committed tokens alone: every acceptance rule may look at all of this (`exactness` §7).
    """

    def __init__(self, rates: Mapping[str, AcceptanceRates] | None = None) -> None:
        self._rates = dict(rates or {})

    def learn(self, match: Match | None, committed: Sequence[int]) -> None:
        """Compare the match that stood at a position (None: there was none) with the tokens committed then."""
        if match is None:
            return
        rates = self._of(match.drafter)
        for right, (guess, token) in enumerate(zip(match.following, committed, strict=False)):
            rates.add(match.score(right), guess == token)
            if guess != token:
                return

    def reached(self, match: Match, depth: int) -> list[float]:
        """Chances that the match's first 1, 2, … tokens, up to `depth`, are all right."""
        rates = self._of(match.drafter)
        most = min(depth, len(match.following))
        return [*accumulate((rates.chance(match.score(right)) for right in range(most)), mul)]

    def child(self, weight: float) -> NgramShadow:
        """A copy for one request; what is known so far counts `weight` observations."""
        return NgramShadow({drafter: rates.child(weight) for drafter, rates in self._rates.items()})

    def _of(self, drafter: str) -> AcceptanceRates:
        if drafter not in self._rates:
            self._rates[drafter] = AcceptanceRates.of(SCORE_EDGES, _believed, PRIOR_WEIGHT)
        return self._rates[drafter]


def _believed(score: float) -> float:
    """Chance of a token before anything is known: length / (length + 4) of what occurred once."""
    return min(MOST_BELIEVED, score / ONCE_SHARE)
