"""Lines that are measured: at load within a time, and from then on with every step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.costs.cost_line import CostLine
from paceline.costs.cost_meter import CostMeter
from paceline.costs.running_mean import OUTLIER
from paceline.costs.service_costs import LEAST_MOVE
from paceline.engine.measuring import MEASURING_MS, REPEATS, measure_line

OCTAVES = (1, 2, 4, 8, 16, 32, 64)
BASE = CostLine(tuple((rows, 10.0 + rows) for rows in (1, 2, 4, 8, 16)))


class Service:
    """Steps that take what a straight line says; notes them."""

    def __init__(self, fixed: float, row: float, first: float = 1.0) -> None:
        self.fixed, self.row, self.first = fixed, row, first
        self.steps: list[int] = []

    @property
    def spent_ms(self) -> float:
        return sum(self.fixed + self.row * rows for rows in self.steps)

    def step(self, rows: int) -> float:
        self.steps.append(rows)
        return (self.fixed + self.row * rows) * (self.first if len(self.steps) == 1 else 1)


def test_a_quick_service_is_measured_at_every_size_and_its_first_step_does_not_count() -> None:
    service = Service(1.0, 0.5, first=50)
    line = measure_line(service.step, most_rows=64)
    assert line.points == tuple((rows, 1.0 + 0.5 * rows) for rows in OCTAVES)
    assert len(service.steps) == 1 + REPEATS * len(OCTAVES)


def test_no_step_is_larger_than_the_service_takes() -> None:
    service = Service(1.0, 0.5)
    assert [rows for rows, _ in measure_line(service.step, most_rows=5).points] == [1, 2, 4]
    assert measure_line(Service(1.0, 0.5).step, most_rows=1).points == ((1, 1.5),)


@pytest.mark.parametrize(
    ("ms", "rows"),
    [(30.0, [1, 2, 4, 8, 16, 32, 64]), (60.0, [1, 2, 4, 8, 16]), (200.0, [1, 8]), (900.0, [1, 8]), (3000.0, [1])],
)
def test_long_steps_are_timed_less_often(ms: float, rows: list[int]) -> None:
    service = Service(ms, 0.1)
    line = measure_line(service.step, most_rows=64)
    assert [at for at, _ in line.points] == rows
    assert service.spent_ms <= max(3.1 * MEASURING_MS, 1.1 * ms), "a step that begins in time may end later"


def test_a_row_that_looks_cheaper_shares_the_mean_with_its_neighbour() -> None:
    times = {1: 10.0, 2: 14.0, 4: 12.0, 8: 20.0}
    line = measure_line(lambda rows: times[rows], most_rows=8)
    assert line.points == ((1, 10.0), (2, 13.0), (4, 13.0), (8, 20.0))


def test_steps_correct_their_own_rows_and_those_that_have_not_been_seen() -> None:
    meter = CostMeter(BASE)
    for _ in range(60):
        meter.observe(1, 22.0)
    assert meter.line.ms(1) == pytest.approx(22.0, rel=2 * LEAST_MOVE)
    assert meter.line.ms(8) == pytest.approx(2 * 18.0, rel=2 * LEAST_MOVE), (
        "all contexts have grown, or the machine was busy"
    )
    for _ in range(60):
        meter.observe(8, 18.0)
    assert meter.line.ms(8) == pytest.approx(22.0, rel=0.25), "8 rows are as measured, and never less than 1 row"
    assert meter.line.ms(16) / BASE.ms(16) < 1.3, "16 rows follow 8"


@pytest.mark.parametrize("slower", [1.5, 1 / 1.5])
def test_a_machine_that_changes_its_speed_moves_sizes_that_do_not_run_meanwhile(slower: float) -> None:
    """Rows that cost a fifth of a step more cost a fifth more at any speed: nothing to be gained or lost by them."""
    meter, flat = CostMeter(BASE), CostLine(((1, 10.0), (8, 12.0)))
    for _ in range(100):
        meter.observe(1, flat.ms(1))
        meter.observe(8, flat.ms(8))
    for _ in range(40):
        meter.observe(1, slower * flat.ms(1))
    assert meter.line.ms(1) == pytest.approx(slower * flat.ms(1), rel=2 * LEAST_MOVE)
    assert meter.line.ms(8) == pytest.approx(slower * flat.ms(8), rel=0.12)


def test_a_line_is_renewed_when_it_has_moved_and_only_then() -> None:
    meter = CostMeter(BASE)
    line = meter.line
    for _ in range(100):
        meter.observe(4, BASE.ms(4) * (1 + LEAST_MOVE / 2))
    assert meter.line is line
    for _ in range(100):
        meter.observe(4, BASE.ms(4) * (1 + 2 * LEAST_MOVE))
    assert meter.line is not line
    assert meter.line.ms(4) == pytest.approx(BASE.ms(4) * (1 + 2 * LEAST_MOVE), rel=LEAST_MOVE)


def test_one_step_that_was_held_up_moves_little() -> None:
    meter = CostMeter(BASE)
    for _ in range(50):
        meter.observe(2, 12.0)
    meter.observe(2, 100_000.0)
    assert meter.line.ms(2) <= 12.0 * (1 + OUTLIER / 50) * (1 + LEAST_MOVE)


def test_without_a_measured_line_the_first_steps_make_one() -> None:
    meter = CostMeter()
    assert not meter.line.is_known
    for _ in range(60):
        meter.observe(1, 10.0)
        meter.observe(9, 18.0)
    assert meter.line.ms(1) == pytest.approx(10.0, rel=2 * LEAST_MOVE)
    assert meter.line.ms(9) == pytest.approx(18.0, rel=2 * LEAST_MOVE)


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1e6)), max_size=60),
    st.sampled_from([BASE, CostLine(), CostLine(((1, 5.0),))]),
)
def test_every_line_rises_and_is_short(steps: list[tuple[int, float]], base: CostLine) -> None:
    """`CostLine` itself refuses what does not rise."""
    meter = CostMeter(base)
    for rows, ms in steps:
        meter.observe(rows, ms)
        assert len(meter.line.points) <= 16
