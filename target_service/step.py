"""One step: which rows of which sessions it computes, how it runs on the executor's thread, and what it answers.

`StepPlan` is all that a rank of a tensor-parallel group needs to run the same
step. An engine that draws where its logits are gets the draws with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.engine.blocks import BLOCK_ROWS
from paceline.engine.interface import Drawing, DrawingEngine, Engine, Logits, StepItem, StepPlan
from paceline.protocol.errors import PacelineError
from paceline.protocol.target import PromptPiece, Round, Verdict
from paceline.runtime import clock
from paceline.runtime.config import EngineSettings
from target_service.prompt_rows import prompt_pieces
from target_service.session import PendingRound, Session
from target_service.verifier import draw_of, drawn_verdict, verify

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundWork:
    """A session's round in a step; its first `prefix_rows` rows complete the prefix."""

    session: Session
    pending: PendingRound
    item: StepItem
    prefix_rows: int = 0
    committed: tuple[int, ...] = ()
    """Tokens before the round's proposal that the session's processors have not read."""

    @property
    def round_(self) -> Round:
        """The round to verify."""
        return self.pending.round_


@dataclass(frozen=True)
class PrefillWork:
    """A chunk of an opening session's prefix in a step."""

    session: Session
    item: StepItem

    @property
    def prefix_rows(self) -> int:
        """Rows of the chunk."""
        return len(self.item.token_ids)


@dataclass(frozen=True)
class Step:
    """Everything that one forward pass computes: rounds first, then prefixes."""

    rounds: tuple[RoundWork, ...]
    prefills: tuple[PrefillWork, ...]

    @property
    def plan(self) -> StepPlan:
        """The engine's part of the step, on every rank."""
        return StepPlan((*(work.item for work in self.rounds), *(work.item for work in self.prefills)))

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Every session of the step."""
        return (*(work.session for work in self.rounds), *(work.session for work in self.prefills))

    @property
    def prefixes(self) -> tuple[RoundWork | PrefillWork, ...]:
        """Everything that computes rows of a prefix."""
        return (*(work for work in self.rounds if work.prefix_rows), *self.prefills)


@dataclass(frozen=True)
class StepResult:
    """The answer to each round and the report on each chunk, in order; `started_at` in seconds, monotonic clock."""

    answers: tuple[Verdict | PacelineError, ...]
    reports: tuple[tuple[PromptPiece | PacelineError, ...], ...]
    started_at: float
    forward_ms: float
    sample_ms: float

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return (self.forward_ms + self.sample_ms) / 1e3


def gather_step(
    ready: Iterable[Session], opening: Sequence[Session], settings: EngineSettings, logit_rows: int
) -> Step | None:
    """Waiting rounds, oldest first, up to `max_step_rows` rows, and at most `prefill_chunk` prefix tokens.

    So a long prompt delays other rounds by no more than one chunk, of which at most `logit_rows` rows have logits. If
    a session's prefix ends in this step, its first round is in the step, too, if it is there. It is not where logits
    of the chunk are reported, since a round's logits are its own alone.
    """
    rounds: list[RoundWork] = []
    prefills: list[PrefillWork] = []
    room = settings.max_step_rows

    def fits(work: RoundWork) -> bool:
        return not rounds or len(work.item.token_ids) - work.prefix_rows <= room

    for session in ready:
        work = _round_work(session, 0)
        if not fits(work):
            break
        rounds.append(work)
        room -= len(work.item.token_ids)
    for session, rows in share_chunk(opening, settings.prefill_chunk, logit_rows):
        ends = rows == session.prefill_left and not session.reported_rows.within(session.prefilled_rows, rows)
        if ends and session.can_verify and fits(_round_work(session, rows)):
            rounds.append(_round_work(session, rows))
            room -= len(rounds[-1].item.token_ids) - rows
        else:
            prefills.append(PrefillWork(session, session.prefill_item(rows)))
    return Step(tuple(rounds), tuple(prefills)) if rounds or prefills else None


def share_chunk(opening: Sequence[Session], chunk: int, logit_rows: int) -> list[tuple[Session, int]]:
    """Divide a step's prefix tokens among sessions, in their order; the others get the rest of a short one's share.

    Even shares let a short prompt overtake a long one. The scheduler moves sessions
    that were served behind those that were not, so each is served within
    sessions · `BLOCK_ROWS` / chunk steps. Shares end at block boundaries where possible. A share with reported rows
    ends when `logit_rows` rows have logits; a session for which none are left waits for its turn.
    """
    shares = []
    for place, session in enumerate(opening):
        even = chunk // (len(opening) - place) // BLOCK_ROWS * BLOCK_ROWS
        rows = min(session.prefill_left, max(even, BLOCK_ROWS), chunk)
        rows = session.reported_rows.cut(session.prefilled_rows, rows, logit_rows)
        if rows < session.prefill_left:
            excess = (session.prefilled_rows + rows) % BLOCK_ROWS
            rows -= excess if excess < rows else 0
        if rows:
            shares.append((session, rows))
            chunk -= rows
            logit_rows -= len(session.reported_rows.within(session.prefilled_rows, rows))
    return shares


def _round_work(session: Session, prefix_rows: int) -> RoundWork:
    assert session.pending is not None, "such sessions have a round"
    round_ = session.pending.round_
    committed = session.newly_committed(round_) if session.processors is not None else ()
    return RoundWork(session, session.pending, session.round_item(round_), prefix_rows, committed)


def run_step(engine: Engine, step: Step) -> StepResult:
    """One forward pass and the draws of its rounds; a round whose draw fails fails alone.

    Raises:
        PeerUnavailable: a rank is gone; no session of the engine can be used again.
        Exception: the engine's own; no session of the step can be used again.
    """
    started_at = clock.now()
    outputs = _forward(engine, step)
    forwarded_at = clock.now()
    answers = tuple(_verify(work, output) for work, output in zip(step.rounds, outputs, strict=False))
    chunks = zip(step.prefills, outputs[len(step.rounds) :], strict=True)
    reports = tuple(_report(work, output) for work, output in chunks)
    ended_at = clock.now()
    return StepResult(
        answers, reports, started_at, (forwarded_at - started_at) * 1e3, (ended_at - forwarded_at) * 1e3
    )


def _forward(engine: Engine, step: Step) -> Sequence[Logits | Drawing]:
    if not isinstance(engine, DrawingEngine):
        return engine.step(step.plan)
    vocab_size = engine.info.fingerprint.vocab_size
    draws = [draw_of(work.session.facts, work.round_, vocab_size) for work in step.rounds]
    return engine.step_and_draw(step.plan, draws)


def _verify(work: RoundWork, output: Logits | Drawing) -> Verdict | PacelineError:
    try:
        if not isinstance(output, np.ndarray):
            return drawn_verdict(output, work.round_)
        processors = work.session.processors
        if processors is not None:
            processors.advance(work.committed)
        return verify(output, work.session.facts, work.round_, processors)
    except PacelineError as error:
        return error
    except Exception as error:
        logger.exception("verification failed: session=%d base_length=%d", work.session.id, work.round_.base_length)
        return work.session.defect(error)


def _report(work: PrefillWork, logits: Logits | Drawing) -> tuple[PromptPiece | PacelineError, ...]:
    """The report on a chunk; empty where no row of it is reported."""
    session = work.session
    assert isinstance(logits, np.ndarray), "nothing is drawn for a chunk"
    try:
        return prompt_pieces(session.id, work.item, session.facts.token_ids, logits, session.reported_rows.top)
    except PacelineError as error:
        return (error,)
