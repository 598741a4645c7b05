"""The cost line of a service that has just loaded, from a few real steps of each size."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from paceline.costs.acceptance import MAX_DEPTH
from paceline.costs.cost_line import CostLine
from paceline.protocol.proposal import MAX_PROPOSAL_NODES

SLOPE_ROWS = MAX_DEPTH // 2
"""Rows of the second step that is timed at load, as a proposal may have: with the first it gives a line its slope."""
REPEATS = 3
"""Steps of each size; their median is not moved by one that was interrupted."""
MEASURING_MS = 1000.0
"""Time for repeated steps. After twice that time no step begins. Loading a model whose steps are that long takes many
times as long."""


def measure_line(step: Callable[[int], float], most_rows: int) -> CostLine:
    """Measure the cost line of a service that has just loaded, by a few real steps of each size.

    Args:
        step: runs a step of so many rows; returns how long it took, milliseconds.
        most_rows: that a step can have; at least 1.
    """
    total_ms = longest_ms = step(1)  # it compiles, or touches pages for the first time
    times = {1: total_ms} if total_ms > MEASURING_MS else {}
    octaves = (1 << power for power in range(MAX_PROPOSAL_NODES.bit_length()))
    for rows in sorted(octaves, key=lambda rows: rows not in (1, SLOPE_ROWS)):
        if rows > most_rows or rows in times:
            continue
        may_repeat = total_ms + REPEATS * longest_ms <= MEASURING_MS
        needs_slope = total_ms <= 2 * MEASURING_MS and len(times) < 2
        if not (may_repeat or needs_slope):
            break
        rounds = [step(rows) for _ in range(REPEATS if may_repeat else 1)]
        total_ms += sum(rounds)
        times[rows] = median(rounds)
        longest_ms = max(times.values())
    return CostLine.rising((rows, ms, 1.0) for rows, ms in sorted(times.items()))
