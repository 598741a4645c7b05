"""Means and rates that the planner lives on, closed forms by hand, and what is said of costs."""

from __future__ import annotations

import pytest

from paceline.costs.acceptance import TokenAcceptance, bin_of, binned_chances
from paceline.costs.cost_line import CostLine
from paceline.costs.cycle import Cycle, ahead_cycle, head_start_ms, proposal_ms, tokens_ahead
from paceline.costs.running_mean import MEMORY, RunningMean
from paceline.costs.service_costs import DraftCosts, TargetCosts, changed_lines, has_moved, merge_costs
from paceline.protocol.errors import InvalidInput

LINE = CostLine(((1, 10.0), (8, 20.0)))


def test_a_mean_begins_at_its_prior_and_forgets() -> None:
    mean = RunningMean(1.0, 4.0)
    mean.add(6.0)
    assert mean.value == pytest.approx(2.0)
    for _ in range(1000):
        mean.add(6.0)
    assert mean.value == pytest.approx(6.0)
    before = mean.value
    mean.add(before + 1)
    assert mean.value - before == pytest.approx(1 / MEMORY)


def test_binned_chances_learn_each_bin_by_itself() -> None:
    table = binned_chances(lambda q: 0.5)
    for _ in range(200):
        table[bin_of(0.49)].add(0.0)
        table[bin_of(0.5)].add(1.0)
    assert table[bin_of(0.41)].value < 0.05
    assert table[bin_of(0.59)].value > 0.95
    assert table[bin_of(1.0)].value == 0.5, "the last bin holds it"


def test_a_child_starts_from_its_parent_and_leaves_it_alone() -> None:
    parent = RunningMean(0.5)
    for _ in range(100):
        parent.add(1.0)
    child = parent.child()
    known = parent.value
    for _ in range(20):
        child.add(0.0)
    assert child.value < 0.5 < known == parent.value


def test_a_table_learns_and_starts_sane() -> None:
    fresh = TokenAcceptance()
    assert fresh.chance(0.99, 1) > fresh.chance(0.3, 1) > fresh.chance(0.3, 2) > fresh.chance(0.3, 3) > 0
    assert sum(fresh.chance(0.3, rank) for rank in range(1, 30)) < 1
    for i in range(1000):
        fresh.take_rank((2, 2, 1, 0)[i % 4], 0.95)
    assert fresh.chance(0.95, 2) == pytest.approx(0.5, abs=0.02)
    assert fresh.chance(0.95, 1) == pytest.approx(0.25, abs=0.02)
    assert fresh.chance(0.3, 1) == TokenAcceptance().chance(0.3, 1)
    assert fresh.reach(1)[0] == pytest.approx(0.25, abs=0.02)
    for _ in range(2000):
        fresh.take_rank(1, 0.95)
    assert fresh.chance(0.95, 1) > 0.95


def test_ranks_say_what_every_length_would_have_brought() -> None:
    table = TokenAcceptance()
    for position in range(2000):
        table.take_rank(0 if position % 4 == 3 else 1, 0.8, position % 4)
    depths = [mean.value for mean in table.by_depth[:4]]
    assert depths[0] == pytest.approx(3 / 4, abs=0.05)
    assert depths[1] == pytest.approx(2 / 3, abs=0.05)
    assert depths[2] == pytest.approx(1 / 2, abs=0.05)
    assert depths[3] == pytest.approx(0, abs=0.05)


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


def test_a_proposal_that_is_being_drafted_has_a_start_of_what_is_behind_its_first_step() -> None:
    assert [head_start_ms(ahead_ms, 5.0) for ahead_ms in (0.0, 4.0, 8.0, 9.5)] == [0, 0, 3, 4.5]
    assert head_start_ms(10.0, 5.0) == 0, "what was drafted for is there by now"
    assert head_start_ms(1.0, 0.0) == 0, "nothing is known of its steps"


@pytest.mark.parametrize(
    ("after", "moved"),
    [
        (LINE, False),
        (LINE.scale(1.029), False),
        (LINE.scale(1.031), True),
        (LINE.scale(0.969), True),
        (CostLine(((1, 10.0), (8, 20.7))), True),
        (CostLine(((1, 10.0), (4, 14.5), (8, 20.0))), False),
        (CostLine(((1, 10.0), (2, 15.0), (8, 20.0))), True),
        (CostLine(), True),
    ],
    ids=["same", "a-little", "more", "less", "one-point", "new-point-near", "new-point-off", "gone"],
)
def test_a_line_has_moved_when_a_point_is_more_than_3_percent_off(after: CostLine, moved: bool) -> None:
    assert has_moved(LINE, after) is moved


def test_what_has_not_moved_is_left_out_and_put_back_by_who_hears_it() -> None:
    told = TargetCosts(LINE, LINE, 1, 2, 3)
    now = TargetCosts(LINE.scale(1.01), LINE.scale(1.5), 4, 5, 6)
    said = changed_lines(now, told)
    assert said == TargetCosts(CostLine(), LINE.scale(1.5), 4, 5, 6)
    assert merge_costs(said, told) == TargetCosts(LINE, LINE.scale(1.5), 4, 5, 6)
    assert merge_costs(DraftCosts(queue=1), DraftCosts(LINE)) == DraftCosts(LINE, queue=1)


def test_small_moves_add_up() -> None:
    """What counts is how far a line is from what was said, not from what it was the last time."""
    told, said = TargetCosts(LINE), 0
    for step in range(1, 10):
        heard = changed_lines(TargetCosts(LINE.scale(1 + 0.01 * step)), told)
        said += heard.alone.is_known
        told = merge_costs(heard, told)
    assert said == 2


@pytest.mark.parametrize(
    ("kind", "field", "count"),
    [(TargetCosts, "sessions", -1), (DraftCosts, "rows", (1 << 20) + 1), (TargetCosts, "queue", (1 << 20) + 1)],
)
def test_counts_are_bounded(kind: type[TargetCosts | DraftCosts], field: str, count: int) -> None:
    with pytest.raises(InvalidInput, match=f"costs {field} = {count}: must be in "):
        kind(**{field: count})  # type: ignore[arg-type]
