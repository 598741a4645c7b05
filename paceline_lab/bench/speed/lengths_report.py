"""From turns to the figures of `bench speed --k --alone`, as JSON and as Markdown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.protocol.proposal import AUTO
from paceline_lab.bench.speed.lengths import OFF, PLAIN, LengthRun, LengthsTurn
from paceline_lab.reporting.figures import Spread, lower_bound
from paceline_lab.reporting.presentation import Bars, Plot, markdown_table, spread_text

_SHOWN_DEPTHS = 6


@dataclass(frozen=True)
class LengthsRow:
    """One kind of prompt at one temperature. Ratios are of tokens per second after the first round, turn by turn.

    Attributes:
        turns: that count; `left_out` had an answer too short to have a speed.
        plain: target-only's tokens per second.
        noise: target-only ÷ target-only.
        ratios: each constant, and `auto`, ÷ target-only.
        ceilings: median ratios if drafting and coordination had cost nothing, from the target's own step times.
        accepted: accepted tokens ÷ rounds.
        by_depth: of the rounds with a proposal, the share that accepted 1, 2, … tokens or more.
        feature_bytes: of the target's hidden states, ÷ tokens written.
        best: the fixed setting whose median ratio is greatest.
        over_best: `auto` ÷ that one.
        worst: the prompt on which `auto` ÷ target-only is least.
        request_ratio: whole requests of `auto`, whose prompts are cached.
        differences: (prompt, pass, setting, token) where a text that had to be target-only's first differed.
    """

    kind: str
    temperature: float
    turns: int
    left_out: int
    plain: Spread
    noise: Spread
    ratios: Mapping[str, Spread]
    ceilings: Mapping[str, float]
    accepted: Mapping[str, float]
    by_depth: Mapping[str, tuple[float, ...]]
    feature_bytes: Mapping[str, float]
    best: str
    over_best: Spread
    auto_lower: float
    worst: str
    request_ratio: Spread
    differences: tuple[tuple[str, int, str, int], ...]

    @property
    def auto(self) -> Spread:
        """`auto` ÷ target-only."""
        return self.ratios[AUTO]


def lengths_rows(turns: Sequence[LengthsTurn]) -> list[LengthsRow]:
    """One row for each kind and temperature of which something was measured, in the order in which they first ran."""
    cells: dict[tuple[str, float], list[LengthsTurn]] = {}
    for turn in turns:
        cells.setdefault((turn.kind, turn.temperature), []).append(turn)
    return [_row(cell) for cell in cells.values() if any(turn.is_measured for turn in cell)]


def _row(cell: Sequence[LengthsTurn]) -> LengthsRow:
    turns = [turn for turn in cell if turn.is_measured]
    settings = [name for name in turns[0].runs if name != PLAIN]
    ratios = {name: Spread.of([turn.ratio(name) for turn in turns]) for name in settings}
    best = max((name for name in settings if name != AUTO), key=lambda name: ratios[name].median)
    worst = min(turns, key=lambda turn: turn.ratio(AUTO))
    return LengthsRow(
        kind=turns[0].kind,
        temperature=turns[0].temperature,
        turns=len(turns),
        left_out=len(cell) - len(turns),
        plain=Spread.of([turn.runs[PLAIN].tokens_per_second for turn in turns]),
        noise=ratios[OFF],
        ratios=ratios,
        ceilings={name: _ceiling(turns, name) for name in settings},
        accepted={name: _accepted([turn.runs[name] for turn in turns]) for name in settings},
        by_depth={name: _by_depth([turn.runs[name] for turn in turns]) for name in settings},
        feature_bytes={name: _feature_bytes([turn.runs[name] for turn in turns]) for name in settings},
        best=best,
        over_best=Spread.of([turn.ratio(AUTO, best) for turn in turns]),
        auto_lower=lower_bound([turn.ratio(AUTO) for turn in turns]),
        worst=worst.prompt,
        request_ratio=Spread.of([turn.runs[PLAIN].wall_s / turn.runs[AUTO].wall_s for turn in turns]),
        differences=tuple(
            (turn.prompt, turn.number, name, run.difference)
            for turn in cell
            for name, run in turn.runs.items()
            if run.difference is not None
        ),
    )


def _accepted(runs: Sequence[LengthRun]) -> float:
    return sum(run.accepted for run in runs) / max(1, sum(run.rounds for run in runs))


def _by_depth(runs: Sequence[LengthRun]) -> tuple[float, ...]:
    deepest = max(len(run.accepted_histogram) for run in runs)
    counts = [sum(sum(run.accepted_histogram[depth:]) for run in runs) for depth in range(deepest)]
    return tuple(count / counts[0] for count in counts[1:])


def _feature_bytes(runs: Sequence[LengthRun]) -> float:
    return sum(run.feature_bytes for run in runs) / max(1, sum(run.tokens for run in runs))


def _ceiling(turns: Sequence[LengthsTurn], name: str) -> float:
    """0 where the steps' times are not known."""
    known = [turn for turn in turns if turn.runs[PLAIN].target_s > 0 and turn.runs[name].target_s > 0]
    ratios = [turn.runs[name].free_tokens_per_second / turn.runs[PLAIN].free_tokens_per_second for turn in known]
    return statistics.median(ratios) if ratios else 0.0


