"""Steps on the executor's thread: calls of drafters are made, then all unfinished work advances step by step.

The results of a step are published at once and sent while the next step runs. Steps end when nothing is left to do,
or as soon as a new command has arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from draft_service.drafters.interface import AnyDrafter
from draft_service.drafters.shadow import ShadowRun
from draft_service.session import CatchUpTask, DraftingSession, DraftTask, SpeculationGrowth, SpeculationTask
from paceline.protocol.errors import PacelineError
from paceline.protocol.proposal import Proposal
from paceline.protocol.records import StepTimings
from paceline.runtime import clock, metrics

logger = logging.getLogger(__name__)
Task = TypeVar("Task", DraftTask, SpeculationTask, CatchUpTask)


@dataclass(frozen=True)
class SessionCall:
    """A call of a session's drafter; a session's calls run in the order in which they were made."""

    session: DraftingSession
    run: Callable[[], int | None]
    opens: bool = False
    """Whether `run` opens the session and returns how many prefix tokens were reused."""
    closes: bool = False

    @property
    def is_needed(self) -> bool:
        """Whether its session still needs it."""
        return self.closes or not self.session.closed


@dataclass
class StepResults:
    """Results of calls or of a step that the event loop must send; false if there are none.

    `openings` has the number of prefix tokens that each opened session reused. A session
    in `failures` can't be used again. `drafted` has proposals that are done, or
    as far as they got by their deadlines. `sessions` and `rows` are the latest step's.
    """

    openings: dict[DraftingSession, int] = field(default_factory=dict)
    failures: dict[DraftingSession, PacelineError] = field(default_factory=dict)
    drafted: dict[DraftTask, Proposal] = field(default_factory=dict)
    growths: list[SpeculationGrowth] = field(default_factory=list)
    sessions: int = 0
    rows: int = 0
    shadows: list[tuple[DraftingSession, ShadowRun]] = field(default_factory=list)
    step_times: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds, rows and sessions of each step, where metrics are on; they are not urgent."""

    def __bool__(self) -> bool:
        return bool(self.openings or self.failures or self.drafted or self.growths or self.shadows)


@dataclass
class _DrafterBatch:
    """The unfinished work of one drafter, which advances in one batched step."""

    drafts: list[DraftTask] = field(default_factory=list)
    speculations: list[SpeculationTask] = field(default_factory=list)
    catch_ups: list[CatchUpTask] = field(default_factory=list)

    @property
    def sessions(self) -> list[DraftingSession]:
        preparing = [*(task.session for task in self.speculations), *(task.session for task in self.catch_ups)]
        return [*(task.session for task in self.drafts), *preparing]


def run_steps(
    calls: Sequence[SessionCall],
    drafts: Sequence[DraftTask],
    speculations: Sequence[SpeculationTask],
    should_stop: Callable[[], bool],
    publish: Callable[[StepResults], object],
    catch_ups: Sequence[CatchUpTask] = (),
) -> int:
    """Make the calls, then advance all work, a step at a time for each drafter.

    Proposals that the calls completed are published before the first step. A call that
    fails fails its session alone; a step that fails fails the sessions of that step alone.

    Args:
        calls: of drafters, in order.
        drafts: proposals that coordinators wait for.
        speculations: rounds for whose outcomes proposals are prepared.
        should_stop: whether a new command has arrived; called after each step.
        publish: takes results; called on this thread.
        catch_ups: sessions whose rows are kept current, in steps that no proposal waits for.

    Returns:
        How many steps were taken.
    """
    steps, results = 0, StepResults()
    for call in calls:
        if call.session not in results.failures:
            _run(call, results)
    _take_shadows(dict.fromkeys(call.session for call in calls), results)
    while True:
        _read(drafts, speculations, results)
        if results:
            publish(results)
            drafts = [task for task in _sound(drafts, results) if task not in results.drafted]
            speculations, catch_ups = _sound(speculations, results), _sound(catch_ups, results)
            results = StepResults()
        if steps and should_stop():
            break
        count = sum(_advance(*each, results) for each in _by_drafter(drafts, speculations, catch_ups).items())
        if not count and not results:
            break
        steps += count
    if results.step_times:
        publish(results)
    return steps


