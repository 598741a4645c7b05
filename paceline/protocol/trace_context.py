"""W3C Trace Context: the headers that name the span which caused a message."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_STATE_CHARACTERS = 512
MAX_STATE_MEMBERS = 32
_TRACEPARENT = re.compile(
    "(?!ff)(?P<version>[0-9a-f]{2})(?P<fields>-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(?P<more>-.*)?"
)
_STATE_MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
_SAMPLED_FLAG = 1


def decode_traceparent(value: str) -> str:
    """A `traceparent` as W3C Trace Context has it; empty if it is not valid, as if none had come.

    A later version is rewritten as version 00, without the fields that version 00 doesn't have.
    """
    match = _TRACEPARENT.fullmatch(value)
    if match is None or (match["version"] == "00" and match["more"] is not None):
        return ""
    return f"00{match['fields']}"


def decode_tracestate(value: str) -> str:
    """A `tracestate` as W3C Trace Context has it; empty if it is not valid, as if none had come."""
    members = [member for each in value.split(",") if (member := each.strip(" \t"))]
    fits = len(value) <= MAX_STATE_CHARACTERS and len(members) <= MAX_STATE_MEMBERS
    return ",".join(members) if fits and all(map(_STATE_MEMBER.fullmatch, members)) else ""


@dataclass(frozen=True)
class TraceContext:
    """Which span caused something: ids in hexadecimal, whether its trace is sampled, and its vendors' state."""

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""

    @classmethod
    def of(cls, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """Of the two headers; None: there is no valid `traceparent`, and `tracestate` counts for nothing."""
        valid = decode_traceparent(traceparent)
        if not valid:
            return None
        _, trace_id, span_id, flags = valid.split("-")
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED_FLAG), decode_tracestate(tracestate))

    @property
    def traceparent(self) -> str:
        """The header's value."""
        return f"00-{self.trace_id}-{self.span_id}-0{_SAMPLED_FLAG if self.is_sampled else 0}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Both headers, as HTTP and as the metadata of a call has them."""
        parent = (("traceparent", self.traceparent),)
        return (*parent, ("tracestate", self.state)) if self.state else parent
