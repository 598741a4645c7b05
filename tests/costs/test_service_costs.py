"""What is said of costs: the counts always, a line when it has moved."""

from __future__ import annotations

import pytest

from paceline.costs.cost_line import CostLine
from paceline.costs.service_costs import DraftCosts, TargetCosts, changed_lines, has_moved, merge_costs
from paceline.protocol.errors import InvalidInput

LINE = CostLine(((1, 10.0), (8, 20.0)))


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
