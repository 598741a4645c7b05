"""Times of rounds: the services' cost lines, corrected on the coordinator's clock. Pure.

The services measure their steps exactly and state them. The coordinator measures only what no service sees: the trips
there and back, and the error of a stated line. So one factor corrects a line that is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from coordinator.policy.group import Group
from paceline.costs.acceptance import MAX_DEPTH
from paceline.costs.cycle import proposal_ms
from paceline.costs.goodput import load_of
from paceline.costs.running_mean import OUTLIER, RunningMean, speed
from paceline.costs.service_costs import DEFAULT, DraftPeerCosts, TargetPeerCosts
from paceline.protocol.records import RoundRecord

_trips = partial(RunningMean, 1.0, 0.0)
_by_load = partial(defaultdict[int, RunningMean], _trips)


@dataclass
class TargetTimes:
    """Times of one target in milliseconds, shared by a coordinator's requests.

    Attributes:
        peer: states the costs.
        factor: corrects the line for self-started rounds: its error, and the round's overhead.
        send_ms: additional time of a round that the coordinator sends: the trips, and the wait for a step.
        late: the same, by load, for rounds that waited for their draft and had none beside: they may miss a step.
        requests: this coordinator's requests there that follow the group, in the order of their coming.
        group: what they may do, by what they gain together.
    """

    peer: TargetPeerCosts
    factor: RunningMean = field(default_factory=speed)
    send_ms: RunningMean = field(default_factory=_trips)
    late: defaultdict[int, RunningMean] = field(default_factory=_by_load)
    requests: WeakKeyDictionary[Any, None] = field(default_factory=WeakKeyDictionary)
    group: Group = field(default_factory=Group)

    @property
    def sessions(self) -> int:
        """The number of all coordinators' sessions that share its steps, as far as it is known."""
        return max(1, len(self.requests), self.peer.costs.sessions)

    def late_ms(self, guess_ms: float) -> float:
        """That of `late` under the load of now; in company a guess before any is known."""
        late = self.late[load_of(self.sessions)]
        return late.value if late.weight or self.sessions == 1 else guess_ms

    def steps(self, *, beside: bool = False) -> Callable[[float], float]:
        """Time of a self-started round by its step's rows; `beside`: a draft works during the step."""
        factor, costs = self.factor.value, self.peer.costs
        line_ms = (costs.beside if beside else costs.alone).ms
        return lambda rows: factor * line_ms(rows)

    def learn(self, record: RoundRecord, *, beside: bool, late: bool) -> None:
        """Learn from a round's time. A request's first round is left out by the caller: it waits for the prompt."""
        expected_ms = self.steps(beside=beside)(max(1, record.target.rows))
        if record.self_started:
            self.factor.add_ratio(record.round_ms, expected_ms / self.factor.value)
        elif not (late and beside):  # the first of these is slow by what the line beside a draft has yet to say
            extra_ms = record.round_ms - record.draft_wait_ms - expected_ms
            _learn_wait(self.late[load_of(self.sessions)] if late else self.send_ms, extra_ms, expected_ms)


@dataclass
class DraftTimes:
    """Times of one drafter of a draft service in milliseconds, shared by a coordinator's requests.

    Attributes:
        peer, drafter: who states the costs, and of which drafter; empty: the service's default.
        wires: the wait for a draft beyond what its line says, by load: who is alone must not expect a crowd's queue.
    """

    peer: DraftPeerCosts
    drafter: str = DEFAULT
    wires: defaultdict[int, RunningMean] = field(default_factory=_by_load)

    def step_ms(self, rows: float, *, beside: bool = False) -> float:
        """Time of a step of `rows` that is waited for, or that runs `beside` the target's; 0: unknown or none."""
        return 0.0 if not rows else self.peer.costs.line_of(self.drafter, beside=beside).ms(rows)

    def catch_up_ms(self, lag: int, open_ms: float) -> float:
        """Time until the draft has computed `lag` rows, on which it has worked for `open_ms`."""
        return max(0.0, self.step_ms(lag) - open_ms)

    def waits(self, sessions: float = 1.0) -> list[float]:
        """Waits of a round for chains of 1 to `MAX_DEPTH` tokens, when so many sessions draft at once."""
        wire_ms = self.wires[load_of(sessions)].value
        return [wire_ms + ms for ms in proposal_ms(self.step_ms, (1,) * (MAX_DEPTH - 1), sessions)]

    def learn(self, record: RoundRecord, sessions: int) -> None:
        """Learn from a wait among so many sessions; not from a session's first, for which the text is computed."""
        said_ms = max(1, record.proposed) * self.step_ms(max(1, record.draft.rows))
        wires, wait_ms = self.wires[load_of(sessions)], record.draft_wait_ms - said_ms
        if record.proposed or wait_ms > wires.value:  # a wait in vain tells the least that the draft would have taken
            _learn_wait(wires, wait_ms, said_ms)


def _learn_wait(mean: RunningMean, wait_ms: float, said_ms: float) -> None:
    """Count a wait beside a step that was said to take `said_ms`; where nothing was said nothing is learned."""
    if said_ms > 0:
        mean.add(min(max(0.0, wait_ms), OUTLIER * said_ms))
