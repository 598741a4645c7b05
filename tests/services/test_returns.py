"""When a step is held for sessions that are about to be back."""

from __future__ import annotations

from target_service.batching import BatchingWindow

STEP_S = 0.020


def away(returns_s: dict[int, float], *, answered: float = 100.0) -> BatchingWindow:
    """Sessions that took that long last time, and have just been answered again."""
    window = BatchingWindow()
    window.stepped(STEP_S, 0)
    for session, took in returns_s.items():
        window.answered(session, answered - took)
        window.back(session, answered)
        window.answered(session, answered)
    return window


def test_two_halves_join() -> None:
    window = away(dict.fromkeys(range(8), 0.002))
    hold = window.hold(ready=8, now=100.0)
    assert hold.awaited == frozenset(range(8))
    assert 100.002 <= hold.until <= 100.004


def test_one_that_takes_long_is_not_worth_the_time_of_many() -> None:
    window = away({1: 0.008})
    assert not window.hold(ready=8, now=100.0).awaited
    assert window.hold(ready=1, now=100.0).awaited == {1}


def test_the_quick_are_awaited_and_the_slow_are_not() -> None:
    window = away({1: 0.001, 2: 0.001, 3: 0.019})
    assert window.hold(ready=4, now=100.0).awaited == {1, 2}


def test_nobody_is_awaited_who_is_late_or_has_ended_or_is_back() -> None:
    window = away({1: 0.002, 2: 0.002, 3: 0.002})
    window.gone(2)
    window.back(3, 100.001)
    assert window.hold(ready=1, now=100.001).awaited == {1}
    assert window.is_away(frozenset({1})) and not window.is_away(frozenset({2, 3}))
    assert window.hold(ready=1, now=100.0039).awaited == {1}
    assert not window.hold(ready=1, now=100.0041).awaited


def test_before_a_long_step_nobody_is_late_by_a_hiccup() -> None:
    """A chunk that has just come makes the next step long, whatever the last one took."""
    window = away({1: 0.002})
    window.stepped(0.3, 100)
    window.stepped(STEP_S, 0)
    assert not window.hold(ready=1, now=100.03).awaited
    assert not window.hold(ready=1, now=100.03, prefix_rows=4).awaited
    hold = window.hold(ready=1, now=100.03, prefix_rows=100)
    assert hold.awaited == {1}
    assert 100.03 < hold.until <= 100.07
    assert not window.hold(ready=1, now=100.04, prefix_rows=100).awaited


def test_a_session_alone_waits_for_nobody() -> None:
    assert not BatchingWindow().hold(ready=1, now=100.0).awaited
