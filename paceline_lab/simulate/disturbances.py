"""What goes wrong in a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.errors import require


@dataclass(frozen=True)
class ServiceChange:
    """From a moment on steps of a service take so many times as long."""

    at_ms: float
    service: str
    factor: float

    def __post_init__(self) -> None:
        require(self.service in ("target", "draft"), "service", self.service, "target or draft")
        require(self.factor > 0, "factor", self.factor, "above 0")


@dataclass(frozen=True)
class ServiceFailure:
    """A service ends at a moment and is there again, empty, `down_ms` later."""

    at_ms: float
    service: str
    index: int
    down_ms: float

    def __post_init__(self) -> None:
        services = ("target", "draft", "coordinator")
        require(self.service in services, "service", self.service, f"one of {', '.join(services)}")
        require(self.index >= 0, "index", self.index, "at least 0")


@dataclass(frozen=True)
class Disturbance:
    """What goes wrong in a run.

    Attributes:
        changes: services that become slower or faster.
        target_lie, draft_lie: by how much the lines that services state at their start are wrong.
        failures: services that end and come back.
        notice_ms: from a failure until those who are linked to the service know: a closed connection at once, a
            silent host after the keepalive's 7 s.
    """

    changes: tuple[ServiceChange, ...] = ()
    target_lie: float = 1.0
    draft_lie: float = 1.0
    failures: tuple[ServiceFailure, ...] = ()
    notice_ms: float = 1.0


UNDISTURBED = Disturbance()
