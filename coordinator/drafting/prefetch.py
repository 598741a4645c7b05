"""Prefetches proposals to the target for possible outcomes of the round in flight.

If the round has one of these outcomes, the target starts the next round as soon as
it has drawn the verdict, and the hit costs no round trip. A proposal can't grow any
more once its round has started. So one that still grows leaves as late as possible,
and the others leave early.
"""

from __future__ import annotations

import asyncio

from coordinator.drafting.drafting import Drafting
from coordinator.drafting.outcomes import OutcomeProposals, PrefetchCandidate
from coordinator.sessions.target import TargetSession
from paceline.protocol.proposal import Outcome
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
        self._proposals: OutcomeProposals | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._soon: asyncio.Handle | None = None
        self._open = self._is_last = False
        self._sent_nodes: dict[Outcome, int] = {}
        self._nodes_left = 0
        drafting.on_prepared(self._on_prepared)

    def watch(self, proposals: OutcomeProposals | None) -> None:
        """Prefetch for a round in flight; None: there is nothing. A match's continuation leaves at once."""
        self.end()
        if proposals is None or not self._target.max_prefetched:
            return
        self._proposals, self._sent_nodes, self._nodes_left = proposals, {}, MAX_PREFETCHED_NODES
        if proposals.drafts_ahead:
            self._wait_for_outcomes(proposals)
        if proposals.copies:
            self._prefetch()

    def end(self) -> None:
        """End the prefetching for a round that is answered."""
        self._proposals = None
        self._open = self._is_last = False
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def _wait_for_outcomes(self, proposals: OutcomeProposals) -> None:
        loop = asyncio.get_running_loop()
        since_verdict_ms = (clock.now() - self._target.verdict_at) * 1e3
        due_s = max(0.0, proposals.due_ms(since_verdict_ms) / 1e3)
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
        if self._proposals is None:
            return
        leaving = {
            candidate.outcome: candidate.proposal
            for candidate in self._proposals.candidates(growing=self._is_last)
            if self._takes(candidate, self._proposals.most)
        }
        if leaving and self._proposals is not None:
            self._target.prefetch(self._proposals.round_, leaving)

    def _takes(self, candidate: PrefetchCandidate, most: int) -> bool:
        """Whether to send a candidate; if so its nodes are counted."""
        old_nodes = self._sent_nodes.get(candidate.outcome, 0)
        nodes = len(candidate.proposal)
        # Half of the nodes are reserved for proposals that have grown and are sent again.
        room = self._nodes_left - (MAX_PREFETCHED_NODES // 2 if candidate.grows and not old_nodes else 0)
        full = not old_nodes and len(self._sent_nodes) >= min(most, self._target.max_prefetched)
        if full or nodes <= old_nodes or nodes > room:
            return False
        self._sent_nodes[candidate.outcome] = nodes
        self._nodes_left -= nodes
        return True
