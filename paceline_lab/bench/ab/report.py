"""From turns to the tables of `bench ab`. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline_lab.bench.ab.arms import Arm, ArmsTurn, Stage
from paceline_lab.reporting.figures import Spread, lower_bound
from paceline_lab.reporting.presentation import markdown_table, spread_text

Line = dict[str, object]
NOTES = """\
Arms run one after the other in a turn, another one first each time. A ratio is of one turn; bounds are of its median
over turns, one-sided 95 %, by bootstrap. The first arm's second run, `again`, shows what noise does to a ratio.
`slowest` is the speed of the slowest request behind its first message. Prompts of real models are cached, but where
services start anew. `of the ideal` is the time of a simulated pair's rounds at no cost of coordination, over the time
that they took; of one user. CPU is the mean over turns, since the system counts it in steps of 10 ms.
"""


def arm_lines(stages: Sequence[Stage], turns: Sequence[ArmsTurn]) -> list[tuple[Line, Line]]:
    """Return the ratios and the figures of each arm of each case that was measured."""
    lines = []
    for stage in stages:
        for case in stage.cases:
            cell = [turn for turn in turns if (turn.stage, turn.case) == (stage.name, case.name)]
            for arm in stage.all_arms if cell else ():
                key: Line = {"stage": stage.name, "case": case.name, "arm": arm.name}
                lines.append((key | _ratios(arm, stage.arms[0], cell), key | _figures(arm, cell)))
    return lines


def _ratios(arm: Arm, first: Arm, turns: Sequence[ArmsTurn]) -> Line:
    pairs = [(turn.runs[arm.name], turn.runs[first.name]) for turn in turns]
    speeds = [mine.tokens_per_second / base.tokens_per_second for mine, base in pairs]
    slowest = [mine.slowest_per_second / base.slowest_per_second for mine, base in pairs if base.slowest_per_second]
    return {
        "turns": len(turns),
        "tokens/s": spread_text(Spread.of([mine.tokens_per_second for mine, _ in pairs])),
        f"÷ {first.name}": spread_text(Spread.of(speeds), 3),
        "lower 95 %": lower_bound(speeds),
        "slowest ÷ its slowest": spread_text(Spread.of(slowest), 3),
        "its lower 95 %": lower_bound(slowest),
        "same text": f"{sum(mine.text == base.text for mine, base in pairs)} of {len(pairs)}",
    }


def _figures(arm: Arm, turns: Sequence[ArmsTurn]) -> Line:
    runs = [turn.runs[arm.name] for turn in turns]
    cpu = {label: statistics.fmean(run.cpu_us[label] for run in runs) for label in runs[0].cpu_us}
    medians = {name: statistics.median(run.figures[name] for run in runs) for name in runs[0].figures}
    parts = ", ".join(f"{label} {part:.0f}" for label, part in cpu.items())
    return {**medians, "CPU µs a token": f"{sum(cpu.values()):.0f}", "by process": parts}


def ab_markdown(title: str, stages: Sequence[Stage], turns: Sequence[ArmsTurn]) -> str:
    """Write the report."""
    ratios, figures = zip(*arm_lines(stages, turns), strict=True)
    return f"# {title}\n\n{markdown_table(ratios)}\n## Figures of each arm\n\n{markdown_table(figures)}\n{NOTES}"
