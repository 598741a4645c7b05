"""Proposals prepared for outcomes: the same as those drafted after them, and never computed twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.branch import Branch
from draft_service.drafters.draws import NextToken
from draft_service.drafters.tree import TREE_ROWS, DraftTree
from paceline.costs.acceptance import prior_chance
from paceline.protocol.draft import DraftBudget
from paceline.protocol.errors import PrefixMismatch
from paceline.protocol.proposal import ROOT, Acceptance, Proposal
from paceline.protocol.sampling import SamplingParams
from tests.draft_service.driving import PREFIX, SPEC, Driver, assert_prefix, path_drafter

BUDGETS = (
    DraftBudget(max_tokens=4, fan_out=3),
    DraftBudget(max_tokens=1, fan_out=2),
    DraftBudget(max_tokens=3, tree_widths=(3, 2), fan_out=2),
    DraftBudget(max_tokens=4, tree_widths=(2, 2, 2), max_nodes=9, fan_out=2),
    DraftBudget(max_tokens=4, max_nodes=11, fan_out=2),
)


def chosen_outcome(driver: Driver, source: random.Random) -> tuple[int, int]:
    """Mostly one that was prepared; else any token after any node."""
    if driver.prepared and source.random() < 0.7:
        return source.choice([*driver.prepared])
    nodes = 0 if driver.verified is None else len(driver.verified)
    return source.randrange(ROOT, nodes), source.randrange(SPEC.vocab)


def inline(source: random.Random) -> Proposal:
    tokens = tuple(source.choices(range(SPEC.vocab), k=source.randint(1, 4)))
    return Proposal(0, tokens, (1.0,) * len(tokens))


def play(driver: Driver, seed: int, budget: DraftBudget, rounds: int = 4) -> None:
    """Rounds of every kind; each prepared proposal must be what a session opened after its outcome drafts."""
    source = random.Random(seed)
    driver.draft(budget)
    for _ in range(rounds):
        kind = source.random()
        if kind < 0.2:
            driver.verify(budget, inline=inline(source))
        else:
            driver.verify(budget, node_count=0 if kind < 0.3 else source.randint(0, len(driver.offer or ())))
        driver.run(source.randint(0, 9))
        hit = driver.commit(chosen_outcome(driver, source))
        whole = driver.fresh(budget)
        if hit is not None:
            assert_prefix(hit, whole)
        elif source.random() < 0.7:
            assert replace(driver.draft(budget), proposal_id=whole.proposal_id) == whole


@given(
    seed=st.integers(0, 1 << 32),
    acceptance=st.sampled_from(Acceptance),
    budget=st.sampled_from(BUDGETS),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
)
@settings(max_examples=50, deadline=None)
def test_what_is_prepared_is_what_would_be_drafted(
    seed: int, acceptance: Acceptance, budget: DraftBudget, temperature: float
) -> None:
    drafter = path_drafter(rows=1 + seed % 12)
    play(Driver(drafter, acceptance, SamplingParams(temperature, top_p=0.98), seed), seed, budget)


class _KeyedByTheRoundBefore(Branch):
    """Draws with the key of the round under verification, not of the one that will carry the proposal."""

    def _children(self, index: int) -> tuple[float, list[NextToken]]:
        node = self.node(index)
        assert node.distribution is not None
        before = self.root.position - 1
        children = [*self._draws.proposed(node.distribution, 1, node.position + 1, before)]
        return children[0].q, children


def _learned() -> Callable[[float, int], float]:
    """Chances that change with time, as those learned from commits do."""
    calls = itertools.count()
    return lambda best, rank: prior_chance(best, rank) ** (0.2 if next(calls) % 3 else 1.0)


def _shifted(tree: DraftTree, trunk: int, nodes: list[Any]) -> None:
    """Rows are thought to lie where they lay before the compaction."""
    tree._trunk, tree._committed_nodes = trunk, []
    tree._tree_nodes += nodes
    if not tree.lag:
        tree.root.row = trunk - 1
    for row, node in enumerate(tree._tree_nodes, start=trunk):
        node.row = row if node.row is None else node.row


@pytest.mark.parametrize(
    ("name", "mutant", "acceptance", "budget"),
    [
        ("speculation.Branch", _KeyedByTheRoundBefore, Acceptance.REJECTION, BUDGETS[0]),
        ("branch.prior_chance", _learned(), Acceptance.COUPLED, BUDGETS[4]),
        ("tree.DraftTree._place", _shifted, Acceptance.COUPLED, BUDGETS[0]),
    ],
    ids=["draws keyed by another round", "shape by learned chances", "rows not renumbered"],
)
def test_the_comparison_catches(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mutant: Callable[..., Any],
    acceptance: Acceptance,
    budget: DraftBudget,
) -> None:
    monkeypatch.setattr(f"draft_service.drafters.{name}", mutant)
    with pytest.raises((AssertionError, PrefixMismatch)):
        for seed in range(60):
            play(Driver(path_drafter(rows=3), acceptance, seed=seed), seed, budget)


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_row_is_computed_twice_while_it_can_be_reached(budget: DraftBudget) -> None:
    driver, source = Driver(), random.Random(5)
    driver.draft(budget)
    for _ in range(12):
        driver.verify(budget)
        driver.run(5)
        if driver.commit(chosen_outcome(driver, source)) is None:
            driver.draft(budget)
    alive: set[tuple[int, ...]] = set()
    for _, path in driver.engine.computed:
        assert path not in alive
        alive.add(path)
    assert len(driver.engine.held(1)) <= len(driver.committed) + TREE_ROWS


def test_a_hit_needs_one_step_less_than_its_length() -> None:
    """After a whole hit the first speculative step already computes outcomes: nothing is left to catch up."""
    driver, budget = Driver(), DraftBudget(max_tokens=3, fan_out=2)
    driver.speculate(budget)
    hit = driver.commit(driver.longest)
    assert hit is not None
    assert len(hit) == 3
    driver.engine.steps.clear()
    driver.verify(budget)
    driver.run(1)
    assert min(len(path) for _, path in driver.engine.steps[0]) > len(driver.committed)
    assert driver.prepared


def test_rows_of_other_outcomes_are_dropped_by_a_commit() -> None:
    driver, budget = Driver(), DraftBudget(max_tokens=3, fan_out=3)
    driver.speculate(budget)
    rows = len(driver.engine.held(1))
    assert driver.commit(next(iter(driver.prepared))) is not None
    driver.verify(budget)
    driver.run(1)
    text = tuple(driver.committed)
    assert len(driver.engine.held(1)) < rows
    assert all(text[: len(path)] == path[: len(text)] for path in driver.engine.held(1))
    assert text[: len(PREFIX)] == PREFIX
