"""Steps of an engine that serves nobody yet, timed as in service."""

from __future__ import annotations

from typing import Any

from paceline.costs.cost_line import CostLine
from paceline.engine.interface import Engine
from paceline.engine.measuring import measure_line
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT, Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import Round
from paceline.runtime import clock
from target_service.session import PendingRound, Session
from target_service.step import RoundWork, Step, run_step

MEASURED_AS = 0
"""The number of the session that is used for measuring; others count from 1."""


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
