"""Rows are told apart by their tokens, whatever place vLLM gives them."""

from __future__ import annotations

import random

import numpy as np

from paceline_vllm.rows import MOST_ABSENT, RowTracker, Tokens


def ids(*values: int) -> Tokens:
    return np.array(values, np.int32)


def placed(*rows: tuple[str, Tokens]) -> RowTracker[str]:
    tracker = RowTracker[str]()
    tracker.place(rows)
    return tracker


def names(tracker: RowTracker[str], *rows: Tokens) -> list[str | None]:
    return [None if each is None else each.request for each in tracker.find(rows)]


def test_equal_requests_are_each_found_once() -> None:
    tracker = placed(("a", ids(1, 2)), ("b", ids(1, 2)))
    assert names(tracker, ids(1, 2, 3), ids(1, 2, 4), ids(1, 2, 5)) == ["a", "b", None]
    tracker = placed(("other", ids(9)), ("a", ids(1, 2)))
    assert names(tracker, ids(1, 2, 3), ids(8), ids(1, 2, 4)) == ["a", None, None]


def test_a_new_request_in_the_place_of_another_is_new() -> None:
    tracker = placed(("a", ids(1, 2, 3)))
    assert names(tracker, ids(1, 2)) == [None]
    assert names(tracker, ids(1, 2, 4, 5)) == [None]
    assert names(tracker, ids(1, 2, 3)) == ["a"]


def test_an_old_token_tells_requests_apart_that_have_changed_places() -> None:
    """In its own place a request is known by its latest tokens; elsewhere by all of them."""
    tail = [*range(1000)]
    tracker = placed(("a", ids(1, *tail)), ("b", ids(5)))
    assert names(tracker, ids(5, 6), ids(2, *tail, 7)) == ["b", None]
    assert names(tracker, ids(5, 6), ids(1, *tail, 7)) == ["b", "a"]


def test_the_longest_beginning_is_the_request() -> None:
    tracker = placed(("short", ids(1)), ("long", ids(1, 2)), ("other", ids(9)))
    assert names(tracker, ids(9, 9), ids(8), ids(1, 2, 3)) == ["other", None, "long"]


def test_a_request_that_is_away_comes_back_and_one_that_stays_away_has_ended() -> None:
    tracker = placed(("a", ids(1)), ("b", ids(2)))
    for _ in range(MOST_ABSENT):
        assert tracker.place([("b", ids(2))]) == []
    assert names(tracker, ids(2), ids(1)) == ["b", "a"]
    assert tracker.place([("b", ids(2))]) == ["a"]
    assert names(tracker, ids(2), ids(1)) == ["b", None]


def test_what_was_seen_is_a_copy_of_the_batch() -> None:
    row = ids(1, 2)
    tracker = placed(("a", row))
    row[0] = 5
    assert names(tracker, ids(1, 2, 3)) == ["a"]


def test_requests_are_followed_through_random_batches() -> None:
    """Rows come, go and change places as they like: nobody is taken for another one, since all begin differently."""
    draws, tracker, texts = random.Random(5), RowTracker[int](), dict[int, list[int]]()
    for step in range(400):
        texts |= {step: [step]} if draws.random() < 0.3 or not texts else {}
        present = draws.sample([*texts], max(1, len(texts) - draws.randint(0, 1)))
        for request in present:
            texts[request] += [draws.randrange(2) for _ in range(draws.randint(1, 4))]
        rows = [np.array(texts[request], np.int32) for request in present]
        seen = [None if each is None else each.request for each in tracker.find(rows)]
        fresh = {request for request in present if texts[request][0] not in tracker_of(tracker)}
        assert [None if request in fresh else request for request in present] == seen
        tracker.place([*zip(present, rows, strict=True)])
        if len(texts) > 6:
            texts.pop(draws.choice([*texts]))


def tracker_of(tracker: RowTracker[int]) -> set[int]:
    return {each.request for each in (*tracker._places, *tracker._absent)}
