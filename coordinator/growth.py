"""What a drafted tree is expected to bring, by how wide and how deep it grows. Pure.

The draft service adds the likeliest candidates of a tree, so many at a time (`DraftBudget.max_nodes` over
`max_tokens`), each time from one more step. Here the same tree grows on averages: by depth for a node's best child,
by rank for the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

WIDTHS = (1, 2, 3, 4, 5)
"""Nodes of a level that are looked at."""
MOST_NODES = 24
"""Of a tree."""
SMALLEST_CHANCE = 0.02
"""Nodes that are reached more rarely are not looked at."""
_STEPS = 50
"""Chances are told apart by a fiftieth, so that few trees are ever grown."""


def expected_by_level(
    by_depth: Sequence[float], by_rank: Sequence[float], width: int, depth: int
) -> tuple[float, ...]:
    """Expected accepted tokens of a tree after one level, two, …, each of `width` nodes.

    Args:
        by_depth: chance of a best child at depth 1, 2, …, given that its parent is accepted.
        by_rank: chance of a second child, a third, …, given that its parent is accepted and none before it.
        width: nodes of a level; 1 makes a chain.
        depth: most levels.
    """
    levels = min(depth, MOST_NODES // width)
    return _grown(_rounded(by_depth[:levels]), _rounded(by_rank if width > 1 else ()), width)


def _rounded(chances: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(each * _STEPS) for each in chances)


class _Candidate(NamedTuple):
    """A node that may be added; `left`: how likely its parent is accepted and no better child."""

    negative_chance: float
    depth: int
    rank: int
    left: float


@lru_cache(maxsize=4096)
def _grown(by_depth: tuple[int, ...], by_rank: tuple[int, ...], width: int) -> tuple[float, ...]:
    def child(depth: int, parent: float) -> _Candidate:
        return _Candidate(-parent * by_depth[depth - 1] / _STEPS, depth, 1, parent)

    def sibling(of: _Candidate) -> _Candidate:
        """The next child: no likelier than the one before it."""
        left = of.left + of.negative_chance
        return _Candidate(max(of.negative_chance, -left * by_rank[of.rank - 1] / _STEPS), of.depth, of.rank + 1, left)

    candidates = [child(1, 1.0)]
    expected: list[float] = []
    for _ in by_depth:
        level: list[_Candidate] = []
        while candidates and len(level) < width:
            level.append(heapq.heappop(candidates))
            if level[-1].rank <= len(by_rank):
                _offer(candidates, sibling(level[-1]))
        if not level:
            break
        expected.append(sum(expected[-1:]) - sum(node.negative_chance for node in level))
        for node in level:
            if node.depth < len(by_depth):
                _offer(candidates, child(node.depth + 1, -node.negative_chance))
    return tuple(expected)


def _offer(candidates: list[_Candidate], node: _Candidate) -> None:
    if -node.negative_chance >= SMALLEST_CHANCE:
        heapq.heappush(candidates, node)
