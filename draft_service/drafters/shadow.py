"""The shadow of a session's committed tokens: the rank of each in the drafter's own order, where its row is computed.

The shadow of a drafter that reads the target's features tells how a proposal would have begun at each position. Rows
deeper in a proposal read the drafter's own features, and are right less often.

A position is known once the row before it is computed with logits: for a proposal, for an outcome, or because the
coordinator asked for the shadow. Each is reported once, in order; rows without logits are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.protocol.draft import MAX_SHADOW_TOKENS


class Standing(NamedTuple):
    """A token's rank in the drafter's order, 0 if it is not in it, and the probability that is reported with it."""

    rank: int
    probability: float


@dataclass(frozen=True)
class ShadowRun:
    """The standings of neighbouring positions, from `first_position` on."""

    first_position: int
    standings: tuple[Standing, ...]


@dataclass
class ShadowLog:
    """Standings that are not reported yet; `start_row`: first row that needs logits for them, or None."""

    start_row: int | None = None
    _standings: dict[int, Standing] = field(default_factory=dict)

    def commit(self, first_row: int, *, is_asked: bool) -> None:
        """Note committed tokens, the first of which follows the row at `first_row`.

        `is_asked` says whether their shadow was asked for. If not, earlier rows that are still missing are given up.
        """
        if not is_asked:
            self.start_row = None
        elif self.start_row is None:
            self.start_row = first_row

    def add(self, position: int, standing: Standing) -> None:
        """Add the standing of the token at a position, which is after all earlier ones."""
        self._standings[position] = standing

    def take(self) -> list[ShadowRun]:
        """Remove and return the standings that were added since the last call."""
        runs: list[ShadowRun] = []
        entries, self._standings = self._standings, {}
        while entries:
            first = end = next(iter(entries))
            standings: list[Standing] = []
            while end in entries and len(standings) < MAX_SHADOW_TOKENS:
                standings.append(entries.pop(end))
                end += 1
            runs.append(ShadowRun(first, tuple(standings)))
        return runs
