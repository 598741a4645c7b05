"""How much of this process's cores other programs use."""

from __future__ import annotations

import os
import time

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""What a core does when it neither idles nor waits; some systems count fewer of them."""


class UseByOthers:
    """The share of the cores that all programs but some processes have used since this was made."""

    def __init__(self, own: tuple[int, ...]) -> None:
        self._own = own
        self._began, self._used = time.monotonic(), self._used_s()

    def share(self) -> float:
        """In [0, 1]."""
        elapsed = (time.monotonic() - self._began) * len(_cores())
        return min(max((self._used_s() - self._used) / elapsed, 0.0), 1.0)

    def _used_s(self) -> float:
        import psutil  # a client's installation has none

        cores = psutil.cpu_times(percpu=True)
        busy = sum(getattr(cores[core], kind, 0.0) for core in _cores() for kind in _BUSY)
        ours = [psutil.Process(pid).cpu_times() for pid in self._own if psutil.pid_exists(pid)]
        return busy - sum(times.user + times.system for times in ours)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
