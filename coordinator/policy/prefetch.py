"""Prefetches proposals to the target for possible outcomes of the round in flight.

If the round has one of these outcomes, the target starts the next round as soon as
it has drawn the verdict, and the hit costs no round trip. A proposal can't grow any
more once its round has started. So one that still grows leaves as late as possible,
and the others leave early.
"""

from __future__ import annotations

import asyncio

from coordinator.policy.drafting import Drafting, PrefetchCandidate
from coordinator.sessions.target import TargetSession
from paceline.protocol.proposal import Outcome
from paceline.protocol.target import Round
from paceline.runtime import clock

MAX_PREFETCHED_NODES = 56
"""Most nodes that are sent for one round's outcomes, including repeated ones: this bounds the bytes."""
LAST_MS = 2.0
"""A proposal that still grows leaves this long before it would be too late."""
EARLY_SHARE = 0.1
"""A proposal that has stopped growing leaves earlier, by this share of the time until the verdict."""


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
        self._sent_nodes: dict[Outcome, int] = {}
        self._nodes_left = 0
        drafting.on_prepared(self._on_prepared)

    def watch(self, round_: Round) -> None:
        """Prefetch for a round in flight; the continuation of an n-gram match leaves at once."""
        self.end()
        self._most = min(self._drafting.max_prefetched(round_), self._target.max_prefetched)
        if not self._most:
            return
        self._round, self._sent_nodes, self._nodes_left = round_, {}, MAX_PREFETCHED_NODES
        if self._drafting.drafts_outcomes:
            self._wait_for_outcomes(round_)
        if self._drafting.copies(round_):
            self._prefetch()

    def end(self) -> None:
        """End the prefetching for a round that is answered."""
        self._round = None
        self._open = self._is_last = False
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def _wait_for_outcomes(self, round_: Round) -> None:
        loop = asyncio.get_running_loop()
        since_verdict_ms = (clock.now() - self._target.verdict_at) * 1e3
        due_s = max(0.0, self._drafting.verdict_due_ms(round_, since_verdict_ms) / 1e3)
        last_s = due_s - LAST_MS / 1e3
        self._timers = [
            loop.call_later(last_s - EARLY_SHARE * due_s, self._begin, False),
            loop.call_later(last_s, self._begin, True),
        ]

    def _begin(self, is_last: bool) -> None:
        """Send proposals from now on as they come; those that still grow only after the last call.

        They leave even when they are expected to be too late: a step may take longer, and under load a round may wait
        for its step.
        """
        self._open, self._is_last = True, is_last
        self._prefetch()

    def _on_prepared(self) -> None:
        """Schedule the sending of a proposal that came, together with those that come with it."""
        if self._timers and self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._prefetch_what_came)

    def _prefetch_what_came(self) -> None:
        self._soon = None
        if self._open:
            self._prefetch()

    def _prefetch(self) -> None:
        if self._round is None:
            return
        proposals = {
            candidate.outcome: candidate.proposal
            for candidate in self._drafting.prefetch_candidates(self._round)
            if (self._is_last or not candidate.grows) and self._takes(candidate)
        }
        if proposals:
            self._target.prefetch(self._round, proposals)

    def _takes(self, candidate: PrefetchCandidate) -> bool:
        """Whether to send a candidate; if so its nodes are counted."""
        old_nodes = self._sent_nodes.get(candidate.outcome, 0)
        nodes = len(candidate.proposal)
        # Half of the nodes are reserved for proposals that have grown and are sent again.
        room = self._nodes_left - (MAX_PREFETCHED_NODES // 2 if candidate.grows and not old_nodes else 0)
        full = not old_nodes and len(self._sent_nodes) >= self._most
        if full or nodes <= old_nodes or nodes > room:
            return False
        self._sent_nodes[candidate.outcome] = nodes
        self._nodes_left -= nodes
        return True
