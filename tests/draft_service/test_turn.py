"""A turn of the draft service: how many steps it takes, and what the loop hears of it meanwhile."""

from __future__ import annotations

from typing import cast

import pytest

from draft_service.drafters.model import ModelDrafter
from draft_service.session import DraftSession, DraftTask, SpeculationTask
from draft_service.step import News, begin_job, open_job, run_turn, speculate_job
from paceline.protocol.draft import DraftBudget, DraftOpen, Verifying
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.rpc.sessions import SessionOwner
from tests.draft_service.driving import PREFIX, FreeRows, PathEngine

DEPTH = 4


class Service:
    """A drafter whose sessions are driven turn by turn, and the news of each turn."""

    def __init__(self) -> None:
        self.engine = PathEngine()
        self.drafter = ModelDrafter(self.engine, prefill_chunk=64, cost=FreeRows())
        self.news: list[News] = []

    def session(self, key: int) -> DraftSession:
        """An opened session."""
        sampling = SamplingParams(temperature=0.9)
        facts = DraftOpen(key, PREFIX, len(PREFIX), sampling, NoiseKey(key), Acceptance.COUPLED, "")
        session = DraftSession(key, cast(SessionOwner, None), facts, self.drafter, 24, len(PREFIX))
        run_turn([open_job(session)], [], [], never, self.news.append)
        assert [*self.news.pop().opened] == [session]
        return session

    def drafting(self, key: int = 1) -> DraftTask:
        """A proposal of `DEPTH` tokens that a new session waits for."""
        return DraftTask(self.session(key), None, DraftBudget(DEPTH), 1, 0.0, "")

    def speculation(self, key: int = 2) -> SpeculationTask:
        """A round of a new session, without a proposal, whose outcomes are prepared."""
        verifying = Verifying(key, len(PREFIX) - 1, budget=DraftBudget(DEPTH, fan_out=2))
        return SpeculationTask(self.session(key), verifying)


def never() -> bool:
    return False


@pytest.fixture
def service() -> Service:
    return Service()


def test_a_turn_goes_on_until_the_proposal_is_whole(service: Service) -> None:
    task = service.drafting()
    assert run_turn([begin_job(task)], [task], [], never, service.news.append) == DEPTH
    (news,) = service.news
    assert [len(each.proposal) for each in news.drafted] == [DEPTH]
    assert len(service.engine.steps) == DEPTH


def test_a_turn_ends_behind_the_step_in_which_something_arrives(service: Service) -> None:
    task, steps = service.drafting(), service.engine.steps
    assert run_turn([begin_job(task)], [task], [], lambda: len(steps) == 2, service.news.append) == 2
    assert not service.news
    assert run_turn([], [task], [], never, service.news.append) == DEPTH - 2
    assert len(service.news.pop().drafted) == 1


def test_what_a_step_adds_is_told_before_the_next_step(service: Service) -> None:
    task = service.speculation()
    told: list[tuple[int, dict[int, int]]] = []

    def publish(news: News) -> None:
        told.append(
            (len(service.engine.steps), {each.next_token: len(each.proposal) for each in news.grown[0].prepared})
        )

    steps = run_turn([speculate_job(task)], [], [task], never, publish)
    assert [at for at, _ in told] == [*range(2, steps + 1)], (
        "the first computes the root, whose children are outcomes"
    )
    assert max(length for _, grown in told for length in grown.values()) == DEPTH


def test_a_proposal_that_is_whole_is_told_once_while_others_go_on(service: Service) -> None:
    draft, other = service.drafting(), service.speculation()
    steps = run_turn([begin_job(draft), speculate_job(other)], [draft], [other], never, service.news.append)
    assert [len(news.drafted) for news in service.news if news.drafted] == [1]
    assert service.news[-1].grown
    assert steps > DEPTH


def test_a_session_that_fails_is_told_once_and_the_others_go_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, other = service.drafting(), service.speculation()
    monkeypatch.setattr(service.drafter, "begin", lambda *_: 1 / 0)
    run_turn([begin_job(draft), speculate_job(other)], [draft], [other], never, service.news.append)
    first, *later = service.news
    assert [*first.failures] == [draft.session]
    assert later
    assert all(news.grown and not news.failures for news in later)


def test_a_turn_without_work_ends(service: Service) -> None:
    assert run_turn([], [], [], never, service.news.append) == 0
    assert not service.news
