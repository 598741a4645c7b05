"""What rounds take: the services' own lines, and the factors by which they turn out on the coordinator's clock. Pure.

The services measure their steps exactly, and say so. The coordinator measures only what no service sees: the ways
there and back, and by how much a service's word is off. So a line that lies is put right by one factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.costs.cost_line import CostLine
from paceline.costs.running_mean import RunningMean
from paceline.costs.service_costs import TargetCosts
from paceline.protocol.records import RoundRecord

OUTLIER = 4.0
"""A time that is this many times what was expected counts as so many: pauses of a machine are no one's price. A round
that just misses a step takes twice as long, which is a price: half of 4 loses goodput (`2026-11-23-one-planner`)."""
NEARLY_ALL = 0.9
"""Share of the sessions in a step in which nobody drafts: some have just come, or are about to go. Of fewer than ten
that is all of them."""
FACTOR_WEIGHT = 16.0
"""Rounds that a factor remembers, as services remember steps (`SPEED_STEPS` of `paceline/costs/cost_meter.py`): both
follow the speed of one machine."""


def _factor() -> RunningMean:
    return RunningMean(1.0, 2.0, limit=FACTOR_WEIGHT)


@dataclass
class TargetTimes:
    """Of one target, shared by a coordinator's requests; milliseconds.

    Attributes:
        costs: what the target says, now.
        factor: a self-started round over what its step should take: the line's error, and all that such rounds add.
        gap: a self-started round over the step that the target says it had; where several share the target, of steps
            in which nobody drafted: others' drafts delay all verdicts where services share cores.
        sent: what a round that the coordinator sends takes beyond that; the ways, and the wait for a step.
        sent_late: the same of rounds that waited for their draft: they may miss the step that others share.
        running: requests of this coordinator there.
    """

    costs: Callable[[], TargetCosts]
    factor: RunningMean = field(default_factory=_factor)
    gap: RunningMean = field(default_factory=_factor)
    sent: RunningMean = field(default_factory=lambda: RunningMean(1.0, 0.0))
    sent_late: RunningMean = field(default_factory=lambda: RunningMean(1.0, 0.0))
    running: int = 0

    @property
    def is_known(self) -> bool:
        """Whether the target has said what its steps take."""
        return self.costs().alone.is_known

    @property
    def sessions(self) -> int:
        """Sessions that share its steps, of all coordinators, as far as is known."""
        return max(1, self.running, self.costs().sessions)

    def step_ms(self, rows: float, *, beside: bool = False) -> float:
        """A round whose step has so many rows, started by the target itself; `beside` a draft at work or not."""
        return self.factor.value * self._line(beside).ms(rows)

    def steps(self, *, beside: bool = False) -> Callable[[float], float]:
        """`step_ms` as it is now, for who asks for many numbers of rows at once."""
        factor, line_ms = self.factor.value, self._line(beside).ms
        return lambda rows: factor * line_ms(rows)

    def without_ms(self, record: RoundRecord, rows: int, *, beside: bool, others_beside: bool) -> float:
        """What a self-started round would have taken instead of this one, without so many rows of its step.

        The step that ran says it, less what its rows and a draft `beside` it added, as the target says: it met the
        same moment of the machine. With `others_beside` a draft would have been at work all the same.
        """
        all_rows = max(1, record.target.rows)
        others_ms = self._line(others_beside).ms(max(1, all_rows - rows))
        said_ms = self._line(beside or others_beside).ms(all_rows)
        step_ms = record.target.forward_ms + record.target.sample_ms
        if said_ms <= 0 or step_ms <= 0:
            return self.factor.value * others_ms
        return self.gap.value * step_ms * others_ms / said_ms

    def slowed(self, rows: float) -> float:
        """Share of its work that a target does not get done while a draft works beside it."""
        beside_ms = self.step_ms(rows, beside=True)
        return max(0.0, 1 - self.step_ms(rows) / beside_ms) if beside_ms > 0 else 0.0

    def learn(self, record: RoundRecord, *, beside: bool, late: bool) -> None:
        """Take in how long a round took; not a request's first, which waits for the prompt."""
        said_ms = self._line(beside).ms(max(1, record.target.rows))
        if said_ms <= 0:
            return
        if record.self_started:
            self.factor.add(min(record.round_ms / said_ms, OUTLIER * self.factor.value))
            step_ms = record.target.forward_ms + record.target.sample_ms
            plain = record.target.rows == record.target.sessions >= NEARLY_ALL * self.sessions and not beside
            if step_ms > 0 and (plain or self.sessions == 1):
                self.gap.add(min(record.round_ms / step_ms, OUTLIER * self.gap.value))
            return
        beyond = record.round_ms - record.draft_wait_ms - self.factor.value * said_ms
        (self.sent_late if late else self.sent).add(min(max(0.0, beyond), OUTLIER * said_ms))

    def _line(self, beside: bool) -> CostLine:
        return self.costs().beside if beside else self.costs().alone


@dataclass
class DraftTimes:
    """Of one drafter of a draft service, shared by a coordinator's requests; milliseconds.

    Attributes:
        line: what the draft service says of the drafter's steps, now.
        factor: what drafts took over what their steps should take; at least 1.
        wire: the wait for a draft beyond its steps.
    """

    line: Callable[[], CostLine]
    factor: RunningMean = field(default_factory=_factor)
    wire: RunningMean = field(default_factory=lambda: RunningMean(1.0, 1.0))

    @property
    def is_known(self) -> bool:
        """Whether the draft service has said what its steps take."""
        return self.line().is_known

    def step_ms(self, rows: float) -> float:
        """A step of so many rows; 0 of none."""
        return 0.0 if not rows else self.factor.value * self.line().ms(rows)

    def catch_up_ms(self, lag: int, open_ms: float) -> float:
        """What is left of so many rows, which it has been computing for so long, before it can draft."""
        return max(0.0, self.step_ms(lag) - open_ms)

    def waits(self, sessions: float = 1.0) -> Callable[[int], float]:
        """`wait_ms` as it is now by the depth, for who asks for many at once."""
        first_ms, level_ms = self.wire.value + self.step_ms(2 * sessions), self.step_ms(sessions)
        return lambda depth: first_ms + (depth - 1) * level_ms

    def wait_ms(self, depth: int, sessions: float = 1.0) -> float:
        """Of a round for a proposal of this depth, when so many sessions draft at once.

        The first step has a row for the last committed token and one for the last proposed, which was not computed.
        """
        return self.waits(sessions)(depth)

    def learn(self, record: RoundRecord) -> None:
        """Take in a round that waited for its proposal; not the session's first, which computes the text."""
        said_ms = max(1, record.proposed) * self.line().ms(max(1, record.draft.rows))
        if said_ms <= 0:
            return
        # Rows that were there already took no time: a draft that was faster than its line says nothing of the line.
        self.factor.add(min(max(1.0, record.draft.forward_ms / said_ms), OUTLIER * self.factor.value))
        self.wire.add(min(max(0.0, record.draft_wait_ms - record.draft.forward_ms), OUTLIER * said_ms))

    def learn_late(self, waited_ms: float, depth: int) -> None:
        """A proposal had not come after so long: it takes twice as long, as far as is known."""
        said_ms = depth * self.line().ms(1)
        if said_ms > 0:
            self.factor.add(min(2 * waited_ms / said_ms, OUTLIER * self.factor.value))
