"""When a step is held for sessions that are about to be back."""

from __future__ import annotations

from target_service.batching import Batcher

STEP_S = 0.020


def away(returns_s: dict[int, float], *, answered: float = 100.0) -> Batcher:
    """Sessions that took that long last time, and have just been answered again."""
    batcher = Batcher()
    batcher.note_step(STEP_S, 0)
    for session, took in returns_s.items():
        batcher.note_answer(session, answered - took)
        batcher.note_return(session, answered)
        batcher.note_answer(session, answered)
    return batcher


def test_two_halves_join() -> None:
    batcher = away(dict.fromkeys(range(8), 0.002))
    window = batcher.window(ready=8, now=100.0)
    assert window.sessions == frozenset(range(8))
    assert 100.002 <= window.end_s <= 100.004


def test_one_that_takes_long_is_not_worth_the_time_of_many() -> None:
    batcher = away({1: 0.008})
    assert not batcher.window(ready=8, now=100.0).sessions
    assert batcher.window(ready=1, now=100.0).sessions == {1}


def test_the_quick_are_awaited_and_the_slow_are_not() -> None:
    batcher = away({1: 0.001, 2: 0.001, 3: 0.019})
    assert batcher.window(ready=4, now=100.0).sessions == {1, 2}


def test_nobody_is_awaited_who_is_late_or_has_ended_or_is_back() -> None:
    batcher = away({1: 0.002, 2: 0.002, 3: 0.002})
    batcher.forget(2)
    batcher.note_return(3, 100.001)
    assert batcher.window(ready=1, now=100.001).sessions == {1}
    assert batcher.is_away(frozenset({1})) and not batcher.is_away(frozenset({2, 3}))
    assert batcher.window(ready=1, now=100.0039).sessions == {1}
    assert not batcher.window(ready=1, now=100.0041).sessions


def test_before_a_long_step_nobody_is_late_by_a_hiccup() -> None:
    """A chunk that has just come makes the next step long, whatever the last one took."""
    batcher = away({1: 0.002})
    batcher.note_step(0.3, 100)
    batcher.note_step(STEP_S, 0)
    assert not batcher.window(ready=1, now=100.03).sessions
    assert not batcher.window(ready=1, now=100.03, prefix_rows=4).sessions
    window = batcher.window(ready=1, now=100.03, prefix_rows=100)
    assert window.sessions == {1}
    assert 100.03 < window.end_s <= 100.07
    assert not batcher.window(ready=1, now=100.04, prefix_rows=100).sessions


def test_a_session_alone_waits_for_nobody() -> None:
    assert not Batcher().window(ready=1, now=100.0).sessions
