"""One turn on the executor's thread: what arrived is applied, then every live drafting grows by one step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_service.drafters.interface import AnyDrafter, Drafting
from draft_service.session import Drafted, DraftSession, DraftTask
from paceline.errors import InternalError, PacelineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A call of a session's drafter; jobs of a session run in the order in which they were made."""

    session: DraftSession
    run: Callable[[], int | None]
    opens: bool = False
    """Whether `run` opens the session and returns how many prefix tokens were reused."""


@dataclass
class TurnResult:
    """What came of a turn.

    `opened` tells how many prefix tokens each opened session reused; a session
    named in `failures` can't be used again.
    """

    opened: dict[DraftSession, int] = field(default_factory=dict)
    failures: dict[DraftSession, PacelineError] = field(default_factory=dict)
    drafted: list[Drafted] = field(default_factory=list)
    rows: int = 0


def open_job(session: DraftSession) -> Job:
    """Begin a session in its drafter."""
    facts = session.facts
    return Job(session, lambda: session.drafter.open(session.key, facts.token_ids, session.context), opens=True)


def commit_job(session: DraftSession, token_ids: Sequence[int]) -> Job:
    """Append committed tokens."""
    return Job(session, lambda: session.drafter.commit(session.key, token_ids))


def begin_job(task: DraftTask) -> Job:
    """Start a task's drafting."""

    def begin() -> None:
        task.begun = time.monotonic()
        task.drafting = task.session.drafter.begin(task.session.key, task.budget, task.proposal_id)

    return Job(task.session, begin)


def close_job(session: DraftSession) -> Job:
    """Forget a session in its drafter."""
    return Job(session, lambda: session.drafter.close(session.key))


def run_turn(jobs: Sequence[Job], tasks: Sequence[DraftTask]) -> TurnResult:
    """Apply the jobs, advance the tasks by one step for each drafter, and read those that are done.

    A job that fails fails its session alone; a step that fails fails the
    sessions of that step alone.
    """
    result = TurnResult()
    for job in jobs:
        if job.session not in result.failures:
            _run(job, result)
    live = [task for task in tasks if task.session not in result.failures]
    for drafter, group in _by_drafter(live).items():
        _advance(drafter, group, result)
    now = time.monotonic()
    for task in live:
        if task.session not in result.failures and _is_over(task, now):
            _read(task, result)
    return result


def _run(job: Job, result: TurnResult) -> None:
    try:
        reused = job.run()
        if job.opens:
            result.opened[job.session] = reused or 0
    except PacelineError as error:
        result.failures[job.session] = error
    except Exception as error:
        logger.exception("drafter failed: session=%d", job.session.id)
        result.failures[job.session] = _internal(job.session, error)


def _by_drafter(tasks: Sequence[DraftTask]) -> dict[AnyDrafter, list[tuple[DraftTask, Drafting]]]:
    groups: dict[AnyDrafter, list[tuple[DraftTask, Drafting]]] = {}
    for task in tasks:
        if task.drafting is not None and not task.drafting.done:
            groups.setdefault(task.session.drafter, []).append((task, task.drafting))
    return groups


def _advance(drafter: AnyDrafter, group: Sequence[tuple[DraftTask, Drafting]], result: TurnResult) -> None:
    begun = time.monotonic()
    try:
        rows = drafter.advance([drafting for _, drafting in group])
    except Exception as error:
        names = ",".join(str(task.session.id) for task, _ in group)
        logger.exception("draft step failed: drafter=%s sessions=%s", drafter.manifest.name, names)
        for task, _ in group:
            result.failures[task.session] = _internal(task.session, error)
        return
    result.rows += rows
    step_ms = (time.monotonic() - begun) * 1e3
    for task, _ in group:
        task.forward_ms += step_ms
        task.rows, task.batch = rows, len(group)


def _is_over(task: DraftTask, now: float) -> bool:
    assert task.drafting is not None, "its begin job ran"
    return task.drafting.done or (task.deadline is not None and now >= task.deadline)


def _read(task: DraftTask, result: TurnResult) -> None:
    begun = time.monotonic()
    assert task.drafting is not None, "its begin job ran"
    try:
        proposal = task.drafting.proposal()
    except Exception as error:
        logger.exception("reading a proposal failed: session=%d", task.session.id)
        result.failures[task.session] = _internal(task.session, error)
        return
    task.sample_ms = (time.monotonic() - begun) * 1e3
    result.drafted.append(Drafted(task, proposal))


def _internal(session: DraftSession, error: Exception) -> InternalError:
    return InternalError(f"session {session.id}: unexpected {type(error).__name__}; the service's log has the stack")
