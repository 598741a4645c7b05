"""Pairs, costs and loads on which a policy is judged: beside target-only request by request, and the best constant.

`python -m paceline_lab.simulate.grid` runs all of it and prints where the planner misses a bar. Every case is a fresh
coordinator with simulated services in virtual time, so a figure is the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from paceline.costs.acceptance import FAN_OUT
from paceline.costs.cost_line import CostLine
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, write_report
from paceline_lab.simulate.disturbances import UNDISTURBED, Disturbance
from paceline_lab.simulate.known_misses import Miss, renew_misses
from paceline_lab.simulate.policies import PLANNED, TARGET_ONLY, Policy
from paceline_lab.simulate.processes import on_all_cores
from paceline_lab.simulate.run import SimulatedRun, best_of, simulate
from paceline_lab.simulate.synthetic import PAIRS, synthetic_requests
from paceline_lab.simulate.trace import TracedRequest, TracedSetting

LOADS = (1, 8, 32, 64)
"""Sessions at once: all cases of 256 would take a core the better part of an hour."""
TOKENS = 128
LEAST_REQUEST = 0.97
"""Of target-only's speed: what every request must reach."""
LEAST_GOODPUT = 0.95
"""Of the best constant's goodput."""
WAVES = 2
"""Requests one after the other in each of the places at once."""
FEWEST_REQUESTS = 8
CONSTANTS = (
    TARGET_ONLY,
    *(Policy(k, 0) for k in (1, 2, 4, 8)),
    *(Policy(k) for k in (2, 4, 8)),
)


def straight(first_ms: float, row_ms: float) -> CostLine:
    """A line of equal rows."""
    return CostLine(((1.0, first_ms), (257.0, first_ms + 256 * row_ms)))


TARGETS = {"cheap": straight(20.0, 0.05), "dear": straight(20.0, 0.5)}
"""Rows of a target step: as of a busy accelerator, and as of a CPU."""
DRAFTS = {"quick": straight(2.0, 0.02), "slow": straight(5.0, 0.05)}
SHARED = 1.35
"""How much longer a target step takes while a draft works on its cores."""


@dataclass(frozen=True)
class GridCase:
    """One pair under one load, of `fewest` requests or more."""

    pair: str
    sessions: int = 1
    rows: str = "cheap"
    draft: str = "quick"
    shared: bool = False
    one_way_ms: float = 0.3
    seed: int = 0
    fewest: int = FEWEST_REQUESTS

    @property
    def name(self) -> str:
        """For tables and tests."""
        place = "beside" if self.shared else "apart"
        return f"{self.pair}-{self.sessions}-{self.rows}-{self.draft}-{place}-{self.one_way_ms:g}ms"

    @property
    def setting(self) -> TracedSetting:
        """Its services."""
        alone = TARGETS[self.rows]
        return TracedSetting(
            alone=alone,
            beside=alone.scale(SHARED) if self.shared else CostLine(),
            draft=DRAFTS[self.draft],
            target_one_way_ms=self.one_way_ms,
            draft_one_way_ms=self.one_way_ms,
            coordinator_ms=0.05,
            fan_out=FAN_OUT,
            concurrency=self.sessions,
        )

    @property
    def requests(self) -> tuple[TracedRequest, ...]:
        """Its texts."""
        count = max(self.fewest, WAVES * self.sessions)
        return synthetic_requests(PAIRS[self.pair], count, TOKENS, seed=self.seed)


@dataclass(frozen=True)
class Judgement:
    """What a policy reached, and what would have been best."""

    case: GridCase
    run: SimulatedRun
    plain: SimulatedRun
    best: SimulatedRun

    @property
    def worst_request(self) -> float:
        """The slowest request beside itself under target-only."""
        return self.run.least_over(self.plain)

    @property
    def goodput(self) -> float:
        """Beside the best constant's."""
        return self.run.tokens_per_second / self.best.tokens_per_second

    @property
    def holds(self) -> bool:
        """Whether both bars are met."""
        return self.worst_request >= LEAST_REQUEST and self.goodput >= LEAST_GOODPUT

    @property
    def miss(self) -> Miss | None:
        """What was reached, as tables show it; None: both bars are met."""
        return None if self.holds else Miss(round(self.worst_request, 3), round(self.goodput, 3))

    def row(self) -> dict[str, object]:
        """A table's line: what the policy did, and what would have been best."""
        run = self.run
        totals = run.requests
        drafted = sum(each.drafted_rounds for each in totals)
        return {
            "case": self.case.name,
            "worst request over target-only": round(self.worst_request, 3),
            "goodput over target-only": round(run.tokens_per_second / self.plain.tokens_per_second, 3),
            "best constant": f"{self.best.policy}: {self.best.tokens_per_second / self.plain.tokens_per_second:.3f}",
            "of the best": round(self.goodput, 3),
            "drafted rounds": f"{drafted / run.rounds:.0%}",
            "proposed": f"{sum(each.proposed for each in totals) / max(1, drafted):.1f}",
            "accepted": f"{sum(each.accepted for each in totals) / max(1, drafted):.1f}",
            "hits": f"{sum(each.hits for each in totals) / run.rounds:.0%}",
            "by the target": f"{sum(each.self_started for each in totals) / run.rounds:.0%}",
            "waited": f"{sum(each.waited_ms for each in totals) / sum(e.end_ms - e.first_ms for e in totals):.0%}",
        }


