"""Drafts are offered while a server's steps commit more with them than without."""

from __future__ import annotations

import pytest

from paceline.costs.goodput import LOOK_STEPS
from paceline.drafting.goodput_judge import GoodputJudge

STEPS = 4000


def run(judge: GoodputJudge, rows: int, tokens: float, drafting_ms: float, steps: int = STEPS) -> tuple[int, float]:
    """Steps of 10 ms at rest; returns how many were offered drafts, and tokens per 10 ms and request."""
    offered, ms, committed, owed = 0, 0.0, 0, 0.0
    for _ in range(steps):
        offers = judge.may_offer(rows)
        owed += rows * (tokens if offers else 1.0)
        new, owed = int(owed), owed % 1
        step_ms = drafting_ms if offers else 10.0
        judge.learn(rows, new, step_ms, has_drafts=offers)
        offered, ms, committed = offered + offers, ms + step_ms, committed + new
    return offered, committed / rows / ms * 10


def test_drafts_that_pay_are_offered_but_for_looks_at_rest() -> None:
    offered, goodput = run(GoodputJudge(), 8, tokens=2.0, drafting_ms=12.0)
    assert offered > 0.95 * STEPS
    assert goodput > 0.97 * 2.0 / 1.2


@pytest.mark.parametrize(
    ("rows", "tokens", "drafting_ms"), [(1, 1.0, 10.4), (8, 1.1, 20.0), (8, 3.0, 60.0), (1, 6.0, 150.0)]
)
def test_drafts_that_lose_cost_little(rows: int, tokens: float, drafting_ms: float) -> None:
    offered, goodput = run(GoodputJudge(), rows, tokens, drafting_ms)
    assert 0 < offered < 0.1 * STEPS, "they are tried, and left"
    assert goodput > 0.97


def test_drafts_that_become_worse_are_left_and_tried_again_later() -> None:
    judge = GoodputJudge()
    run(judge, 1, tokens=2.0, drafting_ms=12.0, steps=500)
    assert run(judge, 1, tokens=1.0, drafting_ms=15.0)[1] > 0.97
    assert run(judge, 1, tokens=2.0, drafting_ms=12.0)[0] > 0.3 * STEPS


def test_nothing_is_offered_before_steps_without_drafts_were_seen() -> None:
    judge = GoodputJudge()
    for _ in range(LOOK_STEPS + 1):  # a mean forgets a part of a step meanwhile
        assert not judge.may_offer(2)
        judge.learn(2, 2, 10.0, has_drafts=False)
    assert judge.may_offer(2)
    assert not judge.may_offer(64)
