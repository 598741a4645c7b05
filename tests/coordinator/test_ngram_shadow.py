"""Statistics of n-gram matches, of which nothing need have been proposed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.policy.acceptance_stats import NgramShadow
from paceline.protocol.proposal import CORPUS
from paceline.sampling.match import Match
from paceline.sampling.suffix import SuffixAutomaton


def match(length: int) -> Match:
    return Match(length, (1, 2, 3, 4))


def watched(text: list[int]) -> NgramShadow:
    """What a text teaches that is committed token by token."""
    known, shadow = SuffixAutomaton(text[:2]), NgramShadow()
    for token in text[2:]:
        shadow.learn(known.match(known.own_suffix()), (token,))
        known.extend((token,))
    return shadow


def test_copied_text_is_expected_to_go_on_as_it_did() -> None:
    new = [*range(100, 500)]
    shadow = watched([*new, *new])
    assert shadow.prefix_chances(match(40), 4)[-1] > 0.9
    assert shadow.prefix_chances(match(40), 4) == sorted(shadow.prefix_chances(match(40), 4), reverse=True)


def test_a_match_counts_up_to_its_first_wrong_token() -> None:
    shadow = NgramShadow()
    for _ in range(200):
        shadow.learn(match(3), (1, 9, 3, 4))
    first, second = shadow.prefix_chances(match(3), 2)
    assert first > 0.95
    assert second < 0.05
    assert shadow.prefix_chances(match(3), 2, least=0.05) == [first], "what is rarer is not worked out"
    untouched = NgramShadow(rightness=shadow.rightness)
    assert shadow.prefix_chances(match(12), 1) == untouched.prefix_chances(match(12), 1), (
        "nothing behind the wrong token"
    )


def test_lengths_are_told_apart() -> None:
    shadow = NgramShadow()
    for _ in range(200):
        shadow.learn(Match(2, (1,)), (9,))
        shadow.learn(Match(20, (1,)), (1,))
    assert shadow.prefix_chances(match(2), 1)[0] < 0.05 < 0.95 < shadow.prefix_chances(match(20), 1)[0]


def test_a_request_learns_on_for_itself() -> None:
    shadow = NgramShadow()
    for _ in range(50):
        shadow.learn(Match(4, (1,)), (1,))
    before, mine = shadow.prefix_chances(match(4), 1), shadow.child()
    assert mine.prefix_chances(match(4), 1) == before
    for _ in range(20):
        mine.learn(Match(4, (1,)), (9,))
        mine.learn(None, (9,))
    assert mine.prefix_chances(match(4), 1)[0] < 0.5 < shadow.prefix_chances(match(4), 1)[0]


def test_what_follows_variously_is_trusted_less_and_each_drafter_by_itself() -> None:
    shadow = NgramShadow()
    sure, unsure = Match(9, (1,), (0.9,)), Match(9, (1,), (0.2,))
    for _ in range(200):
        shadow.learn(sure, (1,))
        shadow.learn(unsure, (9,))
        shadow.learn(replace(sure, drafter=CORPUS), (9,))
    assert shadow.prefix_chances(unsure, 1)[0] < 0.05 < 0.95 < shadow.prefix_chances(sure, 1)[0]
    assert shadow.child().prefix_chances(replace(sure, drafter=CORPUS), 1)[0] < 0.05


def test_a_fresh_coordinator_believes_what_recorded_texts_taught() -> None:
    """By score, within .1 of what came true on either half of 14 kinds of prompts (reliability-2026-11-26)."""
    realised = {0.05: 0.14, 0.15: 0.32, 0.25: 0.59, 0.35: 0.74, 0.45: 0.85, 0.55: 0.93, 0.65: 0.99}
    for score, share in realised.items():
        seen = Match(4, (1,), (2 * score,))  # a match of 4 tokens counts half
        assert NgramShadow().prefix_chances(seen, 1) == pytest.approx([share], abs=0.1)


def test_a_text_whose_matches_were_right_is_believed_more_and_no_other_text() -> None:
    copied, other, pool = NgramShadow(), NgramShadow(), NgramShadow()
    low, high = Match(4, (1,), (0.44,)), Match(4, (1,), (0.56,))  # of scores that none of the texts has, in one bin
    (before,) = pool.prefix_chances(low, 1)
    for _ in range(40):
        copied.learn(Match(40, (1,)), (1,), pool)
        other.learn(Match(1, (1,)), (9,), pool)
    assert other.prefix_chances(low, 1)[0] < before < copied.prefix_chances(high, 1)[0]
    assert pool.child().prefix_chances(low, 1) == pool.child().prefix_chances(high, 1) == [before], "of each text"
    assert pool.prefix_chances(Match(1, (1,)), 1)[0] < 0.2, "its chances are shared"
