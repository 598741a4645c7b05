"""The target's cost lines: measured at load, and kept up to date by the steps that run."""

from __future__ import annotations

from paceline.costs.cost_line import CostLine
from paceline.costs.cost_meter import CostMeter
from paceline.costs.service_costs import TargetCosts
from target_service.step import Step


class TargetMeter:
    """Two lines of decode steps, and the counts of the latest step."""

    def __init__(self, line: CostLine) -> None:
        self._plain_meter = CostMeter(line)
        self._drafting_meter: CostMeter | None = None
        """Of steps beside a draft; None: there were none."""
        self._sessions = self._rows = 0

    def observe(self, step: Step, ms: float) -> None:
        """Learn from a step that took `ms`. Rows of a prefix have no logits, so steps with some are left out."""
        self._sessions, self._rows = len(step.sessions), step.plan.rows
        if step.prefixes:
            return
        if any(work.session.drafting for work in step.rounds):
            self._drafting_meter = self._drafting_meter or CostMeter()
            self._drafting_meter.base = self._plain_meter.line
            self._drafting_meter.observe(self._rows, ms)
        else:
            self._plain_meter.observe(self._rows, ms)

    def costs(self, queue: int) -> TargetCosts:
        """The costs now; `queue`: the sessions and rounds that wait."""
        alone, beside = self._plain_meter, self._drafting_meter or self._plain_meter
        return TargetCosts(alone.line, beside.line, self._sessions, self._rows, queue)