def _sound(tasks: Sequence[Task], results: StepResults) -> list[Task]:
    return [task for task in tasks if task.session not in results.failures]


def _take_shadows(sessions: Iterable[DraftingSession], results: StepResults) -> None:
    for session in sessions:
        results.shadows += ((session, run) for run in session.drafter.take_shadow(session.key))


def _run(call: SessionCall, results: StepResults) -> None:
    try:
        reused_tokens = call.run()
        if call.opens:
            results.openings[call.session] = reused_tokens or 0
    except PacelineError as error:
        results.failures[call.session] = error
    except Exception as error:
        logger.exception("drafter failed: session=%d", call.session.id)
        results.failures[call.session] = call.session.defect(error)


def _by_drafter(
    drafts: Sequence[DraftTask], speculations: Sequence[SpeculationTask], catch_ups: Sequence[CatchUpTask]
) -> dict[AnyDrafter, _DrafterBatch]:
    groups: dict[AnyDrafter, _DrafterBatch] = {}
    for task in drafts:
        if task.draft is not None and not task.draft.done:
            groups.setdefault(task.session.drafter, _DrafterBatch()).drafts.append(task)
    for speculation in speculations:
        work = speculation.speculating
        if work is not None and not work.done:
            groups.setdefault(speculation.session.drafter, _DrafterBatch()).speculations.append(speculation)
    for catch_up in catch_ups:
        rows = catch_up.catching_up
        drafter = catch_up.session.drafter
        if rows is not None and not rows.done and not (drafter in groups and groups[drafter].drafts):
            groups.setdefault(drafter, _DrafterBatch()).catch_ups.append(catch_up)
    return groups


@contextmanager
def _failing(sessions: Sequence[DraftingSession], what: str, results: StepResults) -> Iterator[None]:
    """Let an error in the block fail these sessions and no others."""
    try:
        yield
    except Exception as error:
        logger.exception("%s failed: sessions=%s", what, ",".join(str(session.id) for session in sessions))
        results.failures.update((session, session.defect(error)) for session in sessions)


def _advance(drafter: AnyDrafter, group: _DrafterBatch, results: StepResults) -> bool:
    """Take a step; returns whether it computed any rows."""
    started_at, rows = clock.now(), 0
    with _failing(group.sessions, f"draft step of {drafter.manifest.name}", results):
        rows = drafter.advance(
            [task.draft for task in group.drafts],
            [task.speculating for task in group.speculations],
            [task.catching_up for task in group.catch_ups],
        )
        _take_shadows(group.sessions, results)
    step_ms = (clock.now() - started_at) * 1e3
    batch = len(group.sessions)
    results.sessions, results.rows = batch, rows
    if rows and metrics.is_on():
        results.step_times.append((step_ms / 1e3, rows, batch))
    for task in group.drafts:
        task.forward_ms += step_ms
        task.rows, task.batch = rows, batch
    timings = StepTimings(forward_ms=step_ms, service_ms=step_ms, rows=rows, sessions=batch)
    for speculation in group.speculations:
        speculation.timings = timings
    return rows > 0


def _read(drafts: Sequence[DraftTask], speculations: Sequence[SpeculationTask], results: StepResults) -> None:
    now = clock.now()
    for task in drafts:
        if task.session not in results.failures and _is_over(task, now):
            _read_draft(task, results)
    for speculation in speculations:
        if speculation.session not in results.failures and speculation.speculating is not None:
            _read_grown(speculation, results)


def _is_over(task: DraftTask, now: float) -> bool:
    assert task.draft is not None, "its begin call ran"
    return task.draft.done or (task.deadline is not None and now >= task.deadline)


def _read_draft(task: DraftTask, results: StepResults) -> None:
    started_at = clock.now()
    assert task.draft is not None, "its begin call ran"
    with _failing([task.session], "reading a proposal", results):
        proposal = task.draft.proposal()
        task.sample_ms = (clock.now() - started_at) * 1e3
        results.drafted[task] = proposal


def _read_grown(task: SpeculationTask, results: StepResults) -> None:
    assert task.speculating is not None, "checked before"
    with _failing([task.session], "reading prepared proposals", results):
        proposals = task.speculating.take_grown()
        if proposals:
            results.growths.append(SpeculationGrowth(task, proposals, task.timings))
