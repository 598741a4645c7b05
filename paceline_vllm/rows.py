"""Which request is in which row of vLLM's batch, told by the rows' own tokens: a proposer gets no ids. Pure.

Requests of the same tokens may change places, which makes no difference. A request that is taken for another one
costs its drafts alone: vLLM verifies every one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

QUICK_TOKENS = 256
"""Latest tokens that are compared where a request is expected; elsewhere all are."""
MOST_ABSENT = 16
"""Steps without a request after which it has ended. One that waits for room in a step comes back sooner."""

Tokens = NDArray[np.int32]
Request = TypeVar("Request")


@dataclass(eq=False)
class TrackedRow(Generic[Request]):
    """A request, its tokens when it was seen last, and the steps since then."""

    request: Request
    tokens: Tokens
    absent: int = 0

    def began(self, tokens: Tokens, most: int) -> bool:
        """Whether a row's tokens begin with these; of these the latest `most` are compared."""
        length = len(self.tokens)
        first = max(0, length - most)
        return length <= len(tokens) and bool(np.array_equal(self.tokens[first:], tokens[first:length]))


@dataclass
class RowTracker(Generic[Request]):
    """Follows requests through steps. A step asks `find` for all rows, then tells `place` who is in them."""

    _places: list[TrackedRow[Request]] = field(default_factory=list)
    _absent: list[TrackedRow[Request]] = field(default_factory=list)

    def find(self, rows: Sequence[Tokens]) -> list[TrackedRow[Request] | None]:
        """The request of each row, as it was seen last; None: it is new."""
        in_place = [
            each if each.began(tokens, QUICK_TOKENS) else None
            for each, tokens in zip(self._places, rows, strict=False)
        ]
        matches: list[TrackedRow[Request] | None] = [*in_place, *[None] * (len(rows) - len(in_place))]
        in_row = {id(each) for each in in_place}
        others = [each for each in (*self._places, *self._absent) if id(each) not in in_row]
        for place, tokens in enumerate(rows):
            if matches[place] is None:
                longest = max(
                    (each for each in others if each.began(tokens, len(tokens))),
                    key=lambda each: len(each.tokens),
                    default=None,
                )
                if longest is not None:
                    matches[place] = longest
                    others.remove(longest)
        return matches

    def place(self, rows: Sequence[tuple[Request, Tokens]]) -> list[Request]:
        """Note who is in each row now, with a copy of the tokens; returns the requests that have ended."""
        present = {id(request) for request, _ in rows}
        self._absent = [each for each in (*self._places, *self._absent) if id(each.request) not in present]
        for each in self._absent:
            each.absent += 1
        gone = [each.request for each in self._absent if each.absent > MOST_ABSENT]
        self._absent = [each for each in self._absent if each.absent <= MOST_ABSENT]
        self._places = [TrackedRow(request, tokens.copy()) for request, tokens in rows]
        return gone
