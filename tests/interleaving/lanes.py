"""Lanes whose frames are delivered when the schedule says so, and what is heard over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from paceline.v1 import types_pb2 as pb
from paceline_lab.simulate.lanes import Lane, LaneCall, Serve
from tests.interleaving.stepping import SteppedLoop

FAIR = ("OVERLOADED", "PEER_UNAVAILABLE")
"""Reasons for which a service may refuse what an honest coordinator sends."""
ProposedBefore = dict[tuple[int, int], bytes]
"""What each round proposed, by the request's seed and its base length, where each round draws anew."""


class Heard:
    """What has arrived over one link: how much of each kind, and what honest peers don't say.

    A session that its service has ended may get messages that were on their way: those alone are refused. Under
    rejection and block acceptance a round may have been drawn, so it is sent again with the same proposal only.
    """

    def __init__(
        self, counts: Counter[str], complained: list[str], drawn: ProposedBefore, told: Callable[[str, Any], None]
    ) -> None:
        self._counts = counts
        self._complained = complained
        self._drawn = drawn
        self._told = told
        self._ended: set[int] = set()
        self._seeds: dict[int, int] = {}
        """Of the sessions whose rounds are to stay as they are."""

    def command(self, frame: Any) -> None:
        """Take note of what a service hears."""
        for message in frame.commands:
            kind = message.WhichOneof("command")
            said = getattr(message, kind)
            self._told(kind, said)
            self._counts[kind] += 1
            if kind == "open":
                self._counts["opened in mid-text"] += len(said.spec.token_ids) > said.spec.prompt_length
                if said.spec.acceptance != pb.ACCEPTANCE_COUPLED:
                    self._seeds[said.session_id] = said.spec.noise.seed
            elif kind == "round":
                self._counts["leases"] += said.lease > 0
                self._take_round(said)
            elif kind == "verifying":
                self._counts["proposals told by their tokens"] += said.HasField("proposal")

    def event(self, frame: Any) -> None:
        """Take note of what the coordinator hears."""
        for message in frame.events:
            kind = message.WhichOneof("event")
            said = getattr(message, kind)
            self._told(kind, said)
            self._counts[kind] += 1
            if kind == "verdict":
                self._counts["self-started rounds"] += said.HasField("self_started")
            elif kind == "failure":
                self._take_failure(said)

    def _take_round(self, round_: Any) -> None:
        seed, proposed = self._seeds.get(round_.session_id), round_.proposal.SerializeToString(deterministic=True)
        if seed is not None and self._drawn.setdefault((seed, round_.base_length), proposed) != proposed:
            self._complained.append(f"round {round_.base_length} is sent again with another proposal")

    def _take_failure(self, failure: Any) -> None:
        if failure.reason not in FAIR and failure.session_id not in self._ended:
            self._complained.append(f"refused: {failure.reason} {failure.message}")
        if failure.session_closed:
            self._ended.add(failure.session_id)


class SteppedLane(Lane):
    """One direction of a link.

    Attributes:
        name: `c>t0`, say.
        since: the loop's count of calls when its first frame left, or came to be the first.
    """

    def __init__(
        self, name: str, loop: SteppedLoop, capacity: int, tap: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        super().__init__(capacity, on_end)
        self.name = name
        self.since = 0
        self.on_arrival = tap  # type: ignore[method-assign, assignment]
        self._loop = loop

    def on_leave(self) -> None:
        if len(self) == 1:
            self.since = self._loop.calls

    def deliver(self) -> None:
        super().deliver()
        self.since = self._loop.calls


class SteppedCall(LaneCall):
    """One link to a service, by the service's name."""

    def __init__(self, to: str, serve: Serve, loop: SteppedLoop, capacity: int, heard: Heard) -> None:
        self.to = to
        up = partial(SteppedLane, f"c>{to}", loop, capacity, heard.command)
        super().__init__(serve, loop, up, partial(SteppedLane, f"{to}>c", loop, capacity, heard.event))

    @property
    def lanes(self) -> tuple[SteppedLane, SteppedLane]:
        """Both directions."""
        return cast(SteppedLane, self.up), cast(SteppedLane, self.down)
