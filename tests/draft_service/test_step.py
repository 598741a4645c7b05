"""The steps of the draft service: how many are taken, and what is published meanwhile."""

from __future__ import annotations

from functools import partial
from typing import cast

import pytest

from draft_service.drafters.model import ModelDrafter
from draft_service.session import DraftingSession, DraftTask, SpeculationTask
from draft_service.step import SessionCall, StepResults, run_steps
from paceline.protocol.draft import DraftBudget, Verifying
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.rpc.sessions import SessionOwner
from tests.draft_service.driving import PREFIX, FreeRows, PathEngine

DEPTH = 4


class Service:
    """A drafter whose sessions are driven by hand, and the results of its steps."""

    def __init__(self) -> None:
        self.engine = PathEngine()
        self.drafter = ModelDrafter(self.engine, prefill_chunk=64, meters=FreeRows())
        self.results: list[StepResults] = []

    def session(self, key: int) -> DraftingSession:
        """An opened session."""
        sampling = SamplingParams(temperature=0.9)
        spec = SessionSpec(PREFIX, len(PREFIX), sampling, NoiseKey(key), Acceptance.COUPLED)
        session = DraftingSession(key, key, cast(SessionOwner, None), spec, self.drafter, 24, len(PREFIX))
        opens = SessionCall(session, partial(self.drafter.open, key, spec), opens=True)
        run_steps([opens], [], [], never, self.results.append)
        assert [*self.results.pop().openings] == [session]
        return session

    def drafting(self, key: int = 1) -> DraftTask:
        """A proposal of `DEPTH` tokens that a new session waits for."""
        return DraftTask(self.session(key), None, DraftBudget(DEPTH), 1, 0.0, "")

    def speculation(self, key: int = 2) -> SpeculationTask:
        """A round of a new session, without a proposal, whose outcomes are prepared."""
        verifying = Verifying(key, len(PREFIX) - 1, budget=DraftBudget(DEPTH, fan_out=2))
        return SpeculationTask(self.session(key), verifying)


def begun(task: DraftTask | SpeculationTask) -> SessionCall:
    return SessionCall(task.session, task.begin)


def never() -> bool:
    return False


@pytest.fixture
def service() -> Service:
    return Service()


def test_steps_end_behind_the_one_in_which_something_arrives(service: Service) -> None:
    task, steps = service.drafting(), service.engine.steps
    assert run_steps([begun(task)], [task], [], lambda: len(steps) == 2, service.results.append) == 2
    assert not service.results
    assert run_steps([], [task], [], never, service.results.append) == DEPTH - 2
    assert [*map(len, service.results.pop().drafted.values())] == [DEPTH]
    assert len(steps) == DEPTH


def test_what_a_step_adds_is_published_before_the_next_step(service: Service) -> None:
    task = service.speculation()
    published: list[tuple[int, dict[int, int]]] = []

    def publish(results: StepResults) -> None:
        published.append(
            (
                len(service.engine.steps),
                {each.next_token: len(each.proposal) for each in results.growths[0].proposals},
            )
        )

    steps = run_steps([begun(task)], [], [task], never, publish)
    assert [at for at, _ in published] == [*range(2, steps + 1)], (
        "the first computes the root, whose children are outcomes"
    )
    assert max(length for _, grown in published for length in grown.values()) == DEPTH


def test_a_proposal_that_is_whole_is_published_once_while_others_go_on(service: Service) -> None:
    draft, other = service.drafting(), service.speculation()
    steps = run_steps([begun(draft), begun(other)], [draft], [other], never, service.results.append)
    assert [len(results.drafted) for results in service.results if results.drafted] == [1]
    assert service.results[-1].growths
    assert steps > DEPTH


def test_a_session_that_fails_is_published_once_and_the_others_go_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, other = service.drafting(), service.speculation()
    monkeypatch.setattr(service.drafter, "begin", lambda *_: 1 / 0)
    run_steps([begun(draft), begun(other)], [draft], [other], never, service.results.append)
    first, *later = service.results
    assert [*first.failures] == [draft.session]
    assert later
    assert all(results.growths and not results.failures for results in later)
