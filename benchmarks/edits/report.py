"""From turns to the figures of `bench edits`, as JSON and as Markdown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.edits.run import AUTO_ALONE, AUTO_PREDICTED, LOOKUP, PLAIN, PREDICTED, SETTINGS, EditTurn
from benchmarks.reporting.figures import Spread, lower_bound
from benchmarks.reporting.presentation import Bars, Plot, markdown_table, spread_text

COMPARED = ((PREDICTED, LOOKUP), (AUTO_PREDICTED, AUTO_ALONE), (AUTO_PREDICTED, LOOKUP))
"""Which setting is set against which."""


@dataclass(frozen=True)
class EditComparison:
    """How much faster one setting's whole requests are than another's; `lower` bounds the median from below."""

    setting: str
    over: str
    ratio: Spread
    lower: float
    losses: tuple[str, ...]
    """Tasks on which it is slower."""


def comparisons(turns: Sequence[EditTurn]) -> list[EditComparison]:
    """Those of `COMPARED`, and each setting with target-only, over all turns."""
    plain = tuple((name, PLAIN) for name in SETTINGS if name != PLAIN)
    return [_comparison(turns, setting, over) for setting, over in (*COMPARED, *plain)]


def _comparison(turns: Sequence[EditTurn], setting: str, over: str) -> EditComparison:
    ratios = [turn.ratio(setting, over) for turn in turns]
    lost = tuple(dict.fromkeys(turn.task for turn in turns if turn.ratio(setting, over) < 1))
    return EditComparison(setting, over, Spread.of(ratios), lower_bound(ratios), lost)


def edits_json(turns: Sequence[EditTurn]) -> dict[str, Any]:
    """Everything that the Markdown says, and each turn; the report can be made from `turns` again."""
    return {"results": [asdict(each) for each in comparisons(turns)], "turns": [turn.as_json() for turn in turns]}


def edits_plots(turns: Sequence[EditTurn]) -> list[Plot]:
    """Each setting ÷ target-only by task, those that keep least first."""
    tasks = list(dict.fromkeys(turn.task for turn in _by_kept(turns)))
    bars = [
        Bars(name, [Spread.of([turn.ratio(name, PLAIN) for turn in turns if turn.task == task]) for task in tasks])
        for name in SETTINGS
        if name != PLAIN
    ]
    return [Plot("Edits of files: whole requests beside target-only", "times target-only", tasks, bars, line=1.0)]


NOTES = """\
Every figure is of one interleaved run on the same services. Ratios are of whole requests at the client, whose prompts
are cached; the bound is of the median over turns, one-sided 95 %, by bootstrap. `kept` is the share of the answer's
characters that stood in the file, in their order (runs of 4 and more). The file stands in every prompt, so n-gram
matches find it too; `prediction` has the file as predicted output besides, with the same drafter `ngram`. `auto` may
use the draft model as well. A rejected token that is proposed again counts again.
"""


def edits_markdown(turns: Sequence[EditTurn]) -> str:
    """The report."""
    ordered = _by_kept(turns)
    parts = ["# Predicted outputs on edits of files", "## In short\n", markdown_table(_summary(turns))]
    parts += [
        "## Edits: time of whole requests, target-only ÷ setting\n",
        markdown_table(list(map(_speeds, ordered))),
    ]
    parts += ["## Rounds\n", markdown_table(list(map(_rounds, ordered)))]
    parts += [_differences(ordered), NOTES]
    return "\n".join(part for part in parts if part)


def _summary(turns: Sequence[EditTurn]) -> list[dict[str, object]]:
    return [
        {
            "setting": each.setting,
            "over": each.over,
            "faster (min to max)": spread_text(each.ratio, 2),
            "lower 95 %": f"{each.lower:.2f}",
            "slower on": ", ".join(each.losses) or "-",
        }
        for each in comparisons(turns)
    ]


def _by_kept(turns: Sequence[EditTurn]) -> list[EditTurn]:
    tasks = {turn.task: statistics.median(each.kept for each in turns if each.task == turn.task) for turn in turns}
    return sorted(turns, key=lambda turn: (tasks[turn.task], turn.task, turn.temperature, turn.number))


def _key(turn: EditTurn) -> dict[str, object]:
    return {"edit": turn.task, "T": f"{turn.temperature:g}", "kept": f"{turn.kept:.0%}"}


def _speeds(turn: EditTurn) -> dict[str, object]:
    plain = turn.runs[PLAIN]
    return (
        _key(turn)
        | {"tokens": plain.tokens, "target-only tok/s": f"{plain.tokens_per_second:.2f}"}
        | {name: f"{turn.ratio(name, PLAIN):.2f}" for name in SETTINGS if name != PLAIN}
        | {"prediction ÷ n-gram": f"{turn.ratio(PREDICTED, LOOKUP):.2f}"}
    )


def _rounds(turn: EditTurn) -> dict[str, object]:
    predicted = turn.runs[PREDICTED]
    return (
        _key(turn)
        | {f"rounds: {name}": turn.runs[name].rounds for name in SETTINGS}
        | {
            "n-gram accepted of proposed": f"{turn.runs[LOOKUP].accepted} of {turn.runs[LOOKUP].proposed}",
            "prediction: accepted, rejected": f"{predicted.prediction_accepted}, {predicted.prediction_rejected}",
        }
    )


def _differences(turns: Sequence[EditTurn]) -> str:
    found = [
        f"- {turn.task} T={turn.temperature:g}: {name}, from token {run.difference}\n"
        for turn in turns
        for name, run in turn.runs.items()
        if run.difference is not None
    ]
    return (
        "## Texts that differ from target-only's\n\n" + "".join(found)
        if found
        else "All texts equal target-only's.\n"
    )
