"""Spans as they are exported, and how rounds and steps become spans, after the fact.

On its critical path a round or a step makes one small object. The exporter's thread makes spans of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from paceline.protocol.records import RoundRecord, StepTimings
from paceline.protocol.trace_context import TraceContext

NS_PER_MS = 1_000_000
ROUND_FACTS = (
    "base_length",
    "proposed",
    "accepted",
    "cache_hit",
    "cache_miss",
    "drafter",
    "self_started",
    "reasoning",
    "mode",
    "wire_ms",
)
"""Fields of a round's record that its span has as attributes, each named `paceline.` and the field's name."""

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]


class SpanKind(IntEnum):
    """The kinds of spans, by OTLP's numbers."""

    INTERNAL = 1
    SERVER = 2


@dataclass(frozen=True)
class FinishedSpan:
    """One span; `error` is empty where nothing failed."""

    context: TraceContext
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = field(default_factory=dict)
    error: str = ""

    def spans(self) -> Iterator[FinishedSpan]:
        """This span alone."""
        yield self


@dataclass(frozen=True)
class RoundSpans:
    """A decided round: its span, and within it draft, verify and accept, whose durations add up to the round's."""

    context: TraceContext
    parent_id: str
    record: RoundRecord
    end_ns: int

    def spans(self) -> Iterator[FinishedSpan]:
        """The round, then its parts."""
        record, end = self.record, self.end_ns
        start = end - in_ns(record.round_ms)
        facts = {f"paceline.{name}": getattr(record, name) for name in ROUND_FACTS}
        yield FinishedSpan(self.context, self.parent_id, "round", start, end, attributes=facts)
        # The target's part of a self-started round began before the coordinator knew of it: it is cut at the start.
        send_ns = min(start + in_ns(record.draft_wait_ms), end)
        verdict_ns = max(send_ns, end - in_ns(record.accept_ms))
        target = _timings_of("target", record.target)
        for name, part_start, part_end, attributes in (
            ("draft", start, send_ns, _timings_of("draft", record.draft)),
            ("verify", send_ns, verdict_ns, {"paceline.wire_ms": record.wire_ms} | target),
            ("accept", verdict_ns, end, {}),
        ):
            yield child_of(self.context, name, part_start, part_end, attributes)


@dataclass(frozen=True)
class StepSpans:
    """A service's part of a round, and in it queue, forward and sample, one after the other."""

    parent: TraceContext
    name: str
    timings: StepTimings
    end_ns: int

    def spans(self) -> Iterator[FinishedSpan]:
        """The service's part, then its own parts."""
        timings = self.timings
        start = self.end_ns - in_ns(timings.service_ms)
        attributes = {"paceline.rows": timings.rows, "paceline.sessions": timings.sessions}
        step = child_of(self.parent, self.name, start, self.end_ns, attributes, SpanKind.SERVER)
        yield step
        parts = (("queue", timings.queue_ms), ("forward", timings.forward_ms), ("sample", timings.sample_ms))
        for name, length_ms in parts:
            end = start + in_ns(length_ms)
            yield child_of(step.context, name, start, end)
            start = end


ToExport = FinishedSpan | RoundSpans | StepSpans


def child_of(
    parent: TraceContext,
    name: str,
    start_ns: int,
    end_ns: int,
    attributes: Attributes | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> FinishedSpan:
    """A span with an id of its own."""
    context = below(parent)
    return FinishedSpan(context, parent.span_id, name, start_ns, end_ns, kind, attributes or {})


def below(parent: TraceContext) -> TraceContext:
    """The context of a new child."""
    return TraceContext(parent.trace_id, new_id(8), parent.is_sampled, parent.state)


def new_id(size: int) -> str:
    """A random id of `size` bytes in hexadecimal; never all zeros, which would be no id."""
    return (secrets.randbits(8 * size) or 1).to_bytes(size, "big").hex()


def in_ns(milliseconds: float) -> int:
    """A duration in nanoseconds; a negative one counts as 0."""
    return max(0, round(milliseconds * NS_PER_MS))


def _timings_of(service: str, timings: StepTimings) -> dict[str, AttributeValue]:
    """A service's part of the round as attributes: they stand in for a span where that service exports none."""
    parts = ("queue_ms", "forward_ms", "sample_ms", "rows", "sessions")
    return {f"paceline.{service}.{part}": getattr(timings, part) for part in parts if timings.service_ms}
