"""Suffix drafting, the drafter without a model: a text goes on as it did after an earlier occurrence of its suffix.

The longest suffix that occurs elsewhere, in the text itself or in another one, is continued by what followed it
there most often (SuffixDecoding, arXiv 2411.04975: continuations by the product of their empirical frequencies).
The paper keeps suffix trees of bounded depth; a suffix automaton finds matches of any length in constant time a token
(`suffix_kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.protocol.proposal import NGRAM
from paceline.sampling import suffix_kernels as kernels
from paceline.sampling.match import LONGEST_MATCH, MAX_FOLLOWING, Match

MAX_TOKEN_BYTES = 160
"""Bytes of an automaton for each token of the worst text: 2 states, 3 edges, and 8 places of the table for each token
that there is room for, at most twice as many."""
LEAST_ROOM = 256
"""Tokens for which an automaton has room at first; the room doubles."""
NO_TOKEN = kernels.NO_TOKEN


class TextPlace(NamedTuple):
    """A string in an automaton: its state and its length, which tells apart the strings of a state."""

    state: int = 0
    length: int = 0


class SuffixAutomaton:
    """An append-only text in which matches are found; 100 bytes a token in usual texts, at most 160.

    The arrays have room for the worst text; what was not written to yet costs no memory, since systems give pages as
    they are written.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._head = np.zeros(4, np.int32)
        self._states = np.empty((0, 5), np.int32)
        self._edges = np.empty((0, 4), np.int32)
        self._table = np.empty(0, np.int32)
        self._room = 0
        self._reserve(max(LEAST_ROOM, len(tokens)))
        kernels.add_state(self._states, self._head, 0)
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens of the text."""
        return int(self._head[kernels.TOKENS])

    @property
    def used_bytes(self) -> int:
        """Bytes that have been written to."""
        states, edges, _, _ = self._head.tolist()
        numbers = states * self._states.shape[1] + edges * self._edges.shape[1] + self._table.size
        return int(numbers * self._table.itemsize)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens: ids, or `NO_TOKEN` between texts, past which no match goes on."""
        if len(self) + len(tokens) > self._room:
            self._reserve(max(2 * self._room, len(self) + len(tokens)))
        kernels.extend(self._states, self._edges, self._table, self._head, _array(tokens))

    def own_suffix(self) -> TextPlace:
        """The text's longest suffix that also occurred before."""
        state = int(self._states[self._head[kernels.WHOLE], kernels.LINK])
        return TextPlace(state, int(self._states[state, kernels.LENGTH])) if state > 0 else TextPlace()

    def advance(self, place: TextPlace, tokens: Sequence[int]) -> TextPlace:
        """The place of the longest suffix, of a place's string followed by `tokens`, that is in the text."""
        return TextPlace(*kernels.walk(self._states, self._edges, self._table, *place, _array(tokens)))

    def match(self, place: TextPlace, drafter: str = NGRAM) -> Match | None:
        """The commonest continuation of a place, token by token; None: it has none."""
        state, length = kernels.goes_on(self._states, self._edges, *place)
        following, shares = self._follow(state, MAX_FOLLOWING)
        return Match(min(length, LONGEST_MATCH), following, shares, drafter) if following else None

    def paths(self, place: TextPlace, m: int, k: int) -> list[tuple[int, ...]]:
        """Up to m continuations of up to k tokens that begin differently: the commonest first, those of suffixes
        behind those of a place's whole string."""
        firsts = np.empty(m, np.int32)
        continuations: list[tuple[int, ...]] = []
        state = place.state
        while state > 0 and len(continuations) < m:
            edge, _ = kernels.commonest(self._states, self._edges, state, firsts[: len(continuations)])
            if edge == -1:
                state = int(self._states[state, kernels.LINK])
                continue
            token, next_state = int(self._edges[edge, kernels.TOKEN]), int(self._edges[edge, kernels.TO])
            firsts[len(continuations)] = token
            continuations.append((token, *self._follow(next_state, k - 1)[0]))
        return continuations

    def _follow(self, state: int, most: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The commonest continuation of a state, at most `most` tokens, and their shares."""
        following, shares = np.empty(most, np.int32), np.empty(most, np.float32)
        count = kernels.follow(self._states, self._edges, state, following, shares)
        return tuple(following[:count].tolist()), tuple(shares[:count].tolist())

    def _reserve(self, tokens: int) -> None:
        """Make room for so many tokens: there are at most 2 states and 3 edges for each (Blumer et al. 1985)."""
        self._room = tokens
        self._states = _grow(self._states, 2 * tokens + 2)
        self._edges = _grow(self._edges, 3 * tokens + 3)
        self._table = np.zeros(1 << (4 * tokens).bit_length(), np.int32)
        kernels.rehash(self._edges, self._table, self._head)


class FollowedText:
    """The place in another text where the last tokens of a growing sequence stand.

    Args:
        text: may grow meanwhile.
        drafter: the name under which its tokens are proposed.
    """

    def __init__(self, text: SuffixAutomaton, drafter: str) -> None:
        self._text = text
        self._drafter = drafter
        self._place = TextPlace()

    def extend(self, tokens: Sequence[int]) -> None:
        """Follow the sequence's new tokens. Of many only the last ones matter."""
        if len(tokens) > LONGEST_MATCH:
            self._place, tokens = TextPlace(), tokens[-LONGEST_MATCH:]
        self._place = self._text.advance(self._place, tokens)

    def match(self) -> Match | None:
        """The commonest continuation there; None: it has none."""
        return self._text.match(self._place, self._drafter)


def warm_up() -> None:
    """Compile what is compiled here (or load it from the cache), so that no request pays for it."""
    text = SuffixAutomaton((1, 2, 1))
    text.paths(text.advance(text.own_suffix(), (2,)), 1, 2)
    text.match(text.own_suffix())


def _array(tokens: Sequence[int]) -> kernels.Array:
    return np.fromiter(tokens, np.int32, len(tokens))


def _grow(array: kernels.Array, rows: int) -> kernels.Array:
    """A copy with `rows` rows; the new ones are uninitialised."""
    larger = np.empty((rows, *array.shape[1:]), np.int32)
    larger[: len(array)] = array
    return larger
