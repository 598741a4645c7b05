"""Sessions whose rows are kept current while nobody waits for them: what they compute, and behind whom."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from draft_service.drafters.model import SHORT_LAG, ModelDrafter
from draft_service.drafters.tree import TREE_ROWS
from draft_service.session import CatchUpTask, DraftingSession
from draft_service.step import SessionCall, run_steps
from paceline.protocol.proposal import MAX_PROPOSAL_NODES
from tests.draft_service.driving import PREFIX, SPEC, FreeRows, PathEngine
from tests.draft_service.test_step import DEPTH, Service, begun, never


def committed(service: Service, key: int, count: int) -> tuple[CatchUpTask, list[SessionCall]]:
    """A session whose first rows are computed, and a commit of so many tokens that is to be caught up with."""
    session = service.session(key)
    task = CatchUpTask(session)
    run_steps([SessionCall(session, task.begin)], [], [], never, service.results.append, [task])
    assert task.is_over
    service.engine.steps.clear()
    commit = partial(service.drafter.commit, key, tuple(at % 24 for at in range(count)), shadow=True)
    return task, [SessionCall(session, commit), SessionCall(session, task.begin)]


def said(service: Service, session: DraftingSession) -> list[int]:
    """Positions that were said of a session."""
    runs = [run for results in service.results for of, run in results.shadows if of is session]
    return [run.first_position + place for run in runs for place in range(len(run.standings))]


@pytest.fixture
def service() -> Service:
    return Service()


def test_a_proposal_that_somebody_waits_for_comes_first(service: Service) -> None:
    task, calls = committed(service, 1, 5)
    draft = service.drafting(2)
    service.engine.steps.clear()
    steps = run_steps([*calls, begun(draft)], [draft], [], never, service.results.append, [task])
    assert steps == DEPTH + 1
    assert [{session for session, _ in step} for step in service.engine.steps] == [{2}] * DEPTH + [{1}]
    assert next(results for results in service.results if results.drafted) is service.results[1]
    assert said(service, task.session) == [*range(len(PREFIX), len(PREFIX) + 5)]


def test_outcomes_are_prepared_beside_it(service: Service) -> None:
    task, calls = committed(service, 1, 5)
    speculation = service.speculation(2)
    service.engine.steps.clear()
    run_steps([*calls, begun(speculation)], [], [speculation], never, service.results.append, [task])
    assert {session for session, _ in service.engine.steps[0]} == {1, 2}


def test_long_lags_go_by_chunks_that_sessions_share(service: Service) -> None:
    count = SHORT_LAG + 30
    (one, first), (other, second) = committed(service, 1, count), committed(service, 2, count)
    service.engine.steps.clear()
    run_steps([*first, *second], [], [], never, service.results.append, [one, other])
    assert max(len(step) for step in service.engine.steps) <= 64
    for task in (one, other):
        assert said(service, task.session) == [*range(len(PREFIX), len(PREFIX) + count)]
        assert task.is_over


def test_rows_whose_shadow_is_no_longer_wanted_are_passed_over(service: Service) -> None:
    task, calls = committed(service, 1, 3)
    run_steps(calls[:1], [], [], never, service.results.append)
    given_up = SessionCall(task.session, partial(service.drafter.commit, 1, (7,), shadow=False))
    wanted = SessionCall(task.session, partial(service.drafter.commit, 1, (8, 9), shadow=True))
    run_steps([given_up, wanted, calls[1]], [], [], never, service.results.append, [task])
    base = len(PREFIX)
    assert said(service, task.session) == [base, base + 4, base + 5]


def test_a_step_that_fails_fails_its_session_alone(service: Service) -> None:
    task, calls = committed(service, 1, 5)
    draft = service.drafting(2)
    service.drafter._engine.close(1)
    run_steps([*calls, begun(draft)], [draft], [], never, service.results.append, [task])
    failures = {session for results in service.results for session in results.failures}
    assert failures == {task.session}
    assert any(results.drafted for results in service.results)


def test_a_text_beyond_what_is_drafted_for_is_left_alone(service: Service) -> None:
    rows = TREE_ROWS + 20
    service.engine = PathEngine(replace(SPEC, max_kv_rows=rows))
    service.drafter = ModelDrafter(service.engine, prefill_chunk=64, meters=FreeRows())
    task, calls = committed(service, 1, rows - MAX_PROPOSAL_NODES)
    assert run_steps(calls, [], [], never, service.results.append, [task]) == 0
    assert task.is_over
