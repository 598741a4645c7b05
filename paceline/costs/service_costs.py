"""What a service says that its steps take, and who is in them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self, TypeVar, cast

from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import require
from paceline.protocol.handshake import MAX_DRAFTERS

UNKNOWN = CostLine()
"""Of what nothing was said."""
MOVED = 0.03
"""Share of its time by which a point of a line moves before the line is said again. A plan is chosen by ratios of
times: 3 % is what a request may lose to a wrong one."""
DEFAULT = ""
"""Name of a service's default drafter: the one that is meant where none is named."""
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

    def __post_init__(self) -> None:
        _check_counts(self.sessions, self.rows, self.queue)

    @property
    def lines(self) -> Mapping[str, CostLine]:
        """The lines by name."""
        return {"alone": self.alone, "beside": self.beside}

    def with_lines(self, lines: Mapping[str, CostLine]) -> Self:
        """The same with these lines; a name that is missing has none."""
        return replace(self, alone=lines.get("alone", UNKNOWN), beside=lines.get("beside", UNKNOWN))


@dataclass(frozen=True)
class DrafterLine:
    """What the steps of one drafter take."""

    drafter: str
    line: CostLine


@dataclass(frozen=True)
class DraftCosts:
    """What a draft service's steps take: a line for each drafter, learned as a target's are.

    Attributes:
        line: steps of the default drafter's model, with its draws.
        sessions, rows: in the latest step, of all coordinators.
        queue: proposals that coordinators wait for.
        others: steps of the other drafters.

    Raises:
        InvalidInput: a number out of bounds.
    """

    line: CostLine = UNKNOWN
    sessions: int = 0
    rows: int = 0
    queue: int = 0
    others: tuple[DrafterLine, ...] = ()

    def __post_init__(self) -> None:
        _check_counts(self.sessions, self.rows, self.queue)
        names = {other.drafter for other in self.others}
        require(len(names) == len(self.others), "costs others", len(self.others), f"{len(names)}, each named once")
        require(len(names) < MAX_DRAFTERS, "costs others", len(names), f"at most {MAX_DRAFTERS - 1}")
        require(DEFAULT not in names, "costs others", DEFAULT, "a drafter's name")

    @property
    def lines(self) -> Mapping[str, CostLine]:
        """The lines by drafter, the default's under its empty name."""
        return {DEFAULT: self.line, **{other.drafter: other.line for other in self.others}}

    def line_of(self, drafter: str) -> CostLine:
        """What a drafter's steps take; all but the default are named, so another name is the default's own."""
        return self.lines.get(drafter, self.line)

    def with_lines(self, lines: Mapping[str, CostLine]) -> Self:
        """The same with these lines; a name that is missing has none."""
        others = tuple(DrafterLine(name, line) for name, line in lines.items() if name != DEFAULT)
        return replace(self, line=lines.get(DEFAULT, UNKNOWN), others=others)


Costs = TypeVar("Costs", bound=TargetCosts | DraftCosts)


def has_moved(before: CostLine, after: CostLine) -> bool:
    """Whether a point of a line has moved by more than `MOVED`; from nothing to something is a move."""
    if before is after or before.is_known != after.is_known:
        return before is not after
    places = {rows for rows, _ in (*before.points, *after.points)}
    return any(abs(after.ms(rows) - before.ms(rows)) > MOVED * before.ms(rows) for rows in places)


def news(costs: Costs, told: Costs) -> Costs:
    """The costs without the lines that have not moved since they were told."""
    before = told.lines
    moved = {name: line for name, line in costs.lines.items() if has_moved(before.get(name, UNKNOWN), line)}
    return cast("Costs", costs.with_lines(moved))


def taken_in(said: Costs, before: Costs) -> Costs:
    """What is known after a message: a line that it leaves out is as it was."""
    known = {name: line for name, line in said.lines.items() if line.is_known}
    return cast("Costs", said.with_lines({**before.lines, **known}))


def _check_counts(sessions: int, rows: int, queue: int) -> None:
    for name, count in (("sessions", sessions), ("rows", rows), ("queue", queue)):
        require(0 <= count <= MAX_COUNT, f"costs {name}", count, f"in [0, {MAX_COUNT}]")
