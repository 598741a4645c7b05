"""Where a session's time went, as its coordinator is told."""

from __future__ import annotations

import time
from dataclasses import replace

from paceline.protocol.records import StepTimings
from paceline.protocol.target import TargetOpened
from target_service.session import Session
from target_service.step import Step, StepResult


def opened(session: Session, timings: StepTimings) -> TargetOpened:
    """What is answered to a session's open once its prefix is there."""
    service_ms = (time.monotonic() - session.arrived) * 1e3
    queue_ms = timings.queue_ms or service_ms
    return TargetOpened(session.id, session.reused, replace(timings, queue_ms=queue_ms, service_ms=service_ms))


def step_timings(step: Step, result: StepResult, arrived: float, started: float, forward_ms: float) -> StepTimings:
    """A step's verdicts leave together, so each waits for the draws of all of them."""
    return StepTimings(
        queue_ms=max(0.0, started - arrived) * 1e3,
        forward_ms=forward_ms,
        sample_ms=result.sample_ms,
        service_ms=(time.monotonic() - arrived) * 1e3,
        rows=step.plan.rows,
        sessions=len(step.sessions),
    )
