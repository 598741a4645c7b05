"""How much of this process's cores is in use, by the kernel's own count."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq, steal: what a core's line counts that is neither idle nor waiting."""


class UseByOthers:
    """The share of the cores that programs other than some processes have used since this was made."""

    def __init__(self, own: tuple[int, ...]) -> None:
        self._own = own
        self._began, self._busy, self._ours = time.monotonic(), _busy_s(), self._own_s()

    def share(self) -> float:
        """In [0, 1]; 0 where the kernel says nothing."""
        elapsed = (time.monotonic() - self._began) * len(_cores())
        others = (_busy_s() - self._busy) - (self._own_s() - self._ours)
        return min(max(others / elapsed, 0.0), 1.0) if elapsed > 0 else 0.0

    def _own_s(self) -> float:
        return sum(_process_s(pid) for pid in self._own)


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}


def _busy_s() -> float:
    if not _STAT.exists():
        return 0.0
    names = {f"cpu{core}" for core in _cores()}
    lines = (line.split() for line in _STAT.read_text().splitlines())
    ticks = (int(line[1 + place]) for line in lines if line and line[0] in names for place in _BUSY)
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def _process_s(pid: int) -> float:
    """Seconds that a process's threads have computed; 0 where nobody says or it has ended."""
    try:
        # The name in parentheses may hold spaces; user and system time are the 12th and 13th fields behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
