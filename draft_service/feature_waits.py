"""Work that waits for the features that it reads: those of all committed tokens but the last.

Features follow the verdict by one message. Without them a proposal would be drafted on the drafter's own features and
be worse. So work waits, but never for long, and not at all where the last wait was in vain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from draft_service.session import DraftingSession
from paceline.runtime import clock

ROUND_PATIENCE_S = 0.25
"""Longest wait after a commit. Chosen, not tuned: ten times what a full message of features takes at 100 Mbit/s."""
PROMPT_PATIENCE_S = 10.0
"""Longest wait for a session's first features. The target computes the prompt meanwhile, and no round begins."""


@dataclass(frozen=True)
class _Wait:
    begin: Callable[[], None]
    is_draft: bool
    timer: asyncio.TimerHandle


class FeatureWaits:
    """The waiting work of sessions, one piece each. It lives on the event loop."""

    def __init__(self) -> None:
        self._waits: dict[DraftingSession, _Wait] = {}

    @property
    def drafts(self) -> int:
        """The number of proposals that wait."""
        return sum(wait.is_draft for wait in self._waits.values())

    def hold(
        self, session: DraftingSession, begin: Callable[[], None], deadline: float | None, *, draft: bool
    ) -> None:
        """Call `begin` once the session's features are there, its patience is over, or at `deadline` (monotonic)."""
        if not session.lacks_features or session.features_late:
            begin()
            return
        patience = ROUND_PATIENCE_S if session.features_end else PROMPT_PATIENCE_S
        if deadline is not None:
            patience = min(patience, deadline - clock.now())
        timer = asyncio.get_running_loop().call_later(max(patience, 0.0), self._give_up, session)
        self._waits[session] = _Wait(begin, draft, timer)

    def note_arrival(self, session: DraftingSession) -> None:
        """Begin the work of a session whose features have come, if they are all there."""
        if not session.lacks_features:
            self._begin(session)

    def drop(self, session: DraftingSession, *, drafts_only: bool = False) -> None:
        """Drop the work of a session; with `drafts_only`, only a proposal."""
        wait = self._waits.get(session)
        if wait is not None and (wait.is_draft or not drafts_only):
            wait.timer.cancel()
            del self._waits[session]

    def _give_up(self, session: DraftingSession) -> None:
        session.features_late = True
        self._begin(session)

    def _begin(self, session: DraftingSession) -> None:
        wait = self._waits.pop(session, None)
        if wait is not None:
            wait.timer.cancel()
            wait.begin()
