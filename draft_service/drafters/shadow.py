"""The shadow of a session's committed tokens: how each stood in the drafter's own order, as far as its row is known.

A drafter that reads the target's features says how a proposal would have begun at each position: its rows deeper in a
proposal read its own, and are right less often.

A position is known once the row before it is computed with logits: for a proposal, for an outcome, or because the
coordinator asked for the shadow. Each is said once, in order; rows that were computed without logits are passed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.protocol.draft import MAX_SHADOW_TOKENS


class Standing(NamedTuple):
    """A token's rank in the drafter's order, 0 if it is not in it, and the probability that is said with it."""

    rank: int
    probability: float


@dataclass(frozen=True)
class ShadowRun:
    """The standings of neighbouring positions, from `first_position` on."""

    first_position: int
    standings: tuple[Standing, ...]


@dataclass
class ShadowLog:
    """What is known and not said yet; `wanted_from` is the first row to compute with logits for it, None: none is."""

    wanted_from: int | None = None
    _standings: dict[int, Standing] = field(default_factory=dict)

    def commit(self, first_row: int, *, wanted: bool) -> None:
        """Tokens were committed whose first one follows the row at `first_row`; `wanted`: their shadow was asked for.

        What was wanted before and is not computed yet is given up where the new tokens' shadow is not wanted.
        """
        if not wanted:
            self.wanted_from = None
        elif self.wanted_from is None:
            self.wanted_from = first_row

    def add(self, position: int, standing: Standing) -> None:
        """The token at a position, which is behind all those added before."""
        self._standings[position] = standing

    def take(self) -> list[ShadowRun]:
        """All that was added since the last call."""
        runs: list[ShadowRun] = []
        known, self._standings = self._standings, {}
        while known:
            first = end = next(iter(known))
            standings: list[Standing] = []
            while end in known and len(standings) < MAX_SHADOW_TOKENS:
                standings.append(known.pop(end))
                end += 1
            runs.append(ShadowRun(first, tuple(standings)))
        return runs
