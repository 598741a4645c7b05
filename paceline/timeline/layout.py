"""Where each round, and each service's part of it, stands on the time axis of its request.

The coordinator measures rounds, each service its own steps, by clocks that are never compared. So three things are
laid out rather than measured:

- of a round's time on the wire, half is the way to the target and half the way back;
- what the target has started by itself ends as long before its verdict arrived as for the last round that was sent;
- a proposal that was there before its round began (a hit) was drafted right before that; what was drafted and never
  asked for is not in the records.

Lengths are always the records' own, cut where a service would otherwise do two things at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from paceline.protocol.records import RoundRecord, StepTimings
from paceline.runtime.spans import ROUND_FACTS

Fact = str | int | float | bool


class Track(Enum):
    """A service."""

    COORDINATOR = "coordinator"
    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True)
class Slice:
    """What a service did for some time, from the request's arrival on; slices of a track are nested or apart."""

    track: Track
    name: str
    start_ms: float
    end_ms: float
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True)
class Flow:
    """What went from one slice to another: a round, its verdict, a proposal."""

    name: str
    source: Slice
    target: Slice


@dataclass(frozen=True)
class PlacedRound:
    """One round: its slices, parents before what is in them, and what went between them."""

    record: RoundRecord
    slices: tuple[Slice, ...]
    flows: tuple[Flow, ...]

    @property
    def whole(self) -> Slice:
        """The round itself."""
        return self.slices[0]

    def end_ms(self, track: Track) -> float:
        """When the last slice of a service ends; 0 if it has none."""
        return max((each.end_ms for each in self.slices if each.track is track), default=0.0)


@dataclass(frozen=True)
class _Before:
    """Until when each service has been placed, and how long the way from the target last took."""

    round_ms: float = 0.0
    target_ms: float = 0.0
    draft_ms: float = 0.0
    way_ms: float = 0.0


def place_rounds(records: Iterable[RoundRecord]) -> Iterator[PlacedRound]:
    """Lay out a request's rounds, in order; where the coordinator does not say when they began, without gaps."""
    before = _Before()
    for record in records:
        placed = _place(record, before)
        yield placed
        before = _Before(
            placed.whole.end_ms,
            placed.end_ms(Track.TARGET),
            max(before.draft_ms, placed.end_ms(Track.DRAFT)),
            before.way_ms if record.self_started else record.wire_ms / 2,
        )


def _place(record: RoundRecord, before: _Before) -> PlacedRound:
    start = max(before.round_ms, record.begun_ms)
    end = start + record.round_ms
    sent = min(start + record.draft_wait_ms, end)
    verified = max(sent, end - record.accept_ms)
    way = before.way_ms if record.self_started else record.wire_ms / 2
    way = min(way, (verified - sent) / 2)
    whole = Slice(Track.COORDINATOR, "round", start, end, _facts(record))
    verify = Slice(Track.COORDINATOR, "verify", sent, verified)
    accept = Slice(Track.COORDINATOR, "accept", verified, end)
    stepped = max(before.target_ms, verified - way)
    began = max(before.target_ms, stepped - record.target.service_ms)
    target = Slice(Track.TARGET, "verify", began, stepped, _step_facts(record.target) | {"accepted": record.accepted})
    back = Slice(Track.COORDINATOR, "wire", min(stepped, verified), verified)
    slices = [whole, verify, accept, back, target, *_parts(target, record.target)]
    flows = [Flow("verdict", target, accept)]
    if record.draft_wait_ms > 0:
        slices.append(Slice(Track.COORDINATOR, "draft wait", start, sent))
    if not record.self_started:
        there = Slice(Track.COORDINATOR, "wire", sent, sent + way)
        slices.append(there)
        flows.append(Flow("round", there, target))
    if record.proposed and record.draft.service_ms:
        drafted = _drafted(record, start, sent, before.draft_ms)
        slices += [drafted, *_parts(drafted, record.draft)]
        flows.append(Flow("hit" if record.cache_hit else "proposal", drafted, verify))
    return PlacedRound(record, tuple(slices), tuple(flows))


def _drafted(record: RoundRecord, start: float, sent: float, free: float) -> Slice:
    """The draft service's part: for a hit before the round, else in the middle of the wait for it."""
    way = max(0.0, record.draft_wait_ms - record.draft.service_ms) / 2
    end = max(min(free, sent), start if record.cache_hit else sent - way)
    began = min(end, max(free, end - record.draft.service_ms, 0.0))
    name = "draft (hit)" if record.cache_hit else "draft"
    return Slice(Track.DRAFT, name, began, end, _step_facts(record.draft) | {"proposed": record.proposed})


def _parts(whole: Slice, timings: StepTimings) -> Iterator[Slice]:
    """Queue, forward pass and sampling, one after the other, within a service's part."""
    start = whole.start_ms
    for name in ("queue", "forward", "sample"):
        length: float = getattr(timings, f"{name}_ms")
        end = min(start + length, whole.end_ms)
        yield Slice(whole.track, name, start, end)
        start = end


def _facts(record: RoundRecord) -> dict[str, Fact]:
    return {name: getattr(record, name) for name in ROUND_FACTS}


def _step_facts(timings: StepTimings) -> dict[str, Fact]:
    return {"rows": timings.rows, "sessions": timings.sessions, "service_ms": timings.service_ms}
