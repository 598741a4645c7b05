"""What metrics and logs cost a round and a request: `python -m benchmarks.metrics_cost`.

Times the very calls that services make, off and on, in one process: microseconds, the median of repeated runs and
the worst of them. Between a verdict and the next round stands one entry in a list; the rest comes behind it.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import REPORTS
from benchmarks.call_times import run_times_us
from benchmarks.reporting.presentation import markdown_table
from benchmarks.reporting.reports import load_average, write_rows
from coordinator.observer import RequestObserver
from coordinator.stats import StatsBuilder
from paceline.protocol.explanation import CandidateExplanation, PlanExplanation
from paceline.protocol.generation import FinishReason, Provenance
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.runtime import logs, metrics

RUNS, CALLS = 15, 2_000
BARS = {"off": 5.0, "on": 50.0}
"""Most microseconds between a verdict and the next round."""
RECORD = RoundRecord(40, 21.0, 1.2, 0.6, StepTimings(0.4, 17.0, 0.3, 17.9, 5, 1), 0.1, 4, 3, True, "model")
PROVENANCE = (Provenance.ACCEPTED,) * 3 + (Provenance.RECOVERED,)
ROUNDS = 32
STEP, PROPOSAL = "target or draft step: behind what it sends", "draft: a proposal has left"
EXPLANATION = PlanExplanation((20.0, 21.0, 23.0, 28.0), candidates=(CandidateExplanation("wait", 4, 3.1, 27.0, 32),))


@dataclass(frozen=True)
class CallCost:
    """What one call takes; `bar`: the most that it may, 0: there is none."""

    call: str
    metrics: str
    median_us: float
    worst_us: float
    bar_us: float = 0.0


def measure(call: str, state: str, fn: Callable[[], Any], bar_us: float = 0.0, calls: int = CALLS) -> CallCost:
    """Time a call; the worst is of runs, not of single calls."""
    times = run_times_us(fn, RUNS, calls)
    return CallCost(call, state, statistics.median(times), max(times), bar_us)


def run() -> list[CallCost]:
    """Every call, off and on."""
    rows: list[CallCost] = []
    for state in BARS:
        with _metrics("coordinator", state), _silent(), RequestObserver("", None) as observer:
            rows += _round(observer, state)
            rows.append(_request(state))
        with _metrics("target", state):
            rows.append(measure(STEP, state, partial(metrics.stepped, 0.02, 5, 1)))
        with _metrics("draft", state):
            rows.append(measure(PROPOSAL, state, partial(metrics.proposal_sent, 4, asked=True)))
    return rows + [_line(name) for name in ("console", "json")]


def _round(observer: RequestObserver, state: str) -> Iterator[CallCost]:
    unsettled: list[Callable[[], None]] = []

    def remember() -> None:
        unsettled.clear()  # as each round finds it
        unsettled.append(partial(observer.round_done, RECORD, PROVENANCE))

    yield measure("round: between verdict and next round", state, remember, BARS[state])
    yield measure("round: while the target works", state, partial(observer.round_done, RECORD, PROVENANCE))


def _request(state: str) -> CallCost:
    stats = StatsBuilder(0.0)
    for number in range(ROUNDS):
        stats.add(RECORD, 4, number * 0.02)
    told = stats.build()

    def request() -> None:
        with RequestObserver("", None) as observer:
            observer.done(told, FinishReason.LENGTH.value, EXPLANATION)

    return measure("request: its end, and a line that nobody reads", state, request, calls=CALLS // 10)


def _line(name: logs.LogFormat) -> CallCost:
    template = "request done: tenant=%s tokens=%d first_token_ms=%.1f reason=%s"
    record = logging.LogRecord("bench", logging.INFO, __file__, 1, template, ("alice", 128, 20.5, "length"), None)
    formatter = logs.JsonLine() if name == "json" else logs.OneLine()
    return measure(f"log: a line is formatted ({name})", "–", partial(formatter.format, record))


@contextmanager
def _metrics(service: str, state: str) -> Iterator[None]:
    if state == "on":
        metrics.configure(f"paceline-{service}", model="bench", exposed=True)
    try:
        yield
    finally:
        metrics.shutdown()


@contextmanager
def _silent() -> Iterator[None]:
    """No line is written: where logs go is not ours to measure."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def table(rows: Sequence[CallCost]) -> str:
    """One line a call."""
    return markdown_table(
        [
            {
                "call": row.call,
                "metrics": row.metrics,
                "median µs": f"{row.median_us:.2f}",
                "worst run µs": f"{row.worst_us:.2f}",
                "bar µs": f"{row.bar_us:g} ({'kept' if row.worst_us <= row.bar_us else 'missed'})"
                if row.bar_us
                else "–",
            }
            for row in rows
        ]
    )


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPORTS)
    given = parser.parse_args()
    rows = run()
    settings = {"runs": f"{RUNS} of {CALLS} calls", "load average": load_average()}
    print(write_rows(given.out, "metrics-cost", settings, rows, table(rows)))


if __name__ == "__main__":
    main()
