"""Timings of a session's steps, as its coordinator gets them."""

from __future__ import annotations

from dataclasses import replace

from paceline.protocol.records import StepTimings
from paceline.protocol.target import TargetOpened
from paceline.runtime import clock
from target_service.session import Session
from target_service.step import Step, StepResult


def opened_event(session: Session, timings: StepTimings) -> TargetOpened:
    """The answer to a session's opening, sent once its prefix is there."""
    service_ms = (clock.now() - session.arrived_at) * 1e3
    queue_ms = timings.queue_ms or service_ms
    return TargetOpened(session.id, session.reused_rows, replace(timings, queue_ms=queue_ms, service_ms=service_ms))


def step_timings(
    step: Step, result: StepResult, arrived_at: float, started_at: float, forward_ms: float
) -> StepTimings:
    """The timings of a verdict. A step's verdicts leave together, so each waits for the draws of all of them."""
    return StepTimings(
        queue_ms=max(0.0, started_at - arrived_at) * 1e3,
        forward_ms=forward_ms,
        sample_ms=result.sample_ms,
        service_ms=(clock.now() - arrived_at) * 1e3,
        rows=step.plan.rows,
        sessions=len(step.sessions),
        prefix_rows=sum(work.prefix_rows for work in step.prefixes),
    )
