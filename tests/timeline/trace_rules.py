"""The rules of Chrome's trace event format that a viewer relies on."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

PLACES = {"X": {"dur", "args"}, "s": {"id"}, "f": {"id", "bp"}, "M": {"args"}}
RESOLUTION_US = 0.0015
"""Times have nanoseconds; an end is the sum of two of them."""


def broken_rules(trace: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a trace; nothing if a viewer shows it as it is meant."""
    events = json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]
    timed = [event for event in events if event["ph"] != "M"]
    yield from (f"{event}: lacks {lacking}" for event in events if (lacking := PLACES[event["ph"]] - event.keys()))
    yield from (f"{event}: before the one before it" for one, event in pairwise(timed) if event["ts"] < one["ts"])
    tracks = defaultdict(list)
    for event in timed:
        tracks[event["pid"], event["tid"]].append(event)
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    yield from (f"{place}: a track without a name" for place in tracks if place[0] not in named)
    for track in tracks.values():
        yield from _not_nested([event for event in track if event["ph"] == "X"])
    yield from _unmatched(timed, tracks)


def _not_nested(slices: list[dict[str, Any]]) -> Iterator[str]:
    open_ends: list[float] = []
    for each in slices:
        begun, end = each["ts"], each["ts"] + each["dur"]
        if each["dur"] < 0 or begun < 0:
            yield f"{each}: a negative time"
        while open_ends and open_ends[-1] <= begun + RESOLUTION_US:
            open_ends.pop()
        if open_ends and end > open_ends[-1] + RESOLUTION_US:
            yield f"{each}: ends after the slice that it began in"
        open_ends.append(end)


def _unmatched(timed: list[dict[str, Any]], tracks: dict[Any, list[dict[str, Any]]]) -> Iterator[str]:
    arrows = defaultdict(list)
    for event in timed:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
    for arrow in arrows.values():
        if [event["ph"] for event in arrow] != ["s", "f"] or arrow[0]["name"] != arrow[1]["name"]:
            yield f"{arrow}: no pair"
    for event in (event for arrow in arrows.values() for event in arrow):
        slices = (each for each in tracks[event["pid"], event["tid"]] if each["ph"] == "X")
        at = event["ts"]
        if not any(each["ts"] - RESOLUTION_US <= at <= each["ts"] + each["dur"] + RESOLUTION_US for each in slices):
            yield f"{event}: in no slice"
