"""What suffix automata are measured beside: look-ups of the last 5 to 2 tokens, the latest of the longest match."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from paceline.sampling.match import LONGEST_MATCH, MAX_FOLLOWING, Match

LONGEST_GRAM, SHORTEST_GRAM = 5, 2
COMPARED_PLACES = 8
"""Earlier places of one n-gram whose agreement is counted."""


class NgramLookup:
    """An append-only text whose n-grams are in dictionaries, each with the places behind it."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        sizes = range(SHORTEST_GRAM, LONGEST_GRAM + 1)
        self._latest: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sizes}
        self._before: dict[int, dict[int, int]] = {n: {} for n in sizes}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            place = len(self._tokens)
            for n in range(SHORTEST_GRAM, min(LONGEST_GRAM, place) + 1):
                gram = tuple(self._tokens[place - n :])
                if gram in self._latest[n]:
                    self._before[n][place] = self._latest[n][gram]
                self._latest[n][gram] = place
            self._tokens.append(token)

    def match(self) -> Match | None:
        """The place that agrees longest, and what followed it."""
        places = [*itertools.islice(self._places(), COMPARED_PLACES)]
        best = max(places, key=self._agreement, default=None)
        if best is None:
            return None
        period = len(self._tokens) - best
        following = self._tokens[best : best + MAX_FOLLOWING]
        repeated = tuple(following[i % period] for i in range(MAX_FOLLOWING))
        return Match(self._agreement(best), repeated)

    def _places(self) -> Iterator[int]:
        for n in range(min(LONGEST_GRAM, len(self._tokens)), SHORTEST_GRAM - 1, -1):
            place = self._latest[n].get(tuple(self._tokens[-n:]))
            while place is not None:
                yield place
                place = self._before[n].get(place)

    def _agreement(self, place: int) -> int:
        tokens, end = self._tokens, len(self._tokens)
        most = min(place, LONGEST_MATCH)
        return next((n for n in range(most) if tokens[place - 1 - n] != tokens[end - 1 - n]), most)
