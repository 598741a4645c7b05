"""What n-gram matches would have brought, whether or not anything was proposed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from paceline.costs.acceptance import AcceptanceRates
from paceline.sampling.ngram import Match

LENGTH_EDGES = (3.0, 4.0, 5.0, 7.0, 10.0, 16.0, 32.0)
"""Bins of a match's length; finest where `NgramIndex` finds most, from its shortest match of 2 on."""
PRIOR_WEIGHT = 4.0
"""Observations that the prior of a bin is worth: one copied passage overrules it."""


class NgramShadow:
    """How often the next token of a match is right, by the match's length.

    A token deeper behind a match counts as the next one of a match that is longer by what was right before it. So
    text that comes token by token says as much of deep tokens as text of whole proposals. A match depends on
    committed tokens alone: every acceptance rule may look at all of this (`exactness` §7).
    """

    def __init__(self, rates: AcceptanceRates | None = None) -> None:
        self._rates = rates or AcceptanceRates.of(LENGTH_EDGES, lambda length: length / (length + 4.0), PRIOR_WEIGHT)

    def learn(self, match: Match | None, committed: Sequence[int]) -> None:
        """Compare the match that stood at a position (None: there was none) with the tokens committed then."""
        if match is None:
            return
        for right, (guess, token) in enumerate(zip(match.continuation(len(committed)), committed, strict=False)):
            self._rates.add(match.length + right, guess == token)
            if guess != token:
                return

    def reached(self, length: int, depth: int) -> list[float]:
        """Chances that the first 1, 2, … `depth` tokens behind a match of this length are all right."""
        return [*accumulate((self._rates.chance(length + right) for right in range(depth)), mul)]

    def child(self, weight: float) -> NgramShadow:
        """A copy for one request; what is known so far counts `weight` observations."""
        return NgramShadow(self._rates.child(weight))
