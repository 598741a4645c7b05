"""The n-gram index against a brute-force search."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sampling.ngram import NgramIndex

texts = st.sampled_from([1, 3, 9]).flatmap(lambda largest: st.lists(st.integers(0, largest), max_size=60))


def matches(tokens: Sequence[int]) -> list[int]:
    """Places after an earlier match of the suffix: longest first, then most recent."""
    length = len(tokens)
    return [
        place
        for n in (5, 4, 3, 2)
        for place in range(length - 1, n - 1, -1)
        if list(tokens[place - n : place]) == list(tokens[length - n :])
    ]


def continuation(tokens: Sequence[int], place: int, k: int) -> tuple[int, ...]:
    grown = list(tokens)
    for i in range(k):
        grown.append(grown[place + i])
    return tuple(grown[len(tokens) :])


def best(index: NgramIndex, k: int) -> tuple[int, ...]:
    return next(iter(index.propose_many(1, k)), ())


@settings(max_examples=300, deadline=None)
@given(tokens=texts, k=st.integers(0, 9), pieces=st.integers(1, 5))
def test_propose_is_the_longest_most_recent_match(tokens: list[int], k: int, pieces: int) -> None:
    index = NgramIndex(tokens[:pieces])
    for start in range(pieces, len(tokens), pieces):
        index.extend(tokens[start : start + pieces])
    found = matches(tokens)
    assert len(index) == len(tokens)
    assert best(index, k) == (continuation(tokens, found[0], k) if found else ())


@settings(max_examples=300, deadline=None)
@given(tokens=texts, m=st.integers(0, 5), k=st.integers(1, 6))
def test_propose_many_has_distinct_first_tokens_best_first(tokens: list[int], m: int, k: int) -> None:
    firsts: dict[int, int] = {}
    for place in matches(tokens):
        firsts.setdefault(tokens[place], place)
    wanted = tuple(continuation(tokens, place, k) for place in firsts.values())[:m]
    assert NgramIndex(tokens).propose_many(m, k) == wanted


def test_the_longer_match_wins_over_the_more_recent() -> None:
    assert best(NgramIndex([1, 2, 3, 7, 2, 3, 8, 1, 2, 3]), 1) == (7,)


def test_the_more_recent_match_wins_among_equals() -> None:
    assert best(NgramIndex([2, 3, 7, 2, 3, 8, 2, 3]), 2) == (8, 2)


def test_a_repeating_passage_is_proposed_at_full_length() -> None:
    assert best(NgramIndex([1, 2, 1, 2, 1, 2]), 5) == (1, 2, 1, 2, 1)


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4, 5, 6]])
def test_no_earlier_match_proposes_nothing(tokens: list[int]) -> None:
    assert best(NgramIndex(tokens), 4) == ()
    assert NgramIndex(tokens).propose_many(3, 4) == ()


def test_five_tokens_of_context_count() -> None:
    assert best(NgramIndex([1, 2, 3, 4, 5, 9, 0, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5]), 1) == (9,)


def test_a_single_token_of_context_is_no_match() -> None:
    assert best(NgramIndex([1, 2, 3, 4, 2]), 1) == ()
