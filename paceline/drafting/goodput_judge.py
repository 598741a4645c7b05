"""Whether drafts are worth their price to a server that is not ours, by the tokens that its steps commit. Pure."""

from __future__ import annotations

from paceline.costs.goodput import MARGIN, Goodput, Mode
from paceline.costs.running_mean import OUTLIER


class GoodputJudge:
    """Compares steps with drafts to steps without, under each load, as a coordinator does for its group of requests.

    A load begins with a look at steps without drafts, and has another one when that is old. Drafts that lose more
    than a few steps against them pause; each pause is twice as long.
    """

    def __init__(self) -> None:
        self._goodput = Goodput(has_line=False)

    def may_offer(self, rows: int) -> bool:
        """Whether steps of so many requests may have drafts now."""
        goodput = self._goodput
        return goodput.steps_to_see(rows, Mode.REST) == 0 and goodput.is_open(rows, Mode.DRAFTS)

    def learn(self, rows: int, tokens: int, step_ms: float, *, has_drafts: bool) -> None:
        """Learn from a step of `rows` requests that committed `tokens`; `has_drafts`: whether it might have some."""
        goodput = self._goodput
        if not has_drafts:
            goodput.take_rest(rows, step_ms)
        if (rest_ms := goodput.rest_ms(rows, lambda _: 1.0)) <= 0:
            return
        steps = min(step_ms / rest_ms, OUTLIER * tokens / rows)  # however slow, it lost by at most so much
        goodput.steps += steps
        if has_drafts:
            goodput.account(rows, Mode.DRAFTS).add(tokens / rows, steps, MARGIN, goodput.steps)
        else:
            goodput.account(rows, Mode.REST).add(steps, steps, 1.0, goodput.steps)
