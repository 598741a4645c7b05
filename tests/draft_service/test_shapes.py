"""What a budget's proposal takes and has."""

from __future__ import annotations

import pytest

from draft_service.drafters.model import ModelDrafter
from paceline.protocol.draft import DraftBudget
from tests.draft_service.driving import Driver, PathEngine


@pytest.mark.parametrize(("tokens", "nodes"), [(1, 4), (3, 6), (4, 5), (2, 8)])
def test_a_dynamic_tree_takes_a_row_for_each_token_and_its_last_nodes_none(tokens: int, nodes: int) -> None:
    engine = PathEngine()
    driver = Driver(ModelDrafter(engine, prefill_chunk=64))
    proposal = driver.draft(DraftBudget(max_tokens=tokens, max_nodes=nodes))
    first, *others = [len(step) for step in engine.steps]
    assert first == len(driver.prefix)
    assert others == [1] * (tokens - 1)
    assert len(proposal) == nodes
    assert 1 <= max(proposal.depths) <= tokens


def test_a_dynamic_tree_begins_with_what_is_likeliest() -> None:
    """One token more is one step more: the nodes before the last are those of the smaller tree."""
    engine = PathEngine()
    small = Driver(ModelDrafter(engine, prefill_chunk=64)).draft(DraftBudget(max_tokens=2, max_nodes=6))
    large = Driver(ModelDrafter(PathEngine(), prefill_chunk=64)).draft(DraftBudget(max_tokens=4, max_nodes=6))
    first = (small.token_ids[0], small.parents[0])
    assert (large.token_ids[0], large.parents[0]) == first
    assert set(zip(small.token_ids, small.parents, strict=True)) != set(
        zip(large.token_ids, large.parents, strict=True)
    ), "deeper nodes take the place of unlikelier ones"
