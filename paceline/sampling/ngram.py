"""Suffix matching over prompt and output: the drafter that needs no model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MAX_N = 5
MIN_N = 2
"""Tokens of the n-grams that are indexed; these limits are chosen, not tuned, and bound a look-up's time."""
MAX_MATCHES = 64
"""Earlier matches of one length that are looked at."""
LONGEST_MATCH = 64
"""Agreeing tokens are counted up to here."""
MAX_FOLLOWING = 129
"""Tokens after a match that are kept of it: a proposal's longest path, the token behind it, and as long a path again,
which is prefetched behind that one."""
COMPARED_MATCHES = 8
"""Earlier places whose agreement `longest_match` counts."""


@dataclass(frozen=True)
class Match:
    """An earlier place whose last `length` tokens equal the sequence's last ones.

    Attributes:
        length: of a match in a prediction: the length of an earlier place that is as trustworthy.
        following: what followed it, up to the end of the sequence or of the prediction; at least one token.
        predicted: whether it is in a prediction, which ends where it ends, and not in the sequence.
    """

    length: int
    following: tuple[int, ...] = field(repr=False)
    predicted: bool = False

    def continuation(self, k: int) -> tuple[int, ...]:
        """The k tokens that a repetition would bring; past its end a sequence repeats itself, a prediction stops."""
        if self.predicted:
            return self.following[:k]
        period = len(self.following)
        return tuple(self.following[i % period] for i in range(k))


class NgramIndex:
    """An append-only sequence that finds what followed its own suffix before.

    A match of length n is an earlier place whose last n tokens equal the sequence's last n
    (it may overlap the suffix). Longer matches are better, then more recent ones. `extend` costs a
    few dictionary entries a token, `propose_many` a few look-ups, whatever the length.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        # For each n: the latest place that followed an n-gram, and for each place the one before it.
        self._latest: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(MIN_N, MAX_N + 1)}
        self._previous: dict[int, dict[int, int]] = {n: {} for n in range(MIN_N, MAX_N + 1)}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        for token in tokens:
            self._index_place(len(self._tokens))
            self._tokens.append(token)

    def longest_match(self) -> Match | None:
        """The match with most agreeing tokens among the latest of the longest n-gram's; None without any."""
        best: tuple[int, int] | None = None
        for place in itertools.islice(self._matches(), COMPARED_MATCHES):
            length = self._agreement(place)
            if best is None or length > best[0]:
                best = length, place
            if best[0] >= LONGEST_MATCH:
                break
        if best is None:
            return None
        length, place = best
        return Match(length, tuple(self._tokens[place : place + MAX_FOLLOWING]))

    def propose_many(self, m: int, k: int) -> tuple[tuple[int, ...], ...]:
        """Up to m continuations of k tokens with distinct first tokens, best match first.

        Where a match reaches the end of the sequence the copy goes on over its own tokens, so a
        repeating passage is proposed at full length.
        """
        found: dict[int, tuple[int, ...]] = {}
        if k < 1:
            return ()
        for place in self._matches():
            if len(found) >= m:
                break
            first = self._tokens[place]
            if first not in found:
                period = len(self._tokens) - place
                found[first] = tuple(self._tokens[place + i % period] for i in range(k))
        return tuple(found.values())

    def _index_place(self, place: int) -> None:
        """Record that the token at `place` follows the n-grams that end just before it."""
        for n in range(MIN_N, min(MAX_N, place) + 1):
            gram = tuple(self._tokens[place - n : place])
            earlier = self._latest[n].get(gram)
            if earlier is not None:
                self._previous[n][place] = earlier
            self._latest[n][gram] = place

    def _matches(self) -> Iterator[int]:
        """Places that followed an earlier match of the suffix, best first; a place may repeat."""
        length = len(self._tokens)
        for n in range(min(MAX_N, length), MIN_N - 1, -1):
            place = self._latest[n].get(tuple(self._tokens[length - n :]))
            for _ in range(MAX_MATCHES):
                if place is None:
                    break
                yield place
                place = self._previous[n].get(place)

    def _agreement(self, place: int) -> int:
        """How many tokens before `place` equal the sequence's last ones."""
        tokens, end = self._tokens, len(self._tokens)
        length = 0
        while length < min(place, LONGEST_MATCH) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length
