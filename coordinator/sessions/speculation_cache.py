"""Proposals by the outcome that they answer, one round deep.

A key is exact: base length, accepted node and next token of the round that
ends. Committing drops everything that answers another outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from paceline.protocol.proposal import Outcome

MAX_ENTRIES = 256
Entry = TypeVar("Entry")


class SpeculationCache(Generic[Entry]):
    """Bounded; when it is full the newest proposals are dropped, since the likeliest come first."""

    def __init__(self) -> None:
        self._entries: dict[Outcome | None, Entry] = {}
        self._wanted: Outcome | None = None
        self._base_length = -1

    def expect(self, outcome: Outcome | None) -> None:
        """The outcome is known: keep only its proposal, if it is there."""
        self._wanted = outcome
        self._base_length = -1 if outcome is None else outcome.base_length
        entry = self._entries.get(outcome)
        self._entries = {} if entry is None else {outcome: entry}

    def get(self, outcome: Outcome | None) -> Entry | None:
        """What is stored for an outcome; it stays."""
        return self._entries.get(outcome)

    def put(self, outcome: Outcome | None, entry: Entry) -> bool:
        """Store a proposal, in place of a shorter one for the same outcome; returns whether it is the one waited for.

        Proposals for rounds before the expected outcome are stale and dropped.
        """
        stale = outcome != self._wanted and (outcome is None or outcome.base_length <= self._base_length)
        full = len(self._entries) >= MAX_ENTRIES and outcome not in self._entries
        if stale or full:
            return False
        self._entries[outcome] = entry
        return outcome == self._wanted

    def prepared(self, base_length: int) -> Iterator[tuple[Outcome, Entry]]:
        """The proposals for outcomes of a round, in the order in which they began to come: the likeliest first.

        It ends where they are dropped meanwhile.
        """
        for outcome, entry in [*self._entries.items()]:
            if outcome is not None and outcome.base_length == base_length and outcome in self._entries:
                yield outcome, entry

    def clear(self) -> None:
        """Drop every proposal."""
        self._entries = {}

    def take(self) -> Entry | None:
        """The proposal for the expected outcome, if it is there."""
        return self._entries.pop(self._wanted, None)
