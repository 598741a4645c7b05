"""One turn on the executor's thread: what arrived is applied, then all unfinished work grows step by step.

What a step leaves to be sent is published at once and sent while the next step runs. A turn ends when nothing is left
to do, or with the first step behind which something else has arrived.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_service.drafters.interface import AnyDrafter
from draft_service.session import DraftingSession, DraftTask, FinishedDraft, Grown, SpeculationTask
from paceline.protocol.errors import InternalError, PacelineError
from paceline.protocol.records import StepTimings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionCall:
    """A call of a session's drafter; jobs of a session run in the order in which they were made."""

    session: DraftingSession
    run: Callable[[], int | None]
    opens: bool = False
    """Whether `run` opens the session and returns how many prefix tokens were reused."""
    closes: bool = False

    @property
    def wanted(self) -> bool:
        """Whether there is still a session that it is for."""
        return self.closes or not self.session.closed


@dataclass
class StepResults:
    """What came of the jobs or of a step: somebody is waiting to hear of it, if there is any.

    `opened` tells how many prefix tokens each opened session reused; a session
    named in `failures` can't be used again.
    """

    opened: dict[DraftingSession, int] = field(default_factory=dict)
    failures: dict[DraftingSession, PacelineError] = field(default_factory=dict)
    drafted: list[FinishedDraft] = field(default_factory=list)
    grown: list[Grown] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.opened or self.failures or self.drafted or self.grown)


@dataclass
class _DrafterBatch:
    """The unfinished work of one drafter: one batched step."""

    drafts: list[DraftTask] = field(default_factory=list)
    speculations: list[SpeculationTask] = field(default_factory=list)

    @property
    def sessions(self) -> list[DraftingSession]:
        return [*(task.session for task in self.drafts), *(task.session for task in self.speculations)]


def open_call(session: DraftingSession) -> SessionCall:
    """Begin a session in its drafter."""
    return SessionCall(session, lambda: session.drafter.open(session.key, session.facts), opens=True)


def commit_call(session: DraftingSession, token_ids: Sequence[int]) -> SessionCall:
    """Append committed tokens."""
    return SessionCall(session, lambda: session.drafter.commit(session.key, token_ids))


def begin_call(task: DraftTask) -> SessionCall:
    """Start a task's drafting."""

    def begin() -> None:
        task.begun = time.monotonic()
        task.drafting = task.session.drafter.begin(task.session.key, task.budget, task.proposal_id)

    return SessionCall(task.session, begin)


def speculate_call(task: SpeculationTask) -> SessionCall:
    """Start to prepare for a round's outcomes."""

    def speculate() -> None:
        session = task.session
        task.begun = True
        task.speculating = session.drafter.speculate(session.key, task.verifying, session.next_proposal_id)

    return SessionCall(task.session, speculate)


def close_call(session: DraftingSession) -> SessionCall:
    """Forget a session in its drafter."""
    return SessionCall(session, lambda: session.drafter.close(session.key), closes=True)


def run_step(
    calls: Sequence[SessionCall],
    drafts: Sequence[DraftTask],
    speculations: Sequence[SpeculationTask],
    interrupted: Callable[[], bool],
    publish: Callable[[StepResults], object],
) -> int:
    """Apply the jobs, then advance all work, a step at a time for each drafter.

    What a job left ready is not kept waiting for a step. A job that fails fails
    its session alone; a step that fails fails the sessions of that step alone.

    Args:
        jobs: what arrived.
        drafts: proposals that are waited for.
        speculations: proposals that are prepared.
        interrupted: whether something else has arrived; asked after each step.
        publish: takes news; called on this thread.

    Returns:
        How many steps were taken.
    """
    steps, results = 0, StepResults()
    for call in calls:
        if call.session not in results.failures:
            _run(call, results)
    while True:
        _read(drafts, speculations, results)
        if results:
            publish(results)
            drafts, speculations = _unfinished(drafts, speculations, results)
            results = StepResults()
        if steps and interrupted():
            return steps
        taken = sum(_advance(*each, results) for each in _by_drafter(drafts, speculations).items())
        if not taken and not results:
            return steps
        steps += taken


