"""What a service says that its steps take, and who is in them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import require

UNKNOWN = CostLine()
"""Of what nothing was said."""
MOVED = 0.03
"""Share of its time by which a point of a line moves before the line is said again. A plan is chosen by ratios of
times: 3 % is what a request may lose to a wrong one."""
MAX_COUNT = 1 << 20
"""Most sessions, rows or waiting work that a service may state: as many rows as a line may have."""


@dataclass(frozen=True)
class TargetCosts:
    """What a target's steps take: lines of decode rows, over the contexts of the sessions that run now.

    Rows of prefixes are in neither line. A line forgets: attention over longer contexts makes steps dearer, and the
    line follows the steps that run.

    Attributes:
        alone: steps without a session that a draft works for meanwhile.
        beside: steps with one; as `alone` until there were any.
        sessions, rows: in the latest step, of all coordinators.
        queue: sessions that wait for room or prefix, and rounds that wait for a step.

    Raises:
        InvalidInput: a number out of bounds.
    """

    alone: CostLine = UNKNOWN
    beside: CostLine = UNKNOWN
    sessions: int = 0
    rows: int = 0
    queue: int = 0

    lines: ClassVar[tuple[str, ...]] = ("alone", "beside")

    def __post_init__(self) -> None:
        _check_counts(self.sessions, self.rows, self.queue)


@dataclass(frozen=True)
class DraftCosts:
    """What a draft service's steps take: the line of its default drafter, learned as a target's are.

    Attributes:
        line: steps of the default drafter's model, with its draws.
        sessions, rows: in the latest step, of all coordinators.
        queue: proposals that coordinators wait for.

    Raises:
        InvalidInput: a number out of bounds.
    """

    line: CostLine = UNKNOWN
    sessions: int = 0
    rows: int = 0
    queue: int = 0

    lines: ClassVar[tuple[str, ...]] = ("line",)

    def __post_init__(self) -> None:
        _check_counts(self.sessions, self.rows, self.queue)


Costs = TypeVar("Costs", bound=TargetCosts | DraftCosts)


def has_moved(before: CostLine, after: CostLine) -> bool:
    """Whether a point of a line has moved by more than `MOVED`; from nothing to something is a move."""
    if before is after or before.is_known != after.is_known:
        return before is not after
    places = {rows for rows, _ in (*before.points, *after.points)}
    return any(abs(after.ms(rows) - before.ms(rows)) > MOVED * before.ms(rows) for rows in places)


def news(costs: Costs, told: Costs) -> Costs:
    """The costs without the lines that have not moved since they were told."""
    unmoved = [name for name in costs.lines if not has_moved(getattr(told, name), getattr(costs, name))]
    left_out: dict[str, Any] = dict.fromkeys(unmoved, UNKNOWN)
    return replace(costs, **left_out)


def taken_in(said: Costs, before: Costs) -> Costs:
    """What is known after a message: a line that it leaves out is as it was."""
    left_out: dict[str, Any] = {
        name: getattr(before, name) for name in said.lines if not getattr(said, name).is_known
    }
    return replace(said, **left_out)


def _check_counts(sessions: int, rows: int, queue: int) -> None:
    for name, count in (("sessions", sessions), ("rows", rows), ("queue", queue)):
        require(0 <= count <= MAX_COUNT, f"costs {name}", count, f"in [0, {MAX_COUNT}]")
