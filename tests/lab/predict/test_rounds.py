"""Replayed rounds against hand-computed ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.costs.acceptance import FAN_OUT
from paceline.protocol.errors import InvalidInput
from paceline_lab.predict.rounds import ProposalShape, expected_rounds
from tests.lab.predict.made_positions import made_positions

LONG = 4000
END = 2e-3
"""How far the end of a text of `LONG` tokens moves a mean: it cuts one round of 600 or more."""


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_constant_chance_gives_the_geometric_sum(k: int) -> None:
    """(1 - a^(k+1)) / (1 - a): Leviathan et al., arXiv 2211.17192."""
    found = expected_rounds([made_positions([0.7] * LONG)], ProposalShape(k))
    assert found.tokens == pytest.approx((1 - 0.7 ** (k + 1)) / 0.3, rel=END)
    assert found.survival == pytest.approx([0.7**depth for depth in range(1, k + 1)], rel=END)
    assert dict(found.proposed) == pytest.approx({k: 1.0})
    assert expected_rounds([made_positions([0.5])], ProposalShape(0)).tokens == 1


def test_a_tree_accepts_what_its_width_holds() -> None:
    drafter = [made_positions([0.5] * LONG, 0.8, 0.9)]
    assert expected_rounds(drafter, ProposalShape(2, (3,))).tokens == pytest.approx(1 + 0.9 + 0.9 * 0.5, rel=END)
    assert expected_rounds(drafter, ProposalShape(2, (2, 2))).tokens == pytest.approx(1 + 0.8 + 0.64, rel=END)
    assert ProposalShape(3, (3, 2)).nodes == 3 + 6 + 6


def test_depths_that_were_replayed_apart_are_used_apart() -> None:
    shallow = made_positions([0.9] * LONG)
    by_depth = replace(shallow, reach=np.concatenate([shallow.reach, shallow.reach / 3], axis=1))
    assert expected_rounds([by_depth], ProposalShape(2)).tokens == pytest.approx(1 + 0.9 + 0.9 * 0.3, rel=END)
    with pytest.raises(InvalidInput, match="at most 2"):
        expected_rounds([by_depth], ProposalShape(3))


def test_outcomes_are_hit_by_rank() -> None:
    """A mismatch is drafted for where one of the next 4 ranks is right, a whole proposal where one of the first 4."""
    ranks = [0.8, 0.85, 0.9, 0.95]  # of 2, 3, 4 and 5
    found = expected_rounds([made_positions([0.6] * 200, *ranks)], ProposalShape(1))
    assert FAN_OUT == 4
    assert found.hits == pytest.approx((0.95 - 0.6) + 0.6 * 0.9, rel=0.01)


def test_rounds_without_a_match_propose_nothing() -> None:
    drafter = made_positions([0.0] * 20, offered=0)
    found = expected_rounds([drafter], ProposalShape(4))
    assert found.tokens == 1 and found.nodes == 0
    assert dict(found.proposed) == pytest.approx({0: 1.0})


def test_a_better_drafter_is_scaled_and_texts_differ() -> None:
    texts = [made_positions([chance] * 40) for chance in (0.2, 0.4, 0.9)]
    one = ProposalShape(1)
    assert expected_rounds(texts, one, scale=0.5).tokens < expected_rounds(texts, one).tokens
    assert expected_rounds(texts, one, scale=9.0).tokens == pytest.approx(2)
    assert 0.05 < expected_rounds(texts, one).error < 0.3
    assert np.isnan(expected_rounds(texts[:1], one).error), "one text does not tell how others differ"
    assert expected_rounds([made_positions([1.0] * 40)] * 3, one).error == 0


def test_shapes_are_read_and_wrong_ones_named() -> None:
    assert ProposalShape.parse("4") == ProposalShape(4)
    assert ProposalShape.parse("4:3-2") == ProposalShape(4, (3, 2))
    for text, named in (
        ("four", "DEPTH:WIDTH"),
        ("4:9", "in"),
        ("70", "at most|in"),
        ("3:8-8", "nodes"),
        ("1:2-2", "widths"),
    ):
        with pytest.raises(InvalidInput, match=named):
            ProposalShape.parse(text)


def test_every_length_is_judged_on_all_texts_however_short() -> None:
    """Texts of 1, 2 and 3 sure tokens take 1, 1 and 2 rounds of k = 1, and one each of k = 8: nobody is left out."""
    texts = [made_positions([1.0] * length) for length in (1, 2, 3)]
    assert expected_rounds(texts, ProposalShape(1)).tokens == pytest.approx(6 / 4)
    long = expected_rounds(texts, ProposalShape(8))
    assert long.tokens == pytest.approx(6 / 3)
    assert long.survival[:4] == pytest.approx((1, 2 / 3, 1 / 3, 0))
    assert long.hits == 0, "no round comes behind them"
    assert long.nodes == 8, "an end cuts accepted tokens, not offered ones"
    with pytest.raises(InvalidInput, match="positions"):
        expected_rounds([made_positions([])], ProposalShape(1))


def test_rounds_are_those_of_a_drawn_replay() -> None:
    chances = np.random.default_rng(4).random(11)
    coins = np.random.default_rng(5).random((20_000, chances.size)) < chances
    rounds = 0
    for right in coins:
        at = 0
        while at < right.size:
            rounds += 1
            at += 1 + next((depth for depth in range(4) if at + depth >= right.size or not right[at + depth]), 4)
    found = expected_rounds([made_positions(chances.tolist())], ProposalShape(4))
    assert found.tokens == pytest.approx(coins.size / rounds, rel=0.01)
