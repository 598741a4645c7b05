"""The one bound on being wrong: a request's account of time against target-only. Pure."""

from __future__ import annotations

ALLOWED_SHARE = 0.03
"""Most of a request's time that drafting may cost beyond target-only: what users are promised at worst."""
ALLOWED_TOKENS = (2.0, 4.0)
"""Target-only tokens that it may cost in any case, since nothing can be tried for less than a round or two; and what
may be lost early, on the credit of the share of tokens that are still to come: 4 are the share of a text of 128."""


class Account:
    """What drafting has cost so far, in milliseconds; below 0 it has gained.

    Target-only's time for what was written is known: that of the steps that ran, with one row of this request.
    A gain is banked up to what may be lost: more would only pay for a drafter that has turned useless.
    """

    def __init__(self) -> None:
        self.over_ms = 0.0
        self._elapsed_ms = 0.0
        self._token_ms = 0.0
        self._room = 0

    @property
    def limit_ms(self) -> float:
        """Most that it may be."""
        return max(self._floor_ms, ALLOWED_SHARE * self._elapsed_ms)

    @property
    def left_ms(self) -> float:
        """What may still be lost."""
        return self.limit_ms - self.over_ms

    def expect(self, room: int, token_ms: float) -> None:
        """So many tokens may still come, and a target-only one would take so long now."""
        self._room, self._token_ms = room, token_ms

    def add(self, round_ms: float, committed: int, token_ms: float) -> None:
        """Count a round that drafted, or was sent in order to.

        `token_ms` is what a target-only token would have taken in its step.
        """
        self.pass_by(round_ms, token_ms)
        self.over_ms = max(self.over_ms + round_ms - committed * token_ms, -self.limit_ms)

    def pass_by(self, round_ms: float, token_ms: float) -> None:
        """Count a round that drafted nothing: it can't owe its slowness to drafting."""
        self._elapsed_ms += round_ms
        self._token_ms = token_ms

    def rounds_until(self, cost_ms: float) -> int:
        """Target-only rounds before so much may be lost again; 0: now."""
        missing = self.over_ms + cost_ms - self.limit_ms
        if missing <= 0 or not self._token_ms:
            return 0
        floor_ms = max(0.0, self._floor_ms - ALLOWED_SHARE * self._elapsed_ms)
        return int((missing + floor_ms) / (ALLOWED_SHARE * self._token_ms)) + 1

    @property
    def _floor_ms(self) -> float:
        least, most = (tokens * self._token_ms for tokens in ALLOWED_TOKENS)
        return max(least, min(most, ALLOWED_SHARE * (self._elapsed_ms + self._room * self._token_ms)))
