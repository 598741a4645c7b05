"""One step: which rows of which sessions, run on the executor's thread, and what came of it.

`StepPlan` is all that a rank of a tensor-parallel group needs to run the same
step. An engine whose logits are spread over ranks is told how to draw along with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.engine.interface import Drawing, DrawingEngine, Engine, Logits, StepItem, StepPlan
from paceline.errors import InternalError, Overloaded, PacelineError
from paceline.types import Round, Verdict
from target_service.session import PendingRound, Session
from target_service.verifier import draw_of, drawn_verdict, verify

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundWork:
    """A session's round in a step."""

    session: Session
    pending: PendingRound
    item: StepItem

    @property
    def round_(self) -> Round:
        """The round to verify."""
        return self.pending.round_


@dataclass(frozen=True)
class PrefillWork:
    """A chunk of an opening session's prefix in a step."""

    session: Session
    item: StepItem


@dataclass(frozen=True)
class Step:
    """Everything that one forward pass computes: rounds first, then prefixes."""

    rounds: tuple[RoundWork, ...]
    prefills: tuple[PrefillWork, ...]

    @property
    def plan(self) -> StepPlan:
        """What the engine, on every rank, is told."""
        return StepPlan((*(work.item for work in self.rounds), *(work.item for work in self.prefills)))

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Every session of the step."""
        return (*(work.session for work in self.rounds), *(work.session for work in self.prefills))


@dataclass(frozen=True)
class StepResult:
    """One answer for each round, in order; `begun` on the monotonic clock, seconds."""

    answers: tuple[Verdict | PacelineError, ...]
    begun: float
    forward_ms: float
    sample_ms: float


def gather_step(ready: Iterable[Session], opening: Iterable[Session], prefill_chunk: int) -> Step | None:
    """Every waiting round, and at most `prefill_chunk` prefix tokens, oldest session first.

    A long prompt so delays every round beside it by no more than one chunk.
    """
    rounds = []
    for session in ready:
        assert session.pending is not None, "ready sessions have a round"
        rounds.append(RoundWork(session, session.pending, session.round_item(session.pending.round_)))
    prefills, room = [], prefill_chunk
    for session in opening:
        rows = min(room, session.prefill_left)
        if not rows:
            break
        prefills.append(PrefillWork(session, session.prefill_item(rows)))
        room -= rows
    return Step(tuple(rounds), tuple(prefills)) if rounds or prefills else None


def run_step(engine: Engine, step: Step) -> StepResult:
    """One forward pass and the draws of its rounds; a round whose draw fails fails alone.

    Raises:
        PeerUnavailable: a rank is gone; no session of the engine can be used again.
        Exception: whatever the engine raised; no session of the step can be used again.
    """
    begun = time.monotonic()
    outputs = _forward(engine, step)
    forwarded = time.monotonic()
    answers = tuple(_verify(work, output) for work, output in zip(step.rounds, outputs, strict=False))
    ended = time.monotonic()
    return StepResult(answers, begun, (forwarded - begun) * 1e3, (ended - forwarded) * 1e3)


def _forward(engine: Engine, step: Step) -> Sequence[Logits | Drawing]:
    if not isinstance(engine, DrawingEngine):
        return engine.step(step.plan)
    vocab_size = engine.info.fingerprint.vocab_size
    draws = [draw_of(work.session.facts, work.round_, vocab_size) for work in step.rounds]
    return engine.step_and_draw(step.plan, draws)


def make_room(engine: Engine, closing: Sequence[Session], opening: Sequence[Session]) -> list[PacelineError | None]:
    """Free closed sessions, then reserve rows for waiting ones, in order, until one finds no room.

    Returns:
        For each session tried: None, or why it can't be served. The last is
        `Overloaded` where there was no room.
    """
    for session in closing:
        _free(engine, session)
    results: list[PacelineError | None] = []
    for session in opening:
        results.append(_reserve(engine, session))
        if isinstance(results[-1], Overloaded):
            break
    return results


def _free(engine: Engine, session: Session) -> None:
    try:
        engine.close(session.key)
    except Exception:
        logger.exception("close failed: session=%d", session.id)


def _reserve(engine: Engine, session: Session) -> PacelineError | None:
    try:
        engine.open(session.key, session.max_rows)
    except PacelineError as error:
        return error
    except Exception as error:
        logger.exception("open failed: session=%d", session.id)
        return internal(session, error)
    return None


def _verify(work: RoundWork, output: Logits | Drawing) -> Verdict | PacelineError:
    try:
        if isinstance(output, np.ndarray):
            return verify(output, work.session.facts, work.round_)
        return drawn_verdict(output, work.round_)
    except PacelineError as error:
        return error
    except Exception as error:
        logger.exception("verification failed: session=%d base_length=%d", work.session.id, work.round_.base_length)
        return internal(work.session, error)


def internal(session: Session, error: Exception) -> InternalError:
    """What the other side may know of a defect; the log has the stack."""
    return InternalError(f"session {session.id}: unexpected {type(error).__name__}; the service's log has the stack")
