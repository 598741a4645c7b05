"""What a budget's proposal takes and has."""

from __future__ import annotations

import pytest

from paceline.protocol.draft import DraftBudget
from tests.draft_service.driving import Driver


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
