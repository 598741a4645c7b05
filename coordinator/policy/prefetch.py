"""Leaves proposals with the target for outcomes that the round in flight may have.

If the round has one of them, the target starts the next round as soon as it has
drawn the verdict, and the hit costs no round trip. A proposal can't grow any more
once its round has started: one that still grows leaves as late as possible, the
others in good time.
"""

from __future__ import annotations

import asyncio
import time

from coordinator.policy.drafting import Drafting, Prefetched
from coordinator.sessions.target import TargetSession
from paceline.protocol.proposal import Outcome
from paceline.protocol.target import Round

MAX_PREFETCHED_NODES = 56
"""Most nodes that are sent for one round's outcomes, with those that are sent again: this bounds the bytes."""
LAST_MS = 2.0
"""What still grows leaves this long before it would be too late."""
EARLY_SHARE = 0.1
"""What doesn't grow any more leaves earlier, by this share of the time until the verdict."""


class Prefetching:
    """Prefetches for one request's rounds, one at a time."""

    def __init__(self, target: TargetSession, drafting: Drafting) -> None:
        self._target = target
        self._drafting = drafting
        self._most = 0
        self._round: Round | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._soon: asyncio.Handle | None = None
        self._open = self._is_last = False
        self._sent: dict[Outcome, int] = {}
        self._nodes_left = 0
        drafting.on_prepared(self._prepared)

    def watch(self, round_: Round) -> None:
        """A round is in flight; what follows an n-gram match leaves at once."""
        self.end()
        self._most = min(self._drafting.max_prefetched(round_), self._target.max_prefetched)
        if not self._most:
            return
        self._round, self._sent, self._nodes_left = round_, {}, MAX_PREFETCHED_NODES
        if self._drafting.drafts_outcomes:
            self._wait_for_outcomes(round_)
        if self._drafting.copies(round_):
            self._prefetch()

    def end(self) -> None:
        """The round is answered."""
        self._round = None
        self._open = self._is_last = False
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def _wait_for_outcomes(self, round_: Round) -> None:
        loop = asyncio.get_running_loop()
        since_verdict_ms = (time.perf_counter() - self._target.verdict_at) * 1e3
        due_s = max(0.0, self._drafting.verdict_due_ms(round_, since_verdict_ms) / 1e3)
        last_s = due_s - LAST_MS / 1e3
        self._timers = [
            loop.call_later(last_s - EARLY_SHARE * due_s, self._begin, False),
            loop.call_later(last_s, self._begin, True),
        ]

    def _begin(self, is_last: bool) -> None:
        """From now on proposals leave as they come; those that still grow only from the last call on.

        They leave even when they should be too late: steps take longer now and then, and under load a round may wait
        for its step.
        """
        self._open, self._is_last = True, is_last
        self._prefetch()

    def _prepared(self) -> None:
        """A proposal came; those that come with it leave together with it."""
        if self._timers and self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._prefetch_what_came)

    def _prefetch_what_came(self) -> None:
        self._soon = None
        if self._open:
            self._prefetch()

    def _prefetch(self) -> None:
        if self._round is None:
            return
        chosen = {
            prefetched.outcome: prefetched.proposal
            for prefetched in self._drafting.prefetched(self._round)
            if (self._is_last or not prefetched.grows) and self._takes(prefetched)
        }
        if chosen:
            self._target.prefetch(self._round, chosen)

    def _takes(self, prefetched: Prefetched) -> bool:
        """Whether to send it; if so it is counted."""
        before = self._sent.get(prefetched.outcome, 0)
        nodes = len(prefetched.proposal)
        # Half of the nodes are kept for proposals that are sent again, having grown.
        room = self._nodes_left - (MAX_PREFETCHED_NODES // 2 if prefetched.grows and not before else 0)
        full = not before and len(self._sent) >= self._most
        if full or nodes <= before or nodes > room:
            return False
        self._sent[prefetched.outcome] = nodes
        self._nodes_left -= nodes
        return True
