"""Memory, descriptors and threads of processes while something runs, and whether they grow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil
from scipy.stats import theilslopes

MIB = 1 << 20
KINDS = ("memory MiB", "descriptors", "threads")
CONFIDENCE = 0.95
MINUTE_S = 60.0


@dataclass(frozen=True)
class Drift:
    """How a figure moves, in units a minute: the median of all pairs' slopes, with its 95 % interval.

    The estimate is Theil and Sen's: single samples that stand out, as during a restart, don't move it.
    """

    a_minute: float
    low: float
    high: float

    @classmethod
    def of(cls, at_s: Sequence[float], values: Sequence[float]) -> Drift:
        if len(values) < 2:
            return cls(0.0, 0.0, 0.0)
        slope, _, low, high = theilslopes(values, at_s, CONFIDENCE)
        return cls(*(MINUTE_S * float(each) for each in (slope, low, high)))

    def __str__(self) -> str:
        return f"{self.a_minute:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


@dataclass
class Samples:
    at_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def add(self, at_s: float, pid: int) -> None:
        """Take a sample, unless the process is gone."""
        try:
            process = psutil.Process(pid)
            figures = (process.memory_info().rss / MIB, process.num_fds(), process.num_threads())
        except psutil.Error:
            return
        self.at_s.append(at_s)
        for kind, value in zip(KINDS, figures, strict=True):
            self.values[kind].append(float(value))

    @property
    def minutes(self) -> float:
        return (self.at_s[-1] - self.at_s[0]) / MINUTE_S if self.at_s else 0.0

    def most(self, kind: str) -> float:
        return max(self.values[kind], default=0.0)

    def drift(self, kind: str) -> Drift:
        return Drift.of(self.at_s, self.values[kind])


class ResourceWatch:
    def __init__(self) -> None:
        self.samples: dict[str, Samples] = {}
        self._began = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began

    def sample(self, pids: Mapping[str, int]) -> None:
        for label, pid in pids.items():
            self.samples.setdefault(label, Samples()).add(self.now_s, pid)