def _unfinished(
    drafts: Sequence[DraftTask], speculations: Sequence[SpeculationTask], results: StepResults
) -> tuple[list[DraftTask], list[SpeculationTask]]:
    drafted = {each.task for each in results.drafted}
    return (
        [task for task in drafts if task not in drafted and task.session not in results.failures],
        [task for task in speculations if task.session not in results.failures],
    )


def _run(call: SessionCall, results: StepResults) -> None:
    try:
        reused = call.run()
        if call.opens:
            results.opened[call.session] = reused or 0
    except PacelineError as error:
        results.failures[call.session] = error
    except Exception as error:
        logger.exception("drafter failed: session=%d", call.session.id)
        results.failures[call.session] = _internal(call.session, error)


def _by_drafter(
    drafts: Sequence[DraftTask], speculations: Sequence[SpeculationTask]
) -> dict[AnyDrafter, _DrafterBatch]:
    groups: dict[AnyDrafter, _DrafterBatch] = {}
    for task in drafts:
        if task.drafting is not None and not task.drafting.done:
            groups.setdefault(task.session.drafter, _DrafterBatch()).drafts.append(task)
    for speculation in speculations:
        work = speculation.speculating
        if work is not None and not work.done:
            groups.setdefault(speculation.session.drafter, _DrafterBatch()).speculations.append(speculation)
    return groups


def _advance(drafter: AnyDrafter, group: _DrafterBatch, results: StepResults) -> bool:
    """Take a step; says whether it computed any rows."""
    begun = time.monotonic()
    try:
        rows = drafter.advance(
            [task.drafting for task in group.drafts], [task.speculating for task in group.speculations]
        )
    except Exception as error:
        names = ",".join(str(session.id) for session in group.sessions)
        logger.exception("draft step failed: drafter=%s sessions=%s", drafter.manifest.name, names)
        for session in group.sessions:
            results.failures[session] = _internal(session, error)
        return False
    step_ms = (time.monotonic() - begun) * 1e3
    batch = len(group.sessions)
    for task in group.drafts:
        task.forward_ms += step_ms
        task.rows, task.batch = rows, batch
    timings = StepTimings(forward_ms=step_ms, service_ms=step_ms, rows=rows, sessions=batch)
    for speculation in group.speculations:
        speculation.timings = timings
    return rows > 0


def _read(drafts: Sequence[DraftTask], speculations: Sequence[SpeculationTask], results: StepResults) -> None:
    now = time.monotonic()
    for task in drafts:
        if task.session not in results.failures and _is_over(task, now):
            _read_draft(task, results)
    for speculation in speculations:
        if speculation.session not in results.failures and speculation.speculating is not None:
            _read_grown(speculation, results)


def _is_over(task: DraftTask, now: float) -> bool:
    assert task.drafting is not None, "its begin job ran"
    return task.drafting.done or (task.deadline is not None and now >= task.deadline)


def _read_draft(task: DraftTask, results: StepResults) -> None:
    begun = time.monotonic()
    assert task.drafting is not None, "its begin job ran"
    try:
        proposal = task.drafting.proposal()
    except Exception as error:
        logger.exception("reading a proposal failed: session=%d", task.session.id)
        results.failures[task.session] = _internal(task.session, error)
        return
    task.sample_ms = (time.monotonic() - begun) * 1e3
    results.drafted.append(FinishedDraft(task, proposal))


def _read_grown(task: SpeculationTask, results: StepResults) -> None:
    assert task.speculating is not None, "checked before"
    try:
        prepared = task.speculating.take_grown()
    except Exception as error:
        logger.exception("reading prepared proposals failed: session=%d", task.session.id)
        results.failures[task.session] = _internal(task.session, error)
        return
    if prepared:
        results.grown.append(Grown(task, prepared, task.timings))


def _internal(session: DraftingSession, error: Exception) -> InternalError:
    return InternalError(f"session {session.id}: unexpected {type(error).__name__}; the service's log has the stack")
