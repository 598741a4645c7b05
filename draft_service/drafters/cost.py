"""How long a step takes by its rows, measured, and how many rows of speculation are worth their time."""

from __future__ import annotations

MEMORY = 0.98
"""What is left of an observation's weight after the next one."""
CERTAIN_AFTER = 8.0
"""Weight of observations below which rows count as free."""


class StepCost:
    """A line through the latest steps: milliseconds = fixed + per_row · rows."""

    def __init__(self) -> None:
        self._weight = self._rows = self._ms = self._rows_rows = self._rows_ms = 0.0

    def observe(self, rows: int, ms: float) -> None:
        """A step of so many rows took so long."""
        self._weight = MEMORY * self._weight + 1
        self._rows = MEMORY * self._rows + rows
        self._ms = MEMORY * self._ms + ms
        self._rows_rows = MEMORY * self._rows_rows + rows * rows
        self._rows_ms = MEMORY * self._rows_ms + rows * ms

    @property
    def per_row(self) -> float:
        """Milliseconds that a row adds; 0 until steps of different sizes have been seen."""
        spread = self._weight * self._rows_rows - self._rows * self._rows
        if self._weight < CERTAIN_AFTER or spread < self._weight:
            return 0.0
        slope = (self._weight * self._rows_ms - self._rows * self._ms) / spread
        return min(max(slope, 0.0), self._ms / self._rows)

    @property
    def fixed(self) -> float:
        """Milliseconds of a step without rows."""
        return (self._ms - self.per_row * self._rows) / self._weight if self._weight else 0.0

    def is_worth(self, chance: float, rows: int, gained: float) -> bool:
        """Whether one row more raises the chances gained a millisecond.

        The step has `rows` rows that gain `gained`; the next gains `chance`.
        """
        return not rows or chance * (self.fixed + self.per_row * rows) >= gained * self.per_row
