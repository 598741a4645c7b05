"""How many draft services does a target need, by the target's size and by load?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from paceline_lab.simulate.outcome import ClusterOutcome
from paceline_lab.simulate.processes import run_all
from paceline_lab.simulate.studies.parts import LARGE, MIDDLE, SMALL, StudiedModel, Study, bars, run

TARGETS = 2
DRAFTS = (1, 2, 4)
SESSIONS = (1, 8, 32)
"""Of each target at once."""
WORTHWHILE = 0.02
"""A draft service more has to bring so much for it to be named."""


@dataclass(frozen=True)
class DraftRatio:
    """One model at one load: target-only, and with each number of drafts."""

    model: StudiedModel
    sessions: int
    plain: ClusterOutcome
    drafted: Mapping[int, ClusterOutcome]

    def gain(self, drafts: int) -> float:
        """Tokens per second over target-only's."""
        return self.drafted[drafts].tokens_per_second / self.plain.tokens_per_second

    @property
    def needed(self) -> int:
        """The fewest drafts from which more bring next to nothing; 0: none pays."""
        best = max(self.gain(drafts) for drafts in DRAFTS)
        if best < 1 + WORTHWHILE:
            return 0
        return next(drafts for drafts in DRAFTS if self.gain(drafts) >= best - WORTHWHILE)

    def rows(self) -> Iterator[dict[str, object]]:
        """Of the table."""
        for drafts, outcome in self.drafted.items():
            yield {
                "target": f"{self.model.target}, {self.model.tensor_parallel} {self.model.gpu}",
                "sessions a target": self.sessions,
                "drafts a target": drafts / TARGETS,
                "tokens/s": round(outcome.tokens_per_second, 1),
                "target-only tokens/s": round(self.plain.tokens_per_second, 1),
                "over target-only": round(self.gain(drafts), 3),
                "cost over target-only": round(outcome.cost_per_million / self.plain.cost_per_million, 3),
                "drafts busy": f"{outcome.draft_busy:.0%}",
                "tokens a round": round(outcome.tokens_per_round, 2),
                "per token p99 ms": round(outcome.groups[0].tpot_p99_ms, 2),
                "target-only p99 ms": round(self.plain.groups[0].tpot_p99_ms, 2),
                "bottleneck": outcome.bottleneck,
            }


def study(seed: int) -> Study:
    """Run it."""
    loads = [(model, sessions) for model in (SMALL, MIDDLE, LARGE) for sessions in SESSIONS]
    cells = {(*load, count): _cell(*load, count, seed) for load in loads for count in (0, *DRAFTS)}
    outcomes = run_all(cells)
    ratios = [
        DraftRatio(*load, outcomes[*load, 0], {count: outcomes[*load, count] for count in DRAFTS}) for load in loads
    ]
    groups = [f"{each.model.target} {each.sessions}" for each in ratios]
    gains = {f"{drafts / TARGETS:g} a target": [each.gain(drafts) for each in ratios] for drafts in DRAFTS}
    return Study(
        "study-drafts",
        "How many drafts does a target need?",
        f"{TARGETS} targets in a cell; `auto`; drafts on an L40S each; sessions without a pause (closed loop).",
        "".join(f"- {_said(each)}\n" for each in ratios),
        [row for each in ratios for row in each.rows()],
        [bars("Speed over target-only, by model and sessions a target", "times", groups, gains, 1.0)],
    )


def _cell(model: StudiedModel, sessions: int, drafts: int, seed: int) -> partial[ClusterOutcome]:
    """Both targets with so many drafts; 0: target-only."""
    targets, traffic = model.targets(TARGETS), {"sessions": TARGETS * sessions}
    if not drafts:
        return partial(run, targets, traffic, k="0", seed=seed)
    return partial(run, targets, traffic, drafts=model.drafts(drafts), seed=seed)


def _said(each: DraftRatio) -> str:
    where = f"{each.model.target} with {each.sessions} sessions a target"
    if not each.needed:
        return f"{where}: drafting brings less than {WORTHWHILE:.0%}"
    gain = each.gain(each.needed)
    return f"{where}: {each.needed / TARGETS:g} a target, {gain:.2f} times target-only's tokens per second"
