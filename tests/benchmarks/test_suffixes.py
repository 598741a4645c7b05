"""The replay of `benchmarks.suffixes`, by texts whose rounds are known."""

from __future__ import annotations

import random

import pytest

from benchmarks.suffixes.__main__ import row_of
from benchmarks.suffixes.replay import SOURCES, Replayed, ReplayText, agreement, replay, worth
from coordinator.policy.ngram_shadow import NgramShadow
from paceline.sampling.match import Match

RNG = random.Random(2)
NEW = tuple(RNG.randrange(1 << 20) for _ in range(400))


@pytest.mark.parametrize("source", SOURCES)
def test_new_text_takes_a_round_a_token_and_a_copy_few(source: str) -> None:
    new, copy = replay([ReplayText("new", NEW[:9], NEW[9:]), ReplayText("copy", NEW, NEW)], source)
    assert (new.rounds, new.proposed, new.accepted) == (391, 0, 0)
    assert new.steps == 1
    assert copy.rounds < 60
    assert copy.accepted + copy.rounds in (400, 401), "every token is accepted or the target's own"
    assert copy.steps < 0.2


def test_only_shared_texts_know_what_another_text_said() -> None:
    texts = [ReplayText("first", NEW[:9], NEW[9:]), ReplayText("again", NEW[:9], NEW[9:])]
    rounds = {source: replay(texts, source)[1].rounds for source in SOURCES}
    assert rounds["n-gram"] == rounds["suffix"] == 391
    assert rounds["suffix+shared"] < 60


def test_as_many_tokens_are_worth_it_as_are_likely() -> None:
    shadow, likely, unlikely = NgramShadow(), Match(64, tuple(range(40))), Match(1, (7,), (0.05,))
    for _ in range(300):
        shadow.learn(likely, tuple(range(40)))
        shadow.learn(unlikely, (8,))
    assert worth(shadow, likely) == 32
    assert worth(shadow, unlikely) == 0
    assert agreement((1, 2, 3), (1, 2, 4)) == 2


def test_a_row_counts_tokens_not_texts() -> None:
    base = [Replayed("a", "n-gram", 100, 100, 0, 0, 1.0), Replayed("b", "n-gram", 300, 300, 0, 0, 1.0)]
    found = [Replayed("a", "suffix", 100, 50, 0, 50, 2.0), Replayed("b", "suffix", 300, 300, 1000, 0, 6.0)]
    row = row_of("kind", "suffix", found, base)
    assert (row.tokens, row.texts, row.losses) == (400, 2, 1)
    assert row.us_a_token == 5.0
    assert row.steps == pytest.approx((50 + 330) / 400)
    assert row.accepted_a_round == pytest.approx(50 / 350)
