"""The suffix automaton against a brute-force search."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protocol.proposal import CORPUS
from paceline.sampling import suffix_kernels as kernels
from paceline.sampling.match import LONGEST_MATCH, MAX_FOLLOWING, ONCE_SHARE, Match
from paceline.sampling.suffix import MAX_TOKEN_BYTES, NO_TOKEN, FollowedText, SuffixAutomaton

texts = st.sampled_from([1, 3, 9]).flatmap(lambda largest: st.lists(st.integers(0, largest), max_size=48))


def ends(text: Sequence[int], string: Sequence[int]) -> list[int]:
    """Places behind each occurrence of a string."""
    size = len(string)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(string)]


def ranked(text: Sequence[int], string: Sequence[int]) -> list[tuple[int, float]]:
    """What follows a string and its share: the commonest first, then the latest."""
    places = [end for end in ends(text, string) if end < len(text)]
    counts = Counter(text[end] for end in places)
    latest = {text[end]: end for end in places}
    total = len(places) + kernels.ESCAPE * len(counts)
    order = sorted(counts, key=lambda token: (counts[token], latest[token]), reverse=True)
    return [(token, counts[token] / total) for token in order if token != NO_TOKEN]


def longest(text: Sequence[int], sequence: Sequence[int], times: int) -> int:
    """Tokens of the longest suffix of a sequence that a text has so many times, one of them going on."""
    for size in range(len(sequence), 0, -1):
        string = sequence[len(sequence) - size :]
        if len(ends(text, string)) >= times and ranked(text, string):
            return size
    return 0


def next_tokens(text: Sequence[int], string: Sequence[int], k: int) -> list[tuple[int, float]]:
    """The commonest way to go on; behind the text's end as its longest suffix does."""
    tokens: list[tuple[int, float]] = []
    string = list(string)
    while len(tokens) < k and string:
        options = ranked(text, string)
        if options:
            tokens.append(options[0])
            string.append(options[0][0])
        elif ends(text, string) == [len(text)]:
            string = string[1:]
        else:
            break
    return tokens


def matched(length: int, tokens: Sequence[tuple[int, float]]) -> Match:
    return Match(length, tuple(token for token, _ in tokens), tuple(share for _, share in tokens))


def expected(text: Sequence[int], sequence: Sequence[int], times: int) -> Match | None:
    size = longest(text, sequence, times)
    tokens = next_tokens(text, sequence[len(sequence) - size :], 12) if size else []
    return matched(size, tokens) if tokens else None


def agrees(match: Match | None, right: Match | None) -> bool:
    if match is None or right is None:
        return match is right
    k = len(right.following)
    same = (match.length, match.continuation(k)) == (right.length, right.following)
    return same and match.shares[:k] == pytest.approx(right.shares)


@settings(max_examples=150, deadline=None)
@given(tokens=texts, pieces=st.integers(1, 7))
def test_a_match_is_the_longest_suffix_and_goes_on_by_what_followed_most(tokens: list[int], pieces: int) -> None:
    text = SuffixAutomaton()
    for start in range(0, len(tokens), pieces):
        text.extend(tokens[start : start + pieces])
    assert len(text) == len(tokens)
    assert agrees(text.match(text.own_suffix()), expected(tokens, tokens, 2))


@settings(max_examples=150, deadline=None)
@given(tokens=texts, sequence=texts, more=texts)
def test_another_text_is_followed_while_it_grows(tokens: list[int], sequence: list[int], more: list[int]) -> None:
    text = SuffixAutomaton((*tokens, NO_TOKEN))
    followed = FollowedText(text, CORPUS)
    half = len(sequence) // 2
    followed.extend(sequence[:half])
    text.extend((*more, NO_TOKEN))
    followed.extend(sequence[half:])
    whole = [*tokens, NO_TOKEN, *more, NO_TOKEN]
    # What the text got later is known to what follows alone: it may be shorter than the longest, never another one.
    match, best = followed.match(), expected(whole, sequence, 1)
    if match is not None:
        assert best is not None and match.length <= best.length
        string = sequence[len(sequence) - match.length :]
        assert agrees(match, matched(match.length, next_tokens(whole, string, 12)))
    fresh = FollowedText(text, CORPUS)
    fresh.extend(sequence)
    assert agrees(fresh.match(), best)


