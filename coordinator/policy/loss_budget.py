"""The one bound on being wrong: a request's loss of time against target-only. Pure."""

from __future__ import annotations

from paceline.costs.service_costs import LEAST_MOVE

ALLOWED_SHARE = LEAST_MOVE
"""Largest share of a request's time that drafting may cost: the worst case that users are promised."""
ALLOWED_TOKENS = (2.0, 4.0)
"""Losses that are allowed in any case, in target-only tokens. The first always is: a trial costs a round or two.
The second is the most that is allowed early, as the share of the tokens to come: 4 are the share of 128 tokens."""


class LossBudget:
    """The loss of a request by drafting so far, in milliseconds; below 0 it is a gain.

    The time of target-only for the same tokens is known from the steps that ran, with one row of this request. A gain
    counts up to the limit only: more of it would only pay for a drafter that has become useless.
    """

    def __init__(self) -> None:
        self.loss_ms = 0.0
        self._elapsed_ms = 0.0
        self._token_ms = 0.0
        self._room = 0

    @property
    def limit_ms(self) -> float:
        """The largest allowed loss."""
        return max(self._floor_ms, ALLOWED_SHARE * self._elapsed_ms)

    @property
    def left_ms(self) -> float:
        """The loss that is still allowed."""
        return self.limit_ms - self.loss_ms

    def expect(self, room: int, token_ms: float) -> None:
        """Note how many tokens may still come, and the time of a target-only one now."""
        self._room, self._token_ms = room, token_ms

    def add(self, round_ms: float, committed: int, token_ms: float) -> None:
        """Count a round that drafted, or was sent in order to draft.

        `token_ms` is the time of a target-only token in its step.
        """
        self.add_target_only(round_ms, token_ms)
        self.loss_ms = max(self.loss_ms + round_ms - committed * token_ms, -self.limit_ms)

    def add_target_only(self, round_ms: float, token_ms: float) -> None:
        """Count a round that drafted nothing, so that its time is no loss."""
        self._elapsed_ms += round_ms
        self._token_ms = token_ms

    def rounds_until(self, cost_ms: float) -> int:
        """The number of target-only rounds after which a loss of `cost_ms` is allowed; 0: it is now."""
        missing = self.loss_ms + cost_ms - self.limit_ms
        if missing <= 0 or not self._token_ms:
            return 0
        floor_ms = max(0.0, self._floor_ms - ALLOWED_SHARE * self._elapsed_ms)
        return int((missing + floor_ms) / (ALLOWED_SHARE * self._token_ms)) + 1

    @property
    def _floor_ms(self) -> float:
        least, most = (tokens * self._token_ms for tokens in ALLOWED_TOKENS)
        return max(least, min(most, ALLOWED_SHARE * (self._elapsed_ms + self._room * self._token_ms)))
