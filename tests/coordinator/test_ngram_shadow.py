"""Statistics of n-gram matches, of which nothing need have been proposed."""

from __future__ import annotations

from coordinator.policy.ngram_shadow import NgramShadow
from paceline.sampling.ngram import Match, NgramIndex


def watched(text: list[int]) -> NgramShadow:
    """What a text teaches that is committed token by token."""
    ngrams, shadow = NgramIndex(text[:2]), NgramShadow()
    for token in text[2:]:
        shadow.learn(ngrams.longest_match(), (token,))
        ngrams.extend((token,))
    return shadow


def test_copied_text_is_expected_to_go_on_as_it_did() -> None:
    new = [*range(100, 500)]
    shadow = watched([*new, *new])
    assert shadow.reached(40, 4)[-1] > 0.9
    assert shadow.reached(40, 4) == sorted(shadow.reached(40, 4), reverse=True)


def test_a_match_counts_up_to_its_first_wrong_token() -> None:
    shadow = NgramShadow()
    for _ in range(200):
        shadow.learn(Match(3, (1, 2, 3, 4)), (1, 9, 3, 4))
    first, second = shadow.reached(3, 2)
    assert first > 0.95
    assert second < 0.05
    untouched = NgramShadow()
    assert shadow.reached(5, 1) == untouched.reached(5, 1), "nothing behind the wrong token"


def test_lengths_are_told_apart() -> None:
    shadow = NgramShadow()
    for _ in range(200):
        shadow.learn(Match(2, (1,)), (9,))
        shadow.learn(Match(20, (1,)), (1,))
    assert shadow.reached(2, 1)[0] < 0.05 < 0.95 < shadow.reached(20, 1)[0]


def test_a_request_learns_on_for_itself() -> None:
    shadow = NgramShadow()
    for _ in range(50):
        shadow.learn(Match(4, (1,)), (1,))
    before, mine = shadow.reached(4, 1), shadow.child(8.0)
    assert mine.reached(4, 1) == before
    for _ in range(20):
        mine.learn(Match(4, (1,)), (9,))
        mine.learn(None, (9,))
    assert mine.reached(4, 1)[0] < 0.5 < shadow.reached(4, 1)[0]
