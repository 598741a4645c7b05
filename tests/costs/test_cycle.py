"""Rounds by hand: the closed form that planner and plan share."""

from __future__ import annotations

from paceline.costs.cycle import (
    Cycle,
    ahead_cycle,
    proposal_ms,
    tokens_ahead,
)


def test_the_first_step_of_a_proposal_has_a_row_more_and_all_who_draft_share_each() -> None:
    assert proposal_ms(lambda rows: 10 + rows, (1, 1)) == [12, 23, 34]
    assert proposal_ms(lambda rows: 10 + rows, (3, 6), sessions=2.0) == [14, 30, 52]


def test_a_cycle_without_a_time_has_no_rate() -> None:
    assert (Cycle(3.0, 0.0).rate, Cycle(3.0, 2.0).rate) == (0, 1.5)


def test_a_miss_is_the_faster_of_those_that_may_follow_it() -> None:
    hit, waiting, without = Cycle(4.0, 20.0), Cycle(4.0, 30.0), Cycle(1.0, 21.0)
    assert ahead_cycle(0.75, hit, [without, waiting]) == Cycle(4.0, 22.5)
    assert ahead_cycle(0.5, hit, [without, Cycle(4.0, 100.0)]) == Cycle(2.5, 20.5)


def test_a_guess_behind_a_proposal_takes_a_step_of_its_own() -> None:
    assert [tokens_ahead(room_ms, 5.0, 4) for room_ms in (4.0, 9.9, 10.0, 15.0, 99.0)] == [0, 0, 1, 2, 4]
    assert tokens_ahead(1.0, 0.0, 4) == 4, "nothing is known of its steps"
