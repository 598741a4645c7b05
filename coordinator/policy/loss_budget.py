"""The bound on being wrong of a request that is alone on its target: its loss against target-only. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.costs.service_costs import LEAST_MOVE

ALLOWED_SHARE = LEAST_MOVE
"""Largest share of a request's time that drafting may cost: the worst case that users are promised."""
ALLOWED_STEPS = 2.0
"""Steps of rest that may be lost in any case: a trial costs a round or two."""


@dataclass
class LossBudget:
    """The loss of a request so far in steps of rest, of which its rounds took `steps`; below 0 it is a gain.

    A gain counts up to the bound only: more of it would only pay for a drafter that has become useless.
    """

    loss: float = 0.0
    steps: float = 0.0

    @property
    def bound(self) -> float:
        """The largest allowed loss."""
        return max(ALLOWED_STEPS, ALLOWED_SHARE * self.steps)

    def add(self, tokens: float, steps: float) -> None:
        """Count a round."""
        self.steps += steps
        self.loss = max(self.loss + steps - tokens, -self.bound)