def lengths_json(rows: Sequence[LengthsRow], turns: Sequence[LengthsTurn]) -> dict[str, Any]:
    """Everything that the Markdown says, and each turn; the report can be made from `turns` again."""
    return {"results": [asdict(row) for row in rows], "turns": [turn.as_json() for turn in turns]}


def lengths_plots(rows: Sequence[LengthsRow]) -> list[Plot]:
    """`auto` and each row's best fixed setting with their ceilings, a plot for each temperature."""
    plots = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        shown = [row for row in rows if row.temperature == temperature]
        best = Bars("best fixed", [row.ratios[row.best] for row in shown], [row.ceilings[row.best] for row in shown])
        auto = Bars(AUTO, [row.auto for row in shown], [row.ceilings[AUTO] for row in shown])
        title = f"Speed-up over target-only, temperature {temperature:g} (dashed: ceiling)"
        plots.append(Plot(title, "times target-only", [row.kind for row in shown], [best, auto], line=1.0))
    return plots


NOTES = """\
Every figure is of one interleaved run on the same services, target-only too. A fixed setting is a constant k or one
drafter alone. Ratios are medians over turns (one prompt, one seed) of tokens per second after the first round's
tokens; `noise` is target-only over target-only. The best fixed setting is chosen for each row after the fact, from as
many medians as there are settings, so noise favours it. A ceiling is what the same proposals and acceptances would
gain if drafting and coordination cost nothing, from the target's own step times. Prompts are cached when a turn
begins, which whole requests show.
"""


def lengths_markdown(rows: Sequence[LengthsRow]) -> str:
    """The report."""
    if not rows:
        return "# Auto beside fixed settings\n\nNo answer was long enough to have a speed.\n"
    parts = ["# Auto beside fixed settings", "## In short\n", summary(rows)]
    parts += ["## Rows\n", markdown_table([_main_line(row) for row in rows])]
    parts += ["## Each setting ÷ target-only (its ceiling)\n", _settings_table(rows, _with_ceiling)]
    parts += ["## Accepted tokens a round\n", _settings_table(rows, lambda row, name: f"{row.accepted[name]:.2f}")]
    if any(depths for row in rows for depths in row.by_depth.values()):
        parts += ["## Rounds that accept 1, 2, … of what was proposed, or more\n", _settings_table(rows, _depths)]
    if any(held for row in rows for held in row.feature_bytes.values()):
        by_setting = _settings_table(rows, lambda row, name: f"{row.feature_bytes[name]:.0f}")
        parts += ["## Bytes of hidden states a token\n", by_setting]
    parts += [_differences(rows), NOTES]
    return "\n".join(part for part in parts if part)


def summary(rows: Sequence[LengthsRow]) -> str:
    """Least and median over the rows, in one line each."""
    return "".join(
        _summary_line(title, rows, value)
        for title, value in (
            ("auto ÷ best fixed", lambda row: row.over_best.median),
            ("auto ÷ target-only", lambda row: row.auto.median),
            ("noise (target-only ÷ target-only)", lambda row: row.noise.median),
        )
    )


def _summary_line(title: str, rows: Sequence[LengthsRow], value: Callable[[LengthsRow], float]) -> str:
    least = min(rows, key=value)
    median = statistics.median(value(row) for row in rows)
    where = f"{least.kind}, T={least.temperature:g}"
    return f"- {title}, over {len(rows)} rows: least {value(least):.3f} ({where}), median {median:.3f}\n"


def _key(row: LengthsRow) -> dict[str, object]:
    return {"kind": row.kind, "T": f"{row.temperature:g}"}


def _main_line(row: LengthsRow) -> dict[str, object]:
    return _key(row) | {
        "turns": f"{row.turns} ({row.left_out} too short)" if row.left_out else row.turns,
        "target-only tok/s": f"{row.plain.median:.2f}",
        "noise (min to max)": spread_text(row.noise, 2),
        "best fixed": f"{row.best}: {row.ratios[row.best].median:.2f}",
        "auto (min to max)": spread_text(row.auto, 2),
        "lower 95 %": f"{row.auto_lower:.2f}",
        "auto's ceiling": f"{row.ceilings[AUTO]:.2f}" if row.ceilings[AUTO] else "?",
        "auto ÷ best fixed": spread_text(row.over_best, 2),
        "auto's worst prompt": f"{row.worst}: {row.auto.low:.2f}",
        "whole request": f"{row.request_ratio.median:.2f}",
    }


def _settings_table(rows: Sequence[LengthsRow], cell: Callable[[LengthsRow, str], str]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.ratios))
    return markdown_table(
        [_key(row) | {name: cell(row, name) if name in row.ratios else "-" for name in names} for row in rows]
    )


def _with_ceiling(row: LengthsRow, name: str) -> str:
    ceiling = row.ceilings[name]
    return f"{row.ratios[name].median:.2f}" + (f" ({ceiling:.2f})" if ceiling else "")


def _depths(row: LengthsRow, name: str) -> str:
    return " ".join(f"{share:.2f}" for share in row.by_depth[name][:_SHOWN_DEPTHS]) or "-"


def _differences(rows: Sequence[LengthsRow]) -> str:
    found = [
        f"- {row.kind} T={row.temperature:g} {setting}: prompt {prompt}, pass {number}, from token {at}\n"
        for row in rows
        for prompt, number, setting, at in row.differences
    ]
    return "## Texts that differ from target-only's\n\n" + "".join(found) if found else ""
