"""The target's cost lines: measured at load, and kept up to date by the steps that run."""

from __future__ import annotations

from paceline.costs.cost_line import CostLine
from paceline.costs.cost_meter import MeterPair
from paceline.costs.service_costs import TargetCosts
from target_service.step import Step


class TargetMeter:
    """Two lines of decode steps, and the counts of the latest step."""

    def __init__(self, line: CostLine) -> None:
        self._meters = MeterPair(line)
        self._sessions = self._rows = 0

    def observe(self, step: Step, ms: float) -> None:
        """Learn from a step that took `ms`. Rows of a prefix have no logits, so steps with some are left out."""
        self._sessions, self._rows = len(step.sessions), step.plan.rows
        if not step.prefixes:
            self._meters.observe(self._rows, ms, beside=any(work.session.drafting for work in step.rounds))

    def costs(self, queue: int) -> TargetCosts:
        """The costs now; `queue`: the sessions and rounds that wait."""
        alone, beside = self._meters.alone.line, self._meters.beside.line
        return TargetCosts(alone, beside if beside.is_known else alone, self._sessions, self._rows, queue)
