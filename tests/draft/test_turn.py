"""A turn of the draft service: how many steps it takes before the loop hears of it."""

from __future__ import annotations

from typing import cast

import pytest

from draft_service.drafters.model import ModelDrafter
from draft_service.session import DraftSession, DraftTask
from draft_service.turn import begin_job, open_job, run_turn
from paceline.rpc.sessions import SessionOwner
from paceline.types import Acceptance, DraftBudget, DraftOpen, NoiseKey, SamplingParams
from tests.draft.driving import PREFIX, PathEngine

DEPTH = 4


class Opened:
    """A session whose proposal of `DEPTH` tokens is wanted, the open behind it."""

    def __init__(self) -> None:
        self.engine = PathEngine()
        drafter = ModelDrafter(self.engine, prefill_chunk=64)
        sampling = SamplingParams(temperature=0.9)
        facts = DraftOpen(1, PREFIX, len(PREFIX), sampling, NoiseKey(1), Acceptance.COUPLED, "")
        session = DraftSession(1, cast(SessionOwner, None), facts, drafter, 24, len(PREFIX))
        self.task = DraftTask(session, None, DraftBudget(DEPTH), 1, 0.0, "")
        assert run_turn([open_job(session)], [], [], never).opened


def never() -> bool:
    return False


@pytest.fixture
def opened() -> Opened:
    return Opened()


def test_a_turn_goes_on_until_the_proposal_is_whole(opened: Opened) -> None:
    result = run_turn([begin_job(opened.task)], [opened.task], [], never)
    assert [len(each.proposal) for each in result.drafted] == [DEPTH]
    assert result.steps == len(opened.engine.steps) == DEPTH


def test_a_turn_ends_behind_the_step_in_which_something_arrives(opened: Opened) -> None:
    result = run_turn([begin_job(opened.task)], [opened.task], [], lambda: len(opened.engine.steps) == 2)
    assert (result.drafted, result.steps) == ([], 2)
    rest = run_turn([], [opened.task], [], never)
    assert (len(rest.drafted), rest.steps) == (1, DEPTH - 2)


def test_a_turn_without_work_ends(opened: Opened) -> None:
    assert run_turn([], [], [], never).steps == 0
