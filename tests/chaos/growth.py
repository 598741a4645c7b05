"""Whether processes that no fault ends grow while faults fall: their memory, descriptors and threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil
from scipy.stats import theilslopes

from paceline_lab.reporting.presentation import markdown_table

KINDS = ("memory MiB", "descriptors", "threads")
MEMORY = KINDS[0]
CONFIDENCE = 0.95
MINUTE_S = 60.0
WARM_SHARE = 1 / 2
"""Of the time: from when on processes are followed. Allocators grow for some minutes, by 1 to 2 % in two (measured),
until they have what they need."""
LEAST_JUDGED_MINUTES = 10
"""Growth over fewer is shown and not judged."""
FLAT_SHARE_AN_HOUR = 0.02
"""Growth in an hour, over what a process holds, that counts as none: a month of it is what restarts are for."""


@dataclass(frozen=True)
class Drift:
    """How a figure moves a minute: Theil and Sen's median of all pairs' slopes, which single samples don't move."""

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
    """Of one process."""

    at_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def add(self, at_s: float, pid: int) -> None:
        """Take a sample, unless the process is gone."""
        try:
            process = psutil.Process(pid)
            figures = (process.memory_info().rss / (1 << 20), process.num_fds(), process.num_threads())
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


class Growth:
    """Follows processes that are idle, from `warm_s` on; one that is replaced is named, and begins anew."""

    def __init__(self, warm_s: float) -> None:
        self.replaced: list[str] = []
        self.samples: dict[str, Samples] = {}
        self._began, self._warm_s = time.monotonic(), warm_s
        self._pids: Mapping[str, int] = {}

    def look(self, pids: Mapping[str, int]) -> None:
        """Take a sample of each, by its label."""
        for label, pid in self._pids.items():
            if pids[label] != pid:
                self.replaced.append(label)
                self.samples.pop(label, None)
        self._pids, now_s = dict(pids), time.monotonic() - self._began
        if now_s >= self._warm_s:
            for label, pid in pids.items():
                self.samples.setdefault(label, Samples()).add(now_s, pid)

    def failures(self) -> list[str]:
        ended = [f"{label} ended unasked" for label in self.replaced]
        drifts = {label: self.samples[label].drift(MEMORY) for label in self._growing()}
        return ended + [f"memory of {label} grows: {drift} MiB a minute" for label, drift in drifts.items()]

    def text(self) -> str:
        failures = "; ".join(self.failures()) or "none"
        lives = [_life(label, life) for label, life in self.samples.items()]
        return f"## Processes, idle between faults\n\n{markdown_table(lives)}\nWhat must not be: {failures}.\n"

    def _growing(self) -> Iterator[str]:
        """Processes whose memory grows for certain, and by more than what counts as none."""
        for label, life in self.samples.items():
            allowed = FLAT_SHARE_AN_HOUR * life.most(MEMORY) / 60
            if life.minutes >= LEAST_JUDGED_MINUTES and life.drift(MEMORY).low > allowed:
                yield label


def _life(label: str, life: Samples) -> dict[str, object]:
    shown: dict[str, object] = {"process": label, "samples": len(life.at_s)}
    for kind in KINDS:
        shown[f"{kind}, at most"] = f"{life.most(kind):.0f}"
        shown[f"{kind} a minute (95 %)"] = str(life.drift(kind))
    return shown
