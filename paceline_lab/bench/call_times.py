"""How long one call takes, of those that take microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def run_times_us(call: Callable[[], Any], runs: int, calls: int) -> list[float]:
    """Microseconds of a call, the mean of each run's calls: single ones are below what clocks and noise allow."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
    return times
