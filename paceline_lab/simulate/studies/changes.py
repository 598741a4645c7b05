"""Do the bars hold while a draft turns useless or slow, and good again, and in a burst on a quiet service?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from paceline_lab.simulate.disturbances import UNDISTURBED, Disturbance, ServiceChange
from paceline_lab.simulate.grid import SHARED, GridCase
from paceline_lab.simulate.policies import PLANNED, TARGET_ONLY
from paceline_lab.simulate.processes import on_all_cores
from paceline_lab.simulate.run import simulate
from paceline_lab.simulate.studies.parts import Study
from paceline_lab.simulate.synthetic import PAIRS, synthetic_requests
from paceline_lab.simulate.trace import TracedRequest

SESSIONS = 8
BURST = 32
TOKENS = 96
PHASE_MS = 5_000.0
SETTLED_MS = 3_000.0
"""Of a phase, in which the planner may still find out."""
LONG_PHASE = 32
"""Requests of a phase that ends with its texts: four waves of them."""


@dataclass(frozen=True)
class Change:
    """What changes in mid-load. Phases begin at moments, or with a request where texts change."""

    name: str
    phases: tuple[str, ...]
    requests: tuple[TracedRequest, ...]
    disturbance: Disturbance = UNDISTURBED
    together: int = SESSIONS


def _changes(seed: int) -> Iterator[Change]:
    texts = {
        pair: synthetic_requests(PAIRS[pair], 3 * LONG_PHASE, TOKENS, seed=seed) for pair in ("good", "hopeless")
    }
    useless = slice(LONG_PHASE, 2 * LONG_PHASE)
    turns = (*texts["good"][: useless.start], *texts["hopeless"][useless], *texts["good"][useless.stop :])
    yield Change("the draft turns useless", ("good", "useless", "good again"), turns)
    slow = Disturbance((ServiceChange(PHASE_MS, "draft", 10.0), ServiceChange(2 * PHASE_MS, "draft", 1.0)))
    yield Change("the draft is ten times slower", ("quick", "slow", "quick again"), texts["good"], slow)
    burst = tuple(replace(each, arrival_ms=SETTLED_MS) for each in texts["good"][1 : 1 + BURST])
    yield Change("a burst of 32", ("alone", "burst"), (texts["good"][0], *burst), together=0)


def study(seed: int) -> Study:
    """Run it."""
    cells = [(change, cost) for change in _changes(seed) for cost in ("cheap", "dear")]
    rows = [row for phases in on_all_cores(_phases, cells) for row in phases]
    worst = min(float(str(row["median ÷ off"])) for row in rows)
    return Study(
        "study-changes",
        "What does it cost when drafts, or the load, change in mid-load?",
        f"{SESSIONS} requests at once, one after the other in each place, of {TOKENS} tokens. A target's step "
        "takes 20 ms and .05 ms a row where rows are cheap, .5 ms where they are dear. A draft's takes 2 ms, on the "
        f"target's cores, whose steps then take {SHARED} times as long. `auto` beside target-only, by request. The "
        f"requests of a phase are those that begin {SETTLED_MS / 1e3:g} s after it began; the burst counts whole.",
        f"The smallest median of a phase is {worst:.3f} of target-only.\n",
        rows,
    )


def _phases(cell: tuple[Change, str]) -> list[dict[str, object]]:
    """A line for each phase of a change, where rows are cheap or dear."""
    change, cost = cell
    setting = replace(GridCase("good", SESSIONS, cost, shared=True).setting, concurrency=change.together)
    plain, planned = (
        simulate(setting, change.requests, policy, change.disturbance) for policy in (TARGET_ONLY, PLANNED)
    )
    by_phase: dict[str, list[tuple[float, float]]] = {phase: [] for phase in change.phases}
    begins: dict[str, float] = {}
    for index, (mine, theirs) in enumerate(zip(planned.requests, plain.requests, strict=True)):
        phase = _phase(change, index, mine.arrival_ms)
        began_ms = begins.setdefault(phase, mine.arrival_ms)
        if mine.arrival_ms >= began_ms + (SETTLED_MS if change.together else 0.0):
            ratio = theirs.ms_per_token / mine.ms_per_token
            by_phase[phase].append((ratio, mine.drafted_rounds / mine.rounds))
    return [_row(change.name, cost, phase, pairs) for phase, pairs in by_phase.items()]


def _phase(change: Change, index: int, arrival_ms: float) -> str:
    if not change.together:
        return change.phases[min(index, 1)]
    by_time = change.disturbance is not UNDISTURBED
    return change.phases[min(int(arrival_ms / PHASE_MS) if by_time else index // LONG_PHASE, len(change.phases) - 1)]


def _row(name: str, cost: str, phase: str, pairs: Sequence[tuple[float, float]]) -> dict[str, object]:
    ratios = [ratio for ratio, _ in pairs]
    return {
        "what changes": name,
        "rows": cost,
        "phase": phase,
        "requests": len(pairs),
        "median ÷ off": round(median(ratios), 3),
        "slowest ÷ off": round(min(ratios), 3),
        "rounds that drafted": round(sum(share for _, share in pairs) / len(pairs), 3),
    }
