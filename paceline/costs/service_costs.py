"""What a service states of its steps: their cost lines, and the sessions and rows in the latest one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self, TypeAlias, TypeVar, cast

from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import require
from paceline.protocol.handshake import MAX_DRAFTERS

UNKNOWN_LINE = CostLine()
"""The line of a service that has stated none."""
LEAST_MOVE = 0.03
"""Share of its time by which a point must move before its line is sent again. Plans are chosen by ratios of times, so
3 % is what a request may lose to a wrong plan."""
DEFAULT = ""
"""Name of a service's default drafter, which serves requests that name none."""
LineKey: TypeAlias = tuple[str, bool]
"""A drafter's name, and whether the line is of steps beside those of the other service."""
ALONE, BESIDE = (DEFAULT, False), (DEFAULT, True)
MAX_COUNT = 1 << 20
"""Most sessions, rows or waiting work that a service may state: as many rows as a line may have."""


@dataclass(frozen=True)
class TargetCosts:
    """What a target's steps take: lines of decode rows, over the contexts of the sessions that run now.

    Rows of prefixes are in neither line. Attention over longer contexts makes steps dearer, so a line follows the
    latest steps and forgets older ones.

    Attributes:
        alone: steps during which no draft works for any of their sessions.
        beside: steps during which one does; as `alone` until there were any.
        sessions, rows: in the latest step, of all coordinators.
        queue: sessions that wait for room or prefix, and rounds that wait for a step.

    Raises:
        InvalidInput: a number out of bounds.
    """

    alone: CostLine = UNKNOWN_LINE
    beside: CostLine = UNKNOWN_LINE
    sessions: int = 0
    rows: int = 0
    queue: int = 0

    def __post_init__(self) -> None:
        _check_counts(self.sessions, self.rows, self.queue)

    @property
    def lines(self) -> Mapping[LineKey, CostLine]:
        """The lines by their key."""
        return {ALONE: self.alone, BESIDE: self.beside}

    def with_lines(self, lines: Mapping[LineKey, CostLine]) -> Self:
        """The same with these lines; a key that is missing has none."""
        return replace(self, alone=lines.get(ALONE, UNKNOWN_LINE), beside=lines.get(BESIDE, UNKNOWN_LINE))


@dataclass(frozen=True)
class DrafterLine:
    """What the steps of one drafter take."""

    drafter: str
    line: CostLine


@dataclass(frozen=True)
class DraftCosts:
    """What a draft service's steps take: lines for each drafter, learned as a target's are.

    Attributes:
        line: steps of the default drafter's model, with its draws, that somebody waits for.
        sessions, rows: in the latest step, of all coordinators.
        queue: proposals that coordinators wait for.
        others: such steps of the other drafters.
        beside: steps that draft for outcomes, beside the target's, of drafters that had some.

    Raises:
        InvalidInput: a number out of bounds.
    """

    line: CostLine = UNKNOWN_LINE
    sessions: int = 0
    rows: int = 0
    queue: int = 0
    others: tuple[DrafterLine, ...] = ()
    beside: tuple[DrafterLine, ...] = ()

    def __post_init__(self) -> None:
        _check_counts(self.sessions, self.rows, self.queue)
        names = {other.drafter for other in self.others}
        require(len(names) == len(self.others), "costs others", len(self.others), f"{len(names)}, each named once")
        require(len(names) < MAX_DRAFTERS, "costs others", len(names), f"at most {MAX_DRAFTERS - 1}")
        require(DEFAULT not in names, "costs others", DEFAULT, "a drafter's name")
        drafters, lines = {each.drafter for each in self.beside}, len(self.beside)
        require(len(drafters) == lines, "costs beside", lines, f"{len(drafters)}, each named once")
        require(lines <= MAX_DRAFTERS, "costs beside", lines, f"at most {MAX_DRAFTERS}")

    @cached_property
    def lines(self) -> Mapping[LineKey, CostLine]:
        """The lines by their key."""
        others = {(other.drafter, False): other.line for other in self.others}
        return {ALONE: self.line, **others, **{(each.drafter, True): each.line for each in self.beside}}

    def line_of(self, drafter: str, *, beside: bool = False) -> CostLine:
        """What a drafter's steps take; those beside the target's as the others, until there were any.

        A name that is not among `others` is the default drafter's own.
        """
        name = drafter if (drafter, False) in self.lines else DEFAULT
        return self.lines.get((name, beside), self.lines[name, False])

    def with_lines(self, lines: Mapping[LineKey, CostLine]) -> Self:
        """The same with these lines; a key that is missing has none."""
        others = tuple(DrafterLine(key[0], line) for key, line in lines.items() if not key[1] and key != ALONE)
        beside = tuple(DrafterLine(key[0], line) for key, line in lines.items() if key[1])
        return replace(self, line=lines.get(ALONE, UNKNOWN_LINE), others=others, beside=beside)


Costs = TypeVar("Costs", bound=TargetCosts | DraftCosts)
StatedCosts = TypeVar("StatedCosts", TargetCosts, DraftCosts, covariant=True)


class CostSource(Protocol[StatedCosts]):
    """A service that states its costs."""

    @property
    def costs(self) -> StatedCosts:
        """The latest stated costs."""


TargetPeerCosts: TypeAlias = CostSource[TargetCosts]
DraftPeerCosts: TypeAlias = CostSource[DraftCosts]


def has_moved(old: CostLine, new: CostLine) -> bool:
    """Whether any point has moved by more than `LEAST_MOVE`, or a line has become known or unknown."""
    if old is new or old.is_known != new.is_known:
        return old is not new
    places = {rows for rows, _ in (*old.points, *new.points)}
    return any(abs(new.ms(rows) - old.ms(rows)) > LEAST_MOVE * old.ms(rows) for rows in places)


def changed_lines(costs: Costs, last_sent: Costs) -> Costs:
    """The costs with those lines alone that have moved since `last_sent`."""
    old_lines = last_sent.lines
    changes = {name: line for name, line in costs.lines.items() if has_moved(old_lines.get(name, UNKNOWN_LINE), line)}
    return cast("Costs", costs.with_lines(changes))


def merge_costs(update: Costs, previous: Costs) -> Costs:
    """The costs after an update: lines that it leaves out are those of `previous`."""
    lines = {name: line for name, line in update.lines.items() if line.is_known}
    return cast("Costs", update.with_lines({**previous.lines, **lines}))


def _check_counts(sessions: int, rows: int, queue: int) -> None:
    for name, count in (("sessions", sessions), ("rows", rows), ("queue", queue)):
        require(0 <= count <= MAX_COUNT, f"costs {name}", count, f"in [0, {MAX_COUNT}]")
