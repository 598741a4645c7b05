"""Cost lines of the simulated services: what a step truly takes, and what the service says of it."""

from __future__ import annotations

from paceline.costs.cost_line import CostLine
from paceline.costs.running_mean import RunningMean

MOVED = 0.03
"""A service states its line anew once it has moved by this share."""
REMEMBERED_STEPS = 16.0
"""Steps over which it measures."""


class TrueLine:
    """Milliseconds of a step by its rows, looked up; `factor` multiplies them from now on."""

    __slots__ = ("_line", "_ms", "factor")

    def __init__(self, line: CostLine) -> None:
        self._line = line
        self._ms: list[float] = []
        self.factor = 1.0

    def ms(self, rows: int) -> float:
        """Of a step of whole rows."""
        known = self._ms
        while rows >= len(known):
            known.append(self._line.ms(len(known)))
        return known[rows] * self.factor


class StatedLine:
    """What a service says: the line measured at its start, scaled by what its steps have taken since.

    `lie` multiplies what it says at its start, and is measured away like any other change.
    """

    __slots__ = ("_line", "_scale", "_stated", "line")

    def __init__(self, line: CostLine, lie: float = 1.0) -> None:
        self._line = line
        self._scale = RunningMean(lie, REMEMBERED_STEPS / 2, REMEMBERED_STEPS)
        self._stated = lie
        self.line = line if lie == 1 else line.scale(lie)

    def took(self, ms: float, expected_ms: float) -> None:
        """A step took so long; by the line it should have taken `expected_ms`."""
        if expected_ms <= 0:
            return
        self._scale.add(ms / expected_ms)
        if abs(self._scale.value - self._stated) > MOVED * self._stated:
            self._stated = self._scale.value
            self.line = self._line.scale(self._stated)