@settings(max_examples=100, deadline=None)
@given(tokens=texts, m=st.integers(1, 5), k=st.integers(1, 6))
def test_paths_begin_differently_the_longest_suffixes_first(tokens: list[int], m: int, k: int) -> None:
    text = SuffixAutomaton(tokens)
    place = text.own_suffix()
    best: dict[int, tuple[int, ...]] = {}
    for size in range(place.length, 0, -1):
        string = tokens[len(tokens) - size :]
        for token, _ in ranked(tokens, string):
            best.setdefault(token, (token, *(each for each, _ in next_tokens(tokens, [*string, token], k - 1))))
    assert text.paths(place, m, k) == [*best.values()][:m]


def own_match(tokens: Sequence[int]) -> Match:
    text = SuffixAutomaton(tokens)
    match = text.match(text.own_suffix())
    assert match is not None
    return match


def test_a_repeating_passage_is_proposed_at_full_length() -> None:
    match = own_match([1, 2, 1, 2, 1, 2])
    assert match.following == (1, 2) * 64 + (1,)
    assert len(match.following) == MAX_FOLLOWING


def test_what_followed_once_counts_as_a_prediction_does() -> None:
    match = own_match([*range(99), *range(80)])
    assert match.shares[:19] == pytest.approx((ONCE_SHARE,) * 19)
    assert match.length == LONGEST_MATCH
    assert match.score(0) == pytest.approx(Match(LONGEST_MATCH, (1,)).score(0))


def test_nothing_is_found_across_the_border_of_two_texts() -> None:
    text = SuffixAutomaton((1, 2, 3, NO_TOKEN, 4, 5, NO_TOKEN))
    followed = FollowedText(text, CORPUS)
    followed.extend((2, 3))
    assert followed.match() is None
    followed.extend((4,))
    assert agrees(followed.match(), Match(1, (5,), (ONCE_SHARE,)))


@pytest.mark.parametrize("kind", ["words", "one token", "two in turn", "all different"])
def test_memory_is_bounded_by_the_tokens(kind: str) -> None:
    rng, size = random.Random(7), 20_000
    tokens = {
        "words": [min(500, int(rng.paretovariate(0.6))) for _ in range(size)],
        "one token": [5] * size,
        "two in turn": [1, 2] * (size // 2),
        "all different": [*range(size)],
    }[kind]
    text = SuffixAutomaton()
    for start in range(0, size, 640):
        text.extend(tokens[start : start + 640])
    assert text.used_bytes <= MAX_TOKEN_BYTES * size
    match = text.match(text.own_suffix())
    assert (match is None) == (kind == "all different")


def test_a_continuation_off_by_one_would_be_seen() -> None:
    """A mutant that begins one token late loses nearly all that a copied passage gives."""
    rng = random.Random(3)
    passage = [rng.randrange(1000) for _ in range(60)]
    tokens = [*passage, 1001, *passage]

    def accepted(skip: int) -> int:
        text, total = SuffixAutomaton(tokens[:64]), 0
        for end in range(64, len(tokens)):
            match = text.match(text.own_suffix())
            guess = match.continuation(8)[skip:] if match else ()
            agreeing = [a == b for a, b in zip(guess, tokens[end:], strict=False)]
            total += agreeing.index(False) if False in agreeing else len(agreeing)
            text.extend(tokens[end : end + 1])
        return total

    brute = sum(min(8, len(tokens) - end) for end in range(64, len(tokens)))
    assert accepted(0) == brute
    assert accepted(1) < brute / 10
