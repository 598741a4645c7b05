"""What a budget's proposal has and takes, and where it ends: before a node that the text is too unlikely to reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draft_service.drafters.model import ModelDraft
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import ROOT, Acceptance
from tests.draft_service.driving import Driver, assert_prefix

CHAIN = DraftBudget(max_tokens=8)
DYNAMIC = DraftBudget(max_tokens=4, max_nodes=20)
STATIC = DraftBudget(max_tokens=3, tree_widths=(3, 2))
LEAST = 0.2


def draft_of(driver: Driver, budget: DraftBudget) -> ModelDraft:
    return driver.finish(driver.begin(budget))


@pytest.mark.parametrize("budget", [CHAIN, DYNAMIC], ids=["chain", "dynamic tree"])
def test_a_proposal_ends_before_the_first_node_that_is_too_unlikely(budget: DraftBudget) -> None:
    lengths = set()
    for seed in range(20):
        whole, cut = (draft_of(Driver(seed=seed), each) for each in (budget, replace(budget, least_chance=LEAST)))
        nodes = next((i for i, chance in enumerate(whole.branch.chances) if chance < LEAST), len(whole.branch.nodes))
        assert len(cut.branch.nodes) == nodes
        assert_prefix(cut.proposal(), whole.proposal())
        lengths.add(nodes)
    assert len(lengths) > 2, "texts differ"


def test_no_row_is_computed_behind_the_end() -> None:
    driver = Driver()
    proposal = driver.draft(replace(CHAIN, least_chance=LEAST))
    assert 0 < len(proposal) < CHAIN.max_tokens
    rows = len(driver.engine.computed)
    assert rows == len(driver.prefix) + len(proposal), "the row that said that it ends is the last"
    assert len(Driver().draft(replace(CHAIN, least_chance=1.0))) == 0


@pytest.mark.parametrize(
    ("acceptance", "budget"),
    [(Acceptance.REJECTION, CHAIN), (Acceptance.BLOCK, CHAIN), (Acceptance.COUPLED, STATIC)],
    ids=["rejection", "block", "static tree"],
)
def test_others_are_drafted_whole(acceptance: Acceptance, budget: DraftBudget) -> None:
    """Under rejection and block acceptance it would be a choice by a token's probability (`exactness` §7)."""
    for seed in range(5):
        whole = Driver(acceptance=acceptance, seed=seed).draft(budget)
        assert Driver(acceptance=acceptance, seed=seed).draft(replace(budget, least_chance=0.9)) == whole


def test_what_is_prepared_for_outcomes_does_not_end_there() -> None:
    budget = replace(CHAIN, max_tokens=3, fan_out=2)
    prepared = []
    for least_chance in (0.0, 0.9):
        driver = Driver()
        driver.draft(budget)
        driver.verify(replace(budget, least_chance=least_chance))
        driver.run()
        prepared.append(driver.prepared)
    assert prepared[0] == prepared[1]
    assert prepared[0]


def test_chances_are_those_that_commits_have_taught() -> None:
    """A session for which nothing was ever prepared learns, too."""
    driver = Driver()
    before = draft_of(driver, replace(CHAIN, least_chance=LEAST))
    for _ in range(300):
        proposal = driver.draft(DraftBudget(max_tokens=1))
        driver.commit((ROOT, (proposal.token_ids[0] + 1) % 24))
    after = draft_of(driver, replace(CHAIN, least_chance=LEAST))
    assert len(before.branch.nodes) > 0
    assert len(after.branch.nodes) == 0


@pytest.mark.parametrize(("tokens", "nodes"), [(1, 4), (3, 6), (4, 5), (2, 8)])
def test_a_dynamic_tree_takes_a_row_for_each_token_and_its_last_nodes_none(tokens: int, nodes: int) -> None:
    driver = Driver()
    proposal = driver.draft(DraftBudget(max_tokens=tokens, max_nodes=nodes))
    first, *others = [len(step) for step in driver.engine.steps]
    assert first == len(driver.prefix)
    assert others == [1] * (tokens - 1)
    assert len(proposal) == nodes
    assert 1 <= max(proposal.depths) <= tokens


def test_a_dynamic_tree_begins_with_what_is_likeliest() -> None:
    """One token more is one step more: the nodes before the last are those of the smaller tree."""
    proposals = [Driver().draft(DraftBudget(max_tokens=tokens, max_nodes=6)) for tokens in (2, 4)]
    small, large = ([*zip(each.token_ids, each.parents, strict=True)] for each in proposals)
    assert large[0] == small[0]
    assert {*small} != {*large}, "deeper nodes take the place of unlikelier ones"
