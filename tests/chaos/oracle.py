"""What must hold whatever happened: the text, the end of every request, and what the processes hold afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from paceline.protocol.errors import PeerUnavailable
from tests.chaos.cluster import ChaosCluster, Held
from tests.chaos.faults import Fault, Kind
from tests.chaos.requests import HTTP, LAW_ONLY, LEFT, LENGTH, Asked, Ended
from tests.e2e.cluster import eventually

MOST_DESCRIPTORS = 10
"""More than before: connections that are being closed, and those that clients open anew. A coordinator that has just
started holds 25, and 27 to 32 while faults fall, without a trend."""
MOST_THREADS = 8
"""More than before: gRPC keeps some for its work, as many as it lately had need of."""
MOST_BYTES = 48 << 20
"""More than before: the allocator's, whatever the number of faults."""
LIMITS = {"descriptors": MOST_DESCRIPTORS, "threads": MOST_THREADS, "resident_bytes": MOST_BYTES}
RELEASE_S = 15.0


@dataclass(frozen=True)
class Judged:
    """What was wrong with one fault's requests; empty: nothing."""

    lost: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    leaked: tuple[str, ...] = ()
    excused: int = 0
    """Requests that ended with a typed error because the fault left no other end."""


def judge(fault: Fault, expected: Mapping[Asked, Ended], got: Mapping[Asked, Ended]) -> Judged:
    lost, changed, excused = [], [], 0
    for asked, ended in got.items():
        if ended.error and _is_impossible(fault, asked, ended):
            excused += 1
        elif ended.error:
            lost.append(f"{asked}: {ended.error} {ended.message}")
        elif not same_text(asked, expected, ended):
            changed.append(f"{asked}: {ended.result}")
    return Judged(tuple(lost), tuple(changed), excused=excused)


def same_text(asked: Asked, expected: Mapping[Asked, Ended], ended: Ended) -> bool:
    """Whether a request that ended has the text of the undisturbed one: bit by bit, or, by law alone, its length."""
    if asked.form in LAW_ONLY:
        return (len(ended.token_ids), ended.reason) == (LENGTH, "length")
    return ended.result == expected[asked].result


def _is_impossible(fault: Fault, asked: Asked, ended: Ended) -> bool:
    """Whether the fault took away the only way to the text: HTTP can't resume, and who leaves reads no further."""
    if ended.error == LEFT:
        return fault.kind is Kind.LEAVE
    return asked.form == HTTP and fault.peer == "gateway" and ended.error == PeerUnavailable.reason


@dataclass
class Holdings:
    """What each process held when it had served and was idle, by its pid; compares with that ever after."""

    _before: dict[int, Held] = field(default_factory=dict)

    def check(self, cluster: ChaosCluster) -> tuple[str, ...]:
        """What a process holds beyond that and does not release in time."""
        leaked = []
        for label in cluster.shape.labels:
            held = cluster.held(label)
            before = self._before.setdefault(held.pid, held)
            try:
                eventually(partial(_is_within, cluster, label, before), label, RELEASE_S)
            except AssertionError:
                leaked.append(f"{label} holds {cluster.held(label)}, before {before}")
        return tuple(leaked)


def _is_within(cluster: ChaosCluster, label: str, before: Held) -> bool:
    held = cluster.held(label)
    return all(getattr(held, name) <= getattr(before, name) + most for name, most in LIMITS.items())
