"""The expected accepted tokens of a drafted tree, by its nodes and by the steps that it takes. Pure.

The draft service adds the likeliest candidate of a tree with each step, and with the last step all that may still be
added (`DraftBudget.max_nodes` beyond `max_tokens`). Here the same tree grows on averages: by depth for a node's best
child, by rank for the others. A test holds it to the trees that the draft service grows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from paceline.costs.acceptance import MAX_RANK
from paceline.costs.running_mean import MEMORY

MOST_LAST = MAX_RANK
"""Most nodes that are considered for the last step: all of them may hang from one node."""
_STEPS = round(MEMORY)
"""Chances are rounded to so many steps, so that fewer different trees are grown. No mean tells finer ones apart."""
SMALLEST_CHANCE = 1 / MEMORY
"""Nodes that are reached more rarely than any mean can tell from never are not considered."""


def expected_of_trees(by_depth: Sequence[float], by_rank: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Expected accepted tokens of a tree made in d steps that ends with m nodes of the last: [d - 1][m - 1].

    Args:
        by_depth: chance of a best child at depth 1, 2, …, given that its parent is accepted; as many as steps.
        by_rank: chance of a second child, a third, …, given that its parent is accepted and none before it;
            empty: chains only, m is 1.
    """
    return _grow(_round(by_depth), _round(by_rank))


def _round(chances: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(each * _STEPS) for each in chances)


class _Candidate(NamedTuple):
    """A node that may be added; `rest`: chance that its parent is accepted and no better child of it."""

    negative_chance: float
    depth: int
    rank: int
    rest: float


@lru_cache(maxsize=4096)
def _grow(by_depth: tuple[int, ...], by_rank: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    def child(depth: int, parent: float) -> _Candidate:
        return _Candidate(-parent * by_depth[depth - 1] / _STEPS, depth, 1, parent)

    def take(candidates: list[_Candidate]) -> _Candidate:
        """Remove and return the likeliest candidate; its next sibling, which is no likelier, becomes one."""
        node = heapq.heappop(candidates)
        if node.rank <= len(by_rank):
            rest = node.rest + node.negative_chance
            chance = max(node.negative_chance, -rest * by_rank[node.rank - 1] / _STEPS)
            _offer(candidates, _Candidate(chance, node.depth, node.rank + 1, rest))
        return node

    candidates = [child(1, 1.0)]
    expected_tokens: list[tuple[float, ...]] = []
    total = 0.0
    while candidates and len(expected_tokens) < len(by_depth):
        last, sums = [*candidates], [total]
        while last and len(sums) <= (MOST_LAST if by_rank else 1):
            sums.append(sums[-1] - take(last).negative_chance)
        expected_tokens.append(tuple(sums[1:]))
        node = take(candidates)
        total -= node.negative_chance
        if node.depth < len(by_depth):
            _offer(candidates, child(node.depth + 1, -node.negative_chance))
    return tuple(expected_tokens)


def _offer(candidates: list[_Candidate], node: _Candidate) -> None:
    if -node.negative_chance >= SMALLEST_CHANCE:
        heapq.heappush(candidates, node)
