"""What is drafted ahead first, how much of it, and what its order may look at."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import numpy as np
import pytest

from draft_service.drafters.draws import NextToken, PreDrawnDraws
from draft_service.drafters.model import is_worth
from draft_service.drafters.speculation import WORTHLESS, Speculation
from draft_service.drafters.tree import TREE_ROWS
from paceline.costs.acceptance import TokenAcceptance
from paceline.costs.cost_line import CostLine
from paceline.engine.table.engine import TableModel
from paceline.models.table_names import TableSpec
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import ROOT, Acceptance, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.target import Round
from paceline.sampling.acceptance import draw_rejection
from paceline.sampling.distribution import processed_scores
from tests.draft_service.driving import PREFIX, SPEC, Driver, path_drafter

K4 = DraftBudget(max_tokens=4, fan_out=3)


@pytest.mark.parametrize("budget", [K4, DraftBudget(max_tokens=3, tree_widths=(2, 2), fan_out=3)])
def test_every_outcome_gets_its_proposal_most_probable_first(budget: DraftBudget) -> None:
    driver = Driver(path_drafter(rows=1))
    tree = driver.draft(budget)
    speculation = driver.verify(budget)
    chances: list[float] = []
    while speculation.best:
        chances.append(speculation.best)
        driver.run(1)
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] >= WORTHLESS
    by_node = [sum(outcome[0] == node for outcome in driver.prepared) for node in range(ROOT, len(tree))]
    assert max(by_node) == budget.fan_out
    for node, token in driver.prepared:
        assert token not in {tree.token_ids[i] for i in range(len(tree)) if tree.parents[i] == node}


def test_a_step_takes_the_most_probable_nodes_of_all_sessions() -> None:
    shared = path_drafter(rows=7)
    drivers = [Driver(shared, session=i, prefix=(i, 2, 3)) for i in range(1, 6)]
    engine = drivers[0].engine
    for driver in drivers:
        driver.draft(K4)
    speculations = [driver.verify(K4) for driver in drivers]
    while not all(each.done for each in speculations):
        chances: list[float] = []
        take = Speculation.take

        def noting(self: Speculation, chances: list[float] = chances, take: Any = take) -> Any:
            chances.append(self.best)
            return take(self)

        with mock.patch.object(Speculation, "take", noting):
            waiting = sum(len(each._queue) for each in speculations)
            shared.advance([], [each for each in speculations if not each.done])
        assert len(chances) == len(engine.steps[-1]) == min(7, waiting)
        assert chances == sorted(chances, reverse=True)
    assert {session for session, _ in engine.computed} == set(range(1, 6))


def test_waiting_sessions_come_first_and_speculation_fills_the_step() -> None:
    shared = path_drafter(rows=5)
    ahead, waiting = Driver(shared, session=1), Driver(shared, session=2, prefix=(9, 8))
    ahead.draft(K4)
    speculation = ahead.verify(K4)
    shared.advance([], [speculation])
    drafting = waiting.begin(K4)
    while not drafting.done:
        shared.advance([drafting], [speculation])
        sessions = [session for session, _ in ahead.engine.steps[-1]]
        assert sessions[0] == 2
        assert len(sessions) <= 5
        assert 1 in sessions
    assert len(drafting.proposal()) == 4


def test_a_full_tree_ends_drafting_ahead() -> None:
    driver, budget = Driver(), DraftBudget(max_tokens=16, fan_out=32)
    driver.draft(budget)
    driver.verify(budget)
    with mock.patch("draft_service.drafters.speculation.WORTHLESS", 0.0):
        assert driver.run() < 30
    assert sum(len(path) > len(PREFIX) for path in driver.engine.held(1)) == TREE_ROWS
    assert driver.commit(next(iter(driver.prepared))) is not None
    driver.verify(budget)
    driver.run(2)
    assert driver.prepared


def test_the_context_ends_drafting_ahead() -> None:
    driver = Driver(path_drafter(TableSpec(vocab=24, seed=3, max_length=12)), prefix=tuple(range(8)))
    driver.speculate(K4)
    assert driver.verified is not None
    for (node, _), proposal in driver.prepared.items():
        assert len(driver.committed) + len(driver.verified.path(node)) + 1 + len(proposal) <= 12
    driver.commit(next(iter(driver.prepared)))
    driver.verify(K4, inline=Proposal(1, (1, 2, 3, 4, 5, 6), (1.0,) * 6))
    driver.run()
    assert max(len(path) for _, path in driver.engine.computed) <= 12


def lengths_by_step(acceptance: Acceptance, seed: int, *, disturb: bool) -> list[dict[tuple[int, int], int]]:
    """How long each prepared proposal is after each step; `disturb` changes what branches draw, and nothing else."""
    driver = Driver(path_drafter(rows=3), acceptance, seed=seed)
    driver.draft(K4)
    proposed = PreDrawnDraws.proposed

    def other(self: PreDrawnDraws, distribution: Any, width: int, position: int, round_key: int) -> Any:
        first = proposed(self, distribution, width, position, round_key)[0]
        pairs = zip(distribution.support.token_ids, distribution.support.probabilities, strict=True)
        return (next((NextToken(token, q) for token, q in pairs if token != first.token), first),)

    lengths = []
    with mock.patch.object(PreDrawnDraws, "proposed", other if disturb else proposed):
        driver.verify(K4)
        for _ in range(12):
            driver.run(1)
            lengths.append({outcome: len(proposal) for outcome, proposal in driver.prepared.items()})
    return lengths


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
def test_how_far_pre_drawn_branches_are_drafted_does_not_depend_on_what_they_drew(acceptance: Acceptance) -> None:
    for seed in range(6):
        plain = lengths_by_step(acceptance, seed, disturb=False)
        assert plain == lengths_by_step(acceptance, seed, disturb=True)
        assert max(plain[-1].values()) >= 3


def _by_what_was_drawn(self: Speculation) -> Any:
    return self._calibration.chance


def test_a_biased_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "_odds", _by_what_was_drawn)
    assert any(
        lengths_by_step(Acceptance.REJECTION, seed, disturb=False)
        != lengths_by_step(Acceptance.REJECTION, seed, disturb=True)
        for seed in range(6)
    )


def _nothing_dropped(tree: Any, verified: Any) -> None:
    return


@pytest.mark.parametrize("mutated", [False, True])
def test_pre_drawn_branches_start_from_rows_of_their_own(monkeypatch: pytest.MonkeyPatch, mutated: bool) -> None:
    """Rows left from the round before would lengthen one branch, and delay its siblings, by what was drawn."""
    if mutated:
        monkeypatch.setattr("draft_service.drafters.model._drop_all_but", _nothing_dropped)
    driver = Driver(acceptance=Acceptance.REJECTION)
    driver.speculate(K4)
    driver.commit(driver.longest)
    driver.verify(K4, node_count=1)
    driver.run(1)
    assert driver.verified is not None
    verified = {(*driver.committed, *driver.verified.token_ids)}
    others = {path for path in driver.engine.held(1) if len(path) > len(driver.committed)} - verified
    assert (others <= {path for _, path in driver.engine.steps[-1]}) is not mutated


def test_greedy_guesses_are_the_targets_own_tokens_where_draft_and_target_agree() -> None:
    law, noise, hits = TableModel(SPEC), NoiseKey(7), 0
    for first in range(SPEC.vocab):
        sampling = SamplingParams(0.0)
        driver = Driver(path_drafter(), Acceptance.REJECTION, sampling, 7, prefix=(first, 2))
        proposal = driver.draft(DraftBudget(max_tokens=2, fan_out=1))
        driver.verify(DraftBudget(max_tokens=1, fan_out=1))
        driver.run()
        histories = [(first, 2, *proposal.token_ids[:depth]) for depth in range(3)]
        rows = [processed_scores(law.logits(history)[None], sampling)[0] for history in histories]
        _, tokens = draw_rejection(np.stack(rows), Round(1, 1, ROOT, (2,), proposal), noise)
        hits += (1, tokens[2]) in driver.prepared
    assert hits == SPEC.vocab


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
def test_pre_drawn_guesses_are_the_most_probable_tokens_whatever_the_noise(acceptance: Acceptance) -> None:
    """A draft can't know the target's draws, so its own must not stand in for them."""
    inline, guesses = Proposal(1, (3, 8), (1.0, 1.0)), set()
    for seed in range(6):
        driver = Driver(acceptance=acceptance, seed=seed)
        driver.verify(DraftBudget(max_tokens=1, fan_out=2), inline=inline)
        driver.run()
        guesses.add(tuple(sorted(driver.prepared)))
    law, best = TableModel(SPEC), []
    for node in range(ROOT, 2):
        logits = law.logits((*PREFIX, *inline.token_ids[: node + 1]))
        refused = inline.token_ids[node + 1 : node + 2]
        order = [token for token in np.argsort(-logits, kind="stable").tolist() if token not in refused]
        best += [(node, token) for token in order[:2]]
    assert guesses == {tuple(sorted(best))}


def test_a_session_learns_from_its_commits() -> None:
    """A draft that is never right learns that, and then prefers its second guesses."""
    driver, budget = Driver(), DraftBudget(max_tokens=1, fan_out=4)
    for _ in range(60):
        driver.draft(budget)
        speculation = driver.verify(budget, node_count=0)
        second = speculation._rankings[speculation.session.tree.root][1][1]
        driver.commit((ROOT, second))
    learned = driver.drafter._calibrations[Acceptance.COUPLED]
    seen = [q for q in (0.1, 0.3, 0.4, 0.6, 0.7) if learned.chance(q, 1) < TokenAcceptance().chance(q, 1)]
    assert len(seen) >= 3
    assert all(learned.chance(q, 2) > learned.chance(q, 1) for q in seen[1:3])


def test_rows_that_cost_time_are_taken_while_they_pay() -> None:
    assert is_worth(CostLine(), 0.001, 10, 5.0), "nothing is known of what rows cost"
    line = CostLine(tuple((rows, 10.0 + 2 * rows) for rows in (1, 2, 4, 8)))
    # One certain row: 12 ms. A second one of chance c gains while c / 2 > 1 / 12.
    assert is_worth(line, 0.17, 1, 1.0)
    assert not is_worth(line, 0.16, 1, 1.0)
    assert is_worth(line, 0.01, 0, 0.0), "a step's first row has nothing to slow down"
    flat = CostLine(((1, 10.0), (8, 10.0)))
    assert is_worth(flat, 0.001, 4, 4.0)
    # Points that differ by chance between neighbours don't stop a step: the trend does.
    stepped = CostLine(((1, 10.0), (4, 10.0), (5, 12.0), (8, 12.0)))
    assert is_worth(stepped, 0.3, 4, 4.0)


def test_what_a_commit_drops_is_freed_without_the_collector() -> None:
    driver = Driver()
    driver.draft(K4)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            driver.verify(K4)
            driver.run(2)
            assert driver.speculation is not None
            assert not driver.speculation.done, "a commit comes while there is more to compute"
            driver.commit(next(iter(driver.prepared)))
        driver.speculation = None
        collected = gc.collect()
    finally:
        gc.enable()
    assert collected == 0
