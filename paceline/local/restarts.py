"""How often, and after how long, a service that has ended is started again."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
"""A service that ran for so long has recovered: what came before is forgotten."""


class Restarts:
    """The restarts of one service: at most `limit` in a row, each after twice the wait of the one before."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_a_row = 0

    def next_delay_s(self, ran_s: float) -> float | None:
        """Count a restart of a service that had run for `ran_s`; returns the wait before it, None: not again."""
        if ran_s >= STEADY_S:
            self.in_a_row = 0
        if self.in_a_row >= self._limit:
            return None
        self.in_a_row += 1
        return min(FIRST_DELAY_S * 2.0 ** (self.in_a_row - 1), LONGEST_DELAY_S)
