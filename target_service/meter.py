"""The target's cost lines: measured at load, and kept up to date by the steps that run."""

from __future__ import annotations

from typing import Any

from paceline.costs.cost_line import CostLine
from paceline.costs.cost_meter import CostMeter, measure_line
from paceline.costs.service_costs import TargetCosts
from paceline.engine.interface import Engine
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT, Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import Round
from paceline.runtime import clock, metrics
from target_service.session import PendingRound, Session
from target_service.step import RoundWork, Step, StepResult, run_step

MEASURED_AS = 0
"""The number of the session that is used for measuring; others count from 1."""


class TargetMeter:
    """Two lines of decode steps, and the counts of the latest step."""

    def __init__(self, line: CostLine) -> None:
        self._plain_meter = CostMeter(line)
        self._drafting_meter = CostMeter(line)
        self._sessions = self._rows = 0

    def observe(self, step: Step, ms: float) -> None:
        """Learn from a step that took `ms`. Rows of a prefix have no logits, so steps with some are left out."""
        self._sessions, self._rows = len(step.sessions), step.plan.rows
        if step.prefixes:
            return
        if any(work.session.drafting for work in step.rounds):
            self._drafting_meter.base = self._plain_meter.line
            self._drafting_meter.observe(self._rows, ms)
        else:
            self._plain_meter.observe(self._rows, ms)

    def costs(self, queue: int) -> TargetCosts:
        """The costs now; `queue`: the sessions and rounds that wait."""
        drafting_meter = self._drafting_meter if self._drafting_meter.is_measured else self._plain_meter
        return TargetCosts(self._plain_meter.line, drafting_meter.line, self._sessions, self._rows, queue)


def count_step(step: Step, result: StepResult) -> None:
    """Count a step whose results have left."""
    metrics.step_done(result.seconds, step.plan.rows, len(step.sessions))


class _Nobody:
    """Owns the session that is used for measuring, and ignores its events."""

    def send(self, event: Any, *, urgent: bool) -> None:
        """Ignore the event."""

    def forget(self, session_id: int) -> None:
        """Do nothing."""


def measure_engine(engine: Engine) -> CostLine:
    """Time a few steps of an engine that serves nobody yet; called on the executor's thread.

    They are rounds of one session with their draws, as in service, after a short context.

    Raises:
        Exception: the engine's own; an engine that can't step can't serve.
    """
    most = min(MAX_PROPOSAL_NODES, engine.info.longest_session)
    facts = SessionSpec((0,), 1, SamplingParams(), NoiseKey(0), Acceptance.COUPLED)
    session = Session(MEASURED_AS, MEASURED_AS, _Nobody(), facts, most, clock.now())

    def step(rows: int) -> float:
        nodes = rows - 1
        proposal = Proposal(1, (0,) * nodes, (1.0,) * nodes) if nodes else None
        round_ = Round(MEASURED_AS, 0, ROOT, facts.token_ids, proposal)
        work = RoundWork(session, PendingRound(round_, clock.now()), session.round_item(round_))
        return run_step(engine, Step((work,), ())).seconds * 1e3

    engine.open(MEASURED_AS, most)
    try:
        return measure_line(step, most)
    finally:
        engine.close(MEASURED_AS)
