"""The timeline in Chrome's trace event format, which ui.perfetto.dev opens: one process for each service.

Times are microseconds. Slices are complete events (`X`). Messages between services are flow events (`s`, `f`), which
belong to the innermost slice of their track at their time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from paceline.protocol.records import RoundRecord
from paceline.timeline.layout import Flow, PlacedRound, Slice, Track, place_rounds

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
