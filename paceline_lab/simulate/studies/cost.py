"""What does a token cost, beside the same GPUs without drafting, at 10 to 10,000 GPUs?"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_lab.simulate.cluster import run_cell
from paceline_lab.simulate.outcome import ClusterOutcome, outcome
from paceline_lab.simulate.studies.parts import StudiedModel, Study, bars, scenario_of

FLEETS = (10, 100, 1_000, 10_000)
CELL_GPUS = 10
SESSIONS = (4, 20, 60)
"""Of a cell at once: closed loop."""
MOST_SIMULATED = 2
"""Cells of a fleet that are simulated; they share nothing."""
MODEL = StudiedModel("qwen3-32b", 2, "qwen3-0.6b", draft_gpu="h100")
DRAFTED_TARGETS, PLAIN_TARGETS, DRAFTS = 4, 5, 2
"""4 targets of 2 GPUs and 2 drafts, or 5 targets: 10 GPUs."""


@dataclass(frozen=True)
class ComparedFleet:
    """The same GPUs with drafting and without."""

    gpus: int
    sessions: int
    drafted: ClusterOutcome
    plain: ClusterOutcome

    @property
    def saving(self) -> float:
        """What a token costs without drafting, over what it costs with it."""
        return self.plain.cost_per_million / self.drafted.cost_per_million

    def row(self) -> dict[str, object]:
        """Of the table."""
        return {
            "GPUs": self.gpus,
            "sessions a GPU": self.sessions / CELL_GPUS,
            "cells": self.drafted.cells,
            "simulated": self.drafted.simulated_cells,
            "tokens/s": round(self.drafted.tokens_per_second),
            "without drafts": round(self.plain.tokens_per_second),
            "cost per million": round(self.drafted.cost_per_million, 3),
            "cost without drafts": round(self.plain.cost_per_million, 3),
            "saving": round(self.saving, 3),
            "per token p50 ms": round(self.drafted.groups[0].tpot_p50_ms, 2),
            "p50 without drafts": round(self.plain.groups[0].tpot_p50_ms, 2),
            "drafts busy": f"{self.drafted.draft_busy:.0%}",
            "bottleneck": self.drafted.bottleneck,
        }


def study(seed: int) -> Study:
    """Run it."""
    fleets = [each for sessions in SESSIONS for each in _fleets(sessions, seed)]
    savings = {
        f"{sessions / CELL_GPUS:g} sessions a GPU": [each.saving for each in fleets if each.sessions == sessions]
        for sessions in SESSIONS
    }
    spread = max(
        abs(each.saving / fleets[number - number % len(FLEETS)].saving - 1) for number, each in enumerate(fleets)
    )
    return Study(
        "study-cost",
        "What does a token cost beside the same GPUs without drafting?",
        f"{MODEL.target} on {MODEL.tensor_parallel} H100, {MODEL.draft} on one, at 2.5 a GPU and hour (assumed). "
        f"Cells of {CELL_GPUS} GPUs: {DRAFTED_TARGETS} targets and {DRAFTS} drafts with `auto`, or {PLAIN_TARGETS} "
        f"targets without drafts. A fleet is as many cells as fit, of which up to {MOST_SIMULATED} are simulated, "
        "each with other requests, and scaled up; what grows with a fleet and is in no cell (networks, gateways) is "
        "not here.",
        "".join(f"- {label}: {ratios[0]:.2f} times cheaper with drafts\n" for label, ratios in savings.items())
        + f"- Fleets of one to {MOST_SIMULATED} simulated cells differ by at most {spread:.1%} in this ratio.\n",
        [each.row() for each in fleets],
        [bars("Cost without drafts over cost with them", "times", [f"{g} GPUs" for g in FLEETS], savings, 1.0)],
    )


def _fleets(sessions: int, seed: int) -> list[ComparedFleet]:
    """Fleets of the same cells, of which each takes the first ones."""
    traffic = {"sessions": sessions}
    drafted = scenario_of(MODEL.targets(DRAFTED_TARGETS), traffic, drafts=MODEL.drafts(DRAFTS), seed=seed)
    plain = scenario_of(MODEL.targets(PLAIN_TARGETS), traffic, k="0", seed=seed)
    records = [[run_cell(each, cell) for cell in range(MOST_SIMULATED)] for each in (drafted, plain)]
    fleets = []
    for gpus in FLEETS:
        cells = gpus // CELL_GPUS
        both = [
            outcome(each.model_copy(update={"cells": cells}), ran[:cells])
            for each, ran in zip((drafted, plain), records, strict=True)
        ]
        fleets.append(ComparedFleet(gpus, sessions, *both))
    return fleets