def judge(
    case: GridCase,
    policy: Policy,
    constants: Sequence[Policy] = CONSTANTS,
    disturbance: Disturbance = UNDISTURBED,
    coordinators: int = 1,
) -> Judgement:
    """Run a policy, target-only, and constants on one case. Coordinators share the services, and nothing else."""
    setting, requests = case.setting, case.requests

    def run(each: Policy) -> SimulatedRun:
        return simulate(setting, requests, [each] * coordinators, disturbance)

    plain = run(TARGET_ONLY)
    others = (each for each in constants if each.name != TARGET_ONLY.name)
    best = best_of([plain, *(run(each) for each in others)])
    return Judgement(case, run(policy), plain, best)


def cases(sessions: Sequence[int]) -> Iterator[GridCase]:
    """All of the grid at these loads."""
    for count, pair, rows, draft, shared in product(sessions, PAIRS, TARGETS, DRAFTS, (False, True)):
        yield GridCase(pair, count, rows, draft, shared)


ABOUT = f"""# The planner in the simulator

Every case is a fresh coordinator with simulated services in virtual time: {len(PAIRS)} kinds of synthetic texts of
{TOKENS} tokens, a target's step of 20 ms with rows cheap (.05 ms) or dear (.5 ms), a draft's step quick (2 ms) or
slow (5 ms), on cores of its own or beside the target (whose steps then take {SHARED} times as long). The bars:
every request at {LEAST_REQUEST} of itself under target-only, and goodput at {LEAST_GOODPUT} of the best of
{len(CONSTANTS)} constants.
"""


def grid_text(judgements: Sequence[Judgement], *, everything: bool) -> str:
    """The report: what misses a bar, or everything."""
    misses = [each for each in judgements if not each.holds]
    rows = [each.row() for each in (judgements if everything else misses)]
    return f"{ABOUT}\n{markdown_table(rows)}\n{len(misses)} of {len(judgements)} cases miss a bar.\n"


def main() -> None:
    """Print where the planner misses a bar."""
    parser = argparse.ArgumentParser(description="Where the planner misses a bar, and what would have been best.")
    parser.add_argument("--sessions", default=",".join(map(str, LOADS)), help="loads, with commas between")
    parser.add_argument("--pairs", default=",".join(PAIRS), help="names of pairs, with commas between")
    parser.add_argument("--rows", default=",".join(TARGETS), help="what rows of the target are, with commas between")
    parser.add_argument("--drafts", default=",".join(DRAFTS), help="what drafts are, with commas between")
    parser.add_argument("--all", action="store_true", help="print what holds, too")
    parser.add_argument("--record", type=Path, help="a file of known misses, to be renewed by what runs")
    parser.add_argument("--out", type=Path, help="folder of the report")
    arguments = parser.parse_args()
    pairs, rows, drafts = (each.split(",") for each in (arguments.pairs, arguments.rows, arguments.drafts))
    selection = [
        case
        for case in cases([int(count) for count in arguments.sessions.split(",")])
        if case.pair in pairs and case.rows in rows and case.draft in drafts
    ]
    judgements = on_all_cores(partial(judge, policy=PLANNED), selection)
    text = grid_text(judgements, everything=arguments.all)
    if arguments.record is not None:
        renew_misses(arguments.record, {each.case.name: each.miss for each in judgements})
    if arguments.out is not None:
        write_report(arguments.out, "planner-grid", describe(), {"cases": [each.row() for each in judgements]}, text)
    print(text)


if __name__ == "__main__":
    main()
