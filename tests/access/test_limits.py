"""Limits of a key, on a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.access.keys import KeyLimits
from paceline.access.limits import Meter, TokenBucket
from paceline.protocol.errors import Overloaded


def metered(**limits: int) -> tuple[Meter, SimpleNamespace]:
    """A meter, and the clock that its time is read from."""
    clock = SimpleNamespace(now=1_000.0)
    return Meter(KeyLimits(**limits), lambda: clock.now), clock


def refused(meter: Meter) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        meter.begin()
    return caught.value


def test_a_minute_s_worth_may_come_at_once_and_then_at_the_rate() -> None:
    meter, clock = metered(requests_per_minute=3)
    for _ in range(3):
        meter.begin()
        meter.end()
    error = refused(meter)
    assert error.metadata == {"limit": "requests_per_minute", "value": "3"}
    assert error.retry_after_ms == 20_000
    assert "requests_per_minute = 3" in error.message
    clock.now += 20
    meter.begin()
    assert refused(meter).retry_after_ms == 20_000


def test_running_requests_are_counted_until_they_end_and_refused_ones_are_not() -> None:
    meter, _ = metered(requests_per_minute=60, max_concurrent_requests=2)
    meter.begin()
    meter.begin()
    for _ in range(100):
        error = refused(meter)
        assert error.metadata == {"limit": "max_concurrent_requests", "value": "2"}
        assert error.retry_after_ms
    meter.end()
    for _ in range(58):
        meter.begin()
        meter.end()
    assert refused(meter).metadata["limit"] == "requests_per_minute"


def test_tokens_are_charged_as_they_come_and_the_next_request_waits_for_the_debt() -> None:
    meter, clock = metered(tokens_per_minute=60)
    meter.begin()
    meter.take_prompt(50)
    meter.take_generated(30)
    meter.end()
    error = refused(meter)
    assert error.metadata == {"limit": "tokens_per_minute", "value": "60"}
    assert error.retry_after_ms == 21_000
    clock.now += 21
    meter.begin()
    with pytest.raises(Overloaded, match="tokens_per_minute = 60"):
        meter.take_prompt(2)


def test_a_prompt_beyond_the_limit_waits_for_a_full_bucket() -> None:
    meter, clock = metered(tokens_per_minute=60)
    meter.begin()
    meter.take_prompt(600)
    meter.end()
    clock.now += 541
    meter.begin()
    with pytest.raises(Overloaded) as caught:
        meter.take_prompt(600)
    assert caught.value.retry_after_ms == 59_000
    clock.now += 59
    meter.take_prompt(600)


def test_new_limits_hold_at_once_and_forget_nothing() -> None:
    meter, _ = metered(requests_per_minute=60)
    for _ in range(50):
        meter.begin()
    meter.limit(KeyLimits(requests_per_minute=5))
    for _ in range(5):
        meter.begin()
    refused(meter)
    meter.limit(KeyLimits(requests_per_minute=60))
    assert refused(meter).retry_after_ms == 1_000
    meter.limit(KeyLimits())
    for _ in range(1_000):
        meter.begin()
        meter.take_prompt(10**9)


@given(st.integers(1, 10**6), st.lists(st.tuples(st.integers(1, 2_000), st.floats(0, 90)), max_size=30))
def test_whoever_waits_as_told_is_let_in_and_nobody_gets_more_than_the_rate(
    per_minute: int, asked: list[tuple[int, float]]
) -> None:
    clock = SimpleNamespace(now=1_000.0)
    bucket, begun, taken = TokenBucket(per_minute, lambda: clock.now), clock.now, 0
    for amount, later in asked:
        clock.now += later
        wait = bucket.wait_s(amount)
        if wait:
            clock.now += wait + 1e-6
            assert bucket.wait_s(amount) == 0
        bucket.take(min(amount, per_minute))
        taken += min(amount, per_minute)
        assert taken <= per_minute * (1 + (clock.now - begun) / 60) + 1e-3
