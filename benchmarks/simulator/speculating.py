"""What a simulated session's draft prepares for the outcomes of the round under verification, most probable first.

Rows are computed in the order of the service's own rule (`draft_service/drafters/speculation.py`): a node is worth
the product of chances along its path, and less if its proposal has a token already. Every outcome's rows are
counted; what they bring matters for the one that comes true alone. Behind a wrong token the draft is taken to be
as sure as behind the right one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from draft_service.drafters.speculation import DEEPER, WORTHLESS

VERIFIED = -1
"""In place of a rank: the row of a node that is under verification."""


class OutcomeDrafting:
    """One round's outcomes: `k` tokens proposed at `base`, of which `accepted` will be.

    Args:
        base: position of the round's first token.
        k: tokens proposed; 0: the round is target-only.
        own: whether the draft proposed them itself, so that its first choice is among them.
        known: rows of the round's nodes that are computed already.
        accepted, rank: the outcome that will come true, and the next token's rank behind it.
        fan_out, depth: outcomes for each node, and tokens of each outcome's proposal.
        chances: the draft's probability of its first choice, by position.
        chance: chance of a rank by that probability.
    """

    __slots__ = (
        "_above",
        "_accepted",
        "_chance",
        "_chances",
        "_depth",
        "_fan_out",
        "_k",
        "_orders",
        "_own",
        "_queue",
        "_rank",
        "_taken",
        "_verified",
        "base",
        "grown",
    )  # fmt: skip

    def __init__(
        self,
        base: int,
        k: int,
        own: bool,
        known: int,
        accepted: int,
        rank: int,
        fan_out: int,
        depth: int,
        chances: Sequence[float],
        chance: Callable[[float, int], float],
    ) -> None:
        self.base, self._k, self._own = base, k, own
        self._accepted, self._rank = accepted, rank
        self._fan_out, self._depth = fan_out, depth
        self._chances, self._chance = chances, chance
        self._queue: list[tuple[float, int, int, int, int, float]] = []
        self._taken: list[tuple[float, int, int, int, int, float]] = []
        self._orders = 0
        self._verified = known
        self.grown: list[float] = []
        """When each token of the true outcome's proposal was drafted."""
        self._above = [1.0]
        for place in range(base, base + k):
            self._above.append(self._above[-1] * self._first(place))
        for node in range(min(known, k) + 1):
            self._expand(node)
        for node in range(known + 1, k + 1):
            self._push(self._above[node], node, VERIFIED, 0, 0.0)

    @property
    def best(self) -> float:
        """Worth of the row that comes next; 0: there is none."""
        return -self._queue[0][0] if self._queue else 0.0

    @property
    def has_taken(self) -> bool:
        """Whether the step that runs, or begins, has a row of it."""
        return bool(self._taken)

    def take(self) -> None:
        """The next row is computed in this step."""
        self._taken.append(heapq.heappop(self._queue))

    def absorb(self, now: float) -> None:
        """The rows that were taken are computed."""
        taken, self._taken = self._taken, []
        for _worth, _, node, rank, length, floor in taken:
            if rank == VERIFIED:
                self._verified += 1
                self._expand(node)
                continue
            if node == self._accepted and rank == self._rank:
                self.grown.append(now)
            length += 1
            if length < self._depth:
                floor *= self._first(self.base + node + length)
                if DEEPER * floor >= WORTHLESS:
                    self._push(DEEPER * floor, node, rank, length, floor)

    def true_rows(self, ranks: Sequence[int]) -> int:
        """Tokens of the answer whose rows are computed, now that the round has its outcome."""
        rows = self.base + min(self._accepted, self._verified)
        if self._verified < self._accepted or not self.grown:
            return rows
        rows += 1
        for _ in self.grown[1:]:
            if rows >= len(ranks) or ranks[rows] != 1:
                break
            rows += 1
        return rows

    def drafted_behind(self, committed: int) -> int:
        """Tokens that were drafted for the outcome behind so many committed ones, right or not."""
        return len(self.grown) if committed == self.base + self._accepted + 1 else 0

    def _expand(self, node: int) -> None:
        """List the outcomes behind a verified node whose row is computed."""
        place = self.base + node
        if place >= len(self._chances):
            return
        best, above = self._chances[place], self._above[node]
        first = 2 if self._own and node < self._k else 1
        for rank in range(first, first + self._fan_out):
            weight = above * self._chance(best, rank)
            if weight >= WORTHLESS:
                self._push(weight, node, rank, 0, weight)

    def _push(self, worth: float, node: int, rank: int, length: int, floor: float) -> None:
        self._orders += 1
        heapq.heappush(self._queue, (-worth, self._orders, node, rank, length, floor))

    def _first(self, place: int) -> float:
        """Chance of the first choice at a position."""
        return self._chance(self._chances[place], 1) if place < len(self._chances) else 0.0
