"""What being wrong may cost."""

from __future__ import annotations

import itertools

from coordinator.policy.restraint import (
    GUARD_LOSS,
    GUARD_PAUSE,
    GUARD_ROUNDS,
    PROBE_ROUNDS,
    PROBE_SHARE,
    Guard,
    Probe,
)


def rounds_held(guard: Guard) -> int:
    held = 0
    while guard.holds():
        held += 1
    return held


def drafted(guard: Guard, committed: int, ms: float) -> None:
    """Rounds until the guard holds, or has judged them."""
    for _ in range(GUARD_ROUNDS):
        if not guard.left:
            guard.add(committed, ms, plain_ms=20.0)


def test_slow_drafting_is_paused_for_longer_each_time_and_tried_again() -> None:
    guard = Guard()
    pauses = []
    for _ in range(6):
        drafted(guard, 1, 25.0)
        pauses.append(rounds_held(guard))
    assert pauses == [16, 64, 256, 1024, 1024, 1024] and pauses[0] == GUARD_PAUSE[0]


def test_drafting_that_pays_is_never_held() -> None:
    guard = Guard()
    drafted(guard, 2, 30.0)
    assert not guard.holds()


def test_a_good_stretch_resets_the_pause() -> None:
    guard = Guard()
    drafted(guard, 1, 25.0)
    rounds_held(guard)
    drafted(guard, 2, 25.0)
    drafted(guard, 1, 25.0)
    assert rounds_held(guard) == GUARD_PAUSE[0]


def test_what_loses_much_is_stopped_before_it_has_lost_more() -> None:
    guard = Guard()
    lost = 0.0
    while not guard.left:
        guard.add(1, 28.0, plain_ms=20.0)
        lost += 0.4
    assert GUARD_LOSS <= lost < GUARD_LOSS + 1


def test_one_round_that_is_held_up_stops_nothing() -> None:
    guard = Guard()
    for _ in range(GUARD_ROUNDS):
        for _ in range(3):
            guard.add(2, 30.0, plain_ms=20.0)
        guard.add(1, 500.0, plain_ms=20.0)
    assert not guard.holds()


def test_nothing_is_judged_before_target_only_is_known() -> None:
    guard = Guard()
    for _ in range(100):
        guard.add(1, 1e6, plain_ms=0.0)
    assert not guard.holds()


def test_probes_keep_to_their_share_and_grow_rare() -> None:
    probe = Probe()
    round_ms, cost_ms = 20.0, 9.0
    at: list[int] = []
    for number in range(5000):
        if probe.rounds_until(cost_ms) == 0:
            probe.tried()
            probe.cost(cost_ms)
            at.append(number)
        probe.add(round_ms, drafted=False)
    assert at, "never tried again"
    assert at[0] >= PROBE_ROUNDS[0]
    for count, number in enumerate(at, 1):
        assert count * cost_ms <= PROBE_SHARE * number * round_ms
    gaps = [late - early for early, late in itertools.pairwise(at)]
    assert gaps[-1] > gaps[0]
