"""The place of each round, and of each service's part of it, on the time axis of its request.

The coordinator measures rounds and each service its own steps, with clocks that are never compared. So three things
are assumed rather than measured:

- Half of a round's time on the wire is the way to the target, and half the way back.
- A round that the target started by itself has the way back of the last round that was sent.
- A proposal that arrived before its round began (a hit) was drafted right before that. Records don't have proposals
  that no round used.

Lengths are those of the records, cut where a service would otherwise do two things at once.

The timeline in Chrome's trace event format, which ui.perfetto.dev opens: one process for each service.

Times are microseconds. Slices are complete events (`X`). Messages between services are flow events (`s`, `f`), which
belong to the innermost slice of their track at their time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

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
    """A span of a service's work, in ms since the request's arrival. Slices of a track are nested or apart."""

    track: Track
    name: str
    start_ms: float
    end_ms: float
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True)
class Flow:
    """A message from one slice to another: a round, its verdict, or a proposal."""

    name: str
    source: Slice
    target: Slice


@dataclass(frozen=True)
class PlacedRound:
    """One round: its slices, parents before children, and the messages between them."""

    record: RoundRecord
    slices: tuple[Slice, ...]
    flows: tuple[Flow, ...]

    @property
    def whole(self) -> Slice:
        """The round itself."""
        return self.slices[0]

    def end_ms(self, track: Track) -> float:
        """End of a service's last slice; 0 if it has none."""
        return max((each.end_ms for each in self.slices if each.track is track), default=0.0)


@dataclass(frozen=True)
class _Ends:
    """Until when each track is filled, and the last one-way time from the target."""

    round_ms: float = 0.0
    target_ms: float = 0.0
    draft_ms: float = 0.0
    one_way_ms: float = 0.0


def place_rounds(records: Iterable[RoundRecord]) -> Iterator[PlacedRound]:
    """Lay out a request's rounds, in order. Records without the time of their beginning are laid out without gaps."""
    ends = _Ends()
    for record in records:
        round_ = _place(record, ends)
        yield round_
        ends = _Ends(
            round_.whole.end_ms,
            round_.end_ms(Track.TARGET),
            max(ends.draft_ms, round_.end_ms(Track.DRAFT)),
            ends.one_way_ms if record.self_started else record.wire_ms / 2,
        )


def _place(record: RoundRecord, ends: _Ends) -> PlacedRound:
    start_ms = max(ends.round_ms, record.begun_ms)
    end_ms = start_ms + record.round_ms
    sent_ms = min(start_ms + record.draft_wait_ms, end_ms)
    verdict_ms = max(sent_ms, end_ms - record.accept_ms)
    one_way_ms = ends.one_way_ms if record.self_started else record.wire_ms / 2
    one_way_ms = min(one_way_ms, (verdict_ms - sent_ms) / 2)
    whole = Slice(Track.COORDINATOR, "round", start_ms, end_ms, _facts(record))
    verify = Slice(Track.COORDINATOR, "verify", sent_ms, verdict_ms)
    accept = Slice(Track.COORDINATOR, "accept", verdict_ms, end_ms)
    step_end_ms = max(ends.target_ms, verdict_ms - one_way_ms)
    step_start_ms = max(ends.target_ms, step_end_ms - record.target.service_ms)
    facts = _step_facts(record.target) | {"accepted": record.accepted}
    target = Slice(Track.TARGET, "verify", step_start_ms, step_end_ms, facts)
    verdict_wire = Slice(Track.COORDINATOR, "wire", min(step_end_ms, verdict_ms), verdict_ms)
    slices = [whole, verify, accept, verdict_wire, target, *_parts(target, record.target)]
    flows = [Flow("verdict", target, accept)]
    if record.draft_wait_ms > 0:
        slices.append(Slice(Track.COORDINATOR, "draft wait", start_ms, sent_ms))
    if not record.self_started:
        request_wire = Slice(Track.COORDINATOR, "wire", sent_ms, sent_ms + one_way_ms)
        slices.append(request_wire)
        flows.append(Flow("round", request_wire, target))
    if record.proposed and record.draft.service_ms:
        draft = _draft_slice(record, start_ms, sent_ms, ends.draft_ms)
        slices += [draft, *_parts(draft, record.draft)]
        flows.append(Flow("hit" if record.cache_hit else "proposal", draft, verify))
    return PlacedRound(record, tuple(slices), tuple(flows))


def _draft_slice(record: RoundRecord, start_ms: float, sent_ms: float, free_ms: float) -> Slice:
    """The draft service's part: for a hit before the round, else in the middle of the coordinator's wait."""
    one_way_ms = max(0.0, record.draft_wait_ms - record.draft.service_ms) / 2
    end_ms = max(min(free_ms, sent_ms), start_ms if record.cache_hit else sent_ms - one_way_ms)
    step_start_ms = min(end_ms, max(free_ms, end_ms - record.draft.service_ms, 0.0))
    name = "draft (hit)" if record.cache_hit else "draft"
    return Slice(Track.DRAFT, name, step_start_ms, end_ms, _step_facts(record.draft) | {"proposed": record.proposed})


def _parts(whole: Slice, timings: StepTimings) -> Iterator[Slice]:
    """Queue, forward pass and sampling in turn, within a service's part."""
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


Event = dict[str, object]
_PROCESSES = {track: number for number, track in enumerate(Track, 1)}
_THREAD = 1


def chrome_trace(records: Iterable[RoundRecord]) -> dict[str, object]:
    """The whole file, as JSON has it."""
    ids = count(1)
    events = [event for round_ in place_rounds(records) for event in _events(round_, ids)]
    events.sort(key=_order)
    names = [_process_name(track) for track in Track]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}


def _order(event: Event) -> tuple[float, float]:
    """Order by time; of slices with the same start the outer one comes first."""
    start, length = event["ts"], event.get("dur", -1.0)
    assert isinstance(start, float)
    assert isinstance(length, float)
    return start, -length


def _events(round_: PlacedRound, ids: Iterator[int]) -> Iterator[Event]:
    for each in round_.slices:
        start, end = _us(each.start_ms), _us(each.end_ms)
        length = round(end - start, 3)
        yield _on(each) | {"ph": "X", "name": each.name, "ts": start, "dur": length, "args": dict(each.facts)}
    for flow in round_.flows:
        yield from _arrow(flow, next(ids))


def _arrow(flow: Flow, number: int) -> Iterator[Event]:
    common: Event = {"name": flow.name, "id": number}
    source, target = flow.source, flow.target
    yield _on(source) | common | {"ph": "s", "ts": _us(_middle(source))}
    yield _on(target) | common | {"ph": "f", "bp": "e", "ts": _us(max(target.start_ms, _middle(source)))}


def _middle(each: Slice) -> float:
    return (each.start_ms + each.end_ms) / 2


def _on(each: Slice) -> Event:
    return {"pid": _PROCESSES[each.track], "tid": _THREAD, "cat": "paceline"}


def _process_name(track: Track) -> Event:
    return {
        "ph": "M",
        "name": "process_name",
        "pid": _PROCESSES[track],
        "tid": _THREAD,
        "args": {"name": track.value},
    }


def _us(milliseconds: float) -> float:
    return round(milliseconds * 1e3, 3)
