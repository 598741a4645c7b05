"""From turns to the figures of `bench edits`, as JSON and as Markdown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline_lab.bench.edits.run import (
    AUTO_ALONE,
    AUTO_PREDICTED,
    LOOKUP,
    PLAIN,
    PREDICTED,
    SETTINGS,
    EditRun,
    EditStepLine,
    EditTurn,
)
from paceline_lab.reporting.figures import Spread, lower_bound
from paceline_lab.reporting.presentation import Bars, Plot, markdown_table, spread_text

COMPARED = ((PREDICTED, LOOKUP), (AUTO_PREDICTED, AUTO_ALONE), (AUTO_PREDICTED, LOOKUP))
"""Which setting is set against which."""


@dataclass(frozen=True)
class EditComparison:
    """How much faster one setting is than another.

    Attributes:
        ratio: of whole requests; `lower` bounds the median from below.
        steps, steps_lower: the same of the target's steps, each round counted as its rows take in the median.
        losses: tasks on which its steps take longer.
    """

    setting: str
    over: str
    ratio: Spread
    lower: float
    steps: Spread
    steps_lower: float
    losses: tuple[str, ...]


def settings_in(turns: Sequence[EditTurn]) -> list[str]:
    """Those that were measured."""
    return [name for name in SETTINGS if name in turns[0].runs]


def comparisons(turns: Sequence[EditTurn]) -> list[EditComparison]:
    """Those of `COMPARED`, and each setting with target-only, over all turns, as far as they were measured."""
    measured, line = settings_in(turns), EditStepLine.of(turns)
    pairs = (*COMPARED, *((name, PLAIN) for name in measured if name != PLAIN))
    return [_comparison(turns, *pair, line) for pair in pairs if set(pair) <= {*measured}]


def _comparison(turns: Sequence[EditTurn], setting: str, over: str, line: EditStepLine) -> EditComparison:
    ratios = [turn.ratio(setting, over) for turn in turns]
    steps = [_steps_ratio(turn, setting, over, line) for turn in turns]
    lost = tuple(dict.fromkeys(turn.task for turn, ratio in zip(turns, steps, strict=True) if ratio < 1))
    return EditComparison(
        setting, over, Spread.of(ratios), lower_bound(ratios), Spread.of(steps), lower_bound(steps), lost
    )


def _steps_ratio(turn: EditTurn, setting: str, over: str, line: EditStepLine) -> float:
    """Time of the target's steps by one line for all, one setting beside another; above 1: less time."""
    below = line.seconds(turn.runs[setting])
    return line.seconds(turn.runs[over]) / below if below else 0.0


def edits_json(turns: Sequence[EditTurn]) -> dict[str, Any]:
    """Everything that the Markdown says, and each turn; the report can be made from `turns` again."""
    return {"results": [asdict(each) for each in comparisons(turns)], "turns": [turn.as_json() for turn in turns]}


def edits_plots(turns: Sequence[EditTurn]) -> list[Plot]:
    """Each setting beside the first by task, those that keep least first."""
    base, *others = settings_in(turns)
    line, tasks = EditStepLine.of(turns), list(dict.fromkeys(turn.task for turn in _by_kept(turns)))

    def spread(name: str, task: str) -> Spread:
        return Spread.of([_steps_ratio(turn, name, base, line) for turn in turns if turn.task == task])

    bars = [Bars(name, [spread(name, task) for task in tasks]) for name in others]
    return [Plot(f"Edits of files: the target's steps beside {base}", f"times {base}", tasks, bars, line=1.0)]


NOTES = """\
Every figure is of one interleaved run on the same services. Ratios are of whole requests at the client, whose prompts
are cached; bounds are of the median over turns, one-sided 95 %, by bootstrap. `by steps` counts each round as its
rows take in the median over the whole run, by one line for all settings: other work on the machine hardly moves it.
`a token a step` is what target-only's steps take by that line. `kept` is the share of the answer's characters that
stood in the file, in their order (runs of 4 and more). The file stands in every prompt, so n-gram matches find it
too; `prediction` has the file as predicted output besides, with the same drafter `ngram`. `auto` may use the draft
model as well. A rejected token that is proposed again counts again.
"""


def edits_markdown(turns: Sequence[EditTurn]) -> str:
    """The report."""
    ordered, line = _by_kept(turns), EditStepLine.of(turns)
    took = (
        f"A step of one row took {line.one_row_ms:.0f} ms in the median, and {line.row_ms:.1f} ms for each row more."
    )
    parts = ["# Predicted outputs on edits of files", "## In short\n", markdown_table(_summary(turns)), f"{took}\n"]
    parts += ["## Edits: seconds of whole requests (by steps)\n"]
    parts += [markdown_table([_seconds(turn, line) for turn in ordered])]
    parts += ["## Rounds: accepted of proposed tokens\n", markdown_table([_rounds(turn) for turn in ordered])]
    parts += [_differences(ordered), NOTES]
    return "\n".join(part for part in parts if part)


def _summary(turns: Sequence[EditTurn]) -> list[dict[str, object]]:
    return [
        {
            "setting": each.setting,
            "over": each.over,
            "faster (min to max)": spread_text(each.ratio, 2),
            "lower 95 %": f"{each.lower:.2f}",
            "by steps (min to max)": spread_text(each.steps, 2),
            "its lower 95 %": f"{each.steps_lower:.2f}",
            "more time in steps on": ", ".join(each.losses) or "-",
        }
        for each in comparisons(turns)
    ]


def _by_kept(turns: Sequence[EditTurn]) -> list[EditTurn]:
    tasks = {turn.task: statistics.median(each.kept for each in turns if each.task == turn.task) for turn in turns}
    return sorted(turns, key=lambda turn: (tasks[turn.task], turn.task, turn.temperature, turn.number))


def _key(turn: EditTurn) -> dict[str, object]:
    return {"edit": turn.task, "T": f"{turn.temperature:g}", "kept": f"{turn.kept:.0%}"}


def _seconds(turn: EditTurn, line: EditStepLine) -> dict[str, object]:
    tokens = next(iter(turn.runs.values())).tokens
    times = {name: f"{run.wall_s:.1f} ({line.seconds(run):.1f})" for name, run in turn.runs.items()}
    return _key(turn) | {"tokens": tokens, "a token a step": f"({tokens * line.one_row_ms / 1e3:.1f})"} | times


def _rounds(turn: EditTurn) -> dict[str, object]:
    return _key(turn) | {name: _accepted_text(run) for name, run in turn.runs.items()}


def _accepted_text(run: EditRun) -> str:
    """Rounds, then all proposed tokens, then those of the prediction."""
    predicted = run.prediction_accepted + run.prediction_rejected
    of_them = f"; predicted {run.prediction_accepted} of {predicted}" if predicted else ""
    return f"{run.rounds}: {run.accepted} of {run.proposed}{of_them}"


def _differences(turns: Sequence[EditTurn]) -> str:
    found = [
        f"- {turn.task} T={turn.temperature:g}: {name}, from token {run.difference}\n"
        for turn in turns
        for name, run in turn.runs.items()
        if run.difference is not None
    ]
    return "## Texts that differ\n\n" + "".join(found) if found else "All settings wrote the same texts.\n"
