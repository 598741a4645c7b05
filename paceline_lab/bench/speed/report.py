"""From turns to the figures of `bench speed`, as JSON and as Markdown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.protocol.proposal import AUTO
from paceline_lab.bench.speed.run import SpeedRun, SpeedTurn
from paceline_lab.bench.speed.settings import AGAIN, PLAIN
from paceline_lab.reporting.figures import Spread, lower_bound
from paceline_lab.reporting.presentation import Bars, Plot, markdown_table, spread_text

_SHOWN_DEPTHS = 6


@dataclass(frozen=True)
class SettingFigures:
    """One setting on one kind of prompt at one temperature; ratios are over target-only, turn by turn.

    Attributes:
        speed, ratio: tokens per second after the first round; `ratio_lower` bounds the median ratio from below.
        request_ratio: ratio of whole requests, whose prompts are cached.
        ceiling: median ratio if drafting and coordination had cost nothing, by the target's own steps; 0: unknown.
        acceptance: accepted ÷ proposed; accepted_length: 1 + accepted ÷ rounds.
        hit_rate: cache hits ÷ rounds that carried a proposal; `hit_rate_all`: ÷ all rounds.
        by_depth: of the rounds with a proposal, the share that accepted 1, 2, … tokens or more.
        feature_bytes: bytes of the target's hidden states ÷ tokens.
        texts: number of runs whose texts had to be target-only's.
        differences: (prompt, pass, token) where such a text first differed.
    """

    speed: Spread
    ratio: Spread
    ratio_lower: float
    request_ratio: Spread
    ceiling: float
    acceptance: float
    accepted_length: float
    hit_rate: float
    hit_rate_all: float
    first_token_ms: float
    draft_wait_ms: float
    by_depth: tuple[float, ...]
    feature_bytes: float
    texts: int
    differences: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class SpeedRow:
    """One kind of prompt at one temperature.

    Attributes:
        turns: turns that count; `short_turns`: those that don't, since an answer was too short to have a speed.
        settings: figures of each setting.
        best: the fixed setting whose median ratio is greatest, where there are some beside `auto`; else empty.
        over_best: `auto` ÷ that one, turn by turn.
        worst: the prompt on which `auto` ÷ target-only is least.
    """

    kind: str
    temperature: float
    turns: int
    short_turns: int
    settings: Mapping[str, SettingFigures]
    best: str
    over_best: Spread
    worst: str

    @property
    def noise(self) -> Spread:
        """Target-only ÷ target-only."""
        return self.settings[AGAIN].ratio


def speed_rows(turns: Sequence[SpeedTurn]) -> list[SpeedRow]:
    """Return a row for each kind and temperature with a measured turn, in the order in which they first ran."""
    cells: dict[tuple[str, float], list[SpeedTurn]] = {}
    for turn in turns:
        cells.setdefault((turn.kind, turn.temperature), []).append(turn)
    return [_row(cell) for cell in cells.values() if any(turn.is_measured for turn in cell)]


def _row(cell: Sequence[SpeedTurn]) -> SpeedRow:
    turns = [turn for turn in cell if turn.is_measured]
    settings = {name: _figures(cell, turns, name) for name in turns[0].runs}
    others = [name for name in settings if name not in (AUTO, PLAIN)]
    best = max(others, key=lambda name: settings[name].ratio.median) if AUTO in settings and others != [AGAIN] else ""
    return SpeedRow(
        kind=turns[0].kind,
        temperature=turns[0].temperature,
        turns=len(turns),
        short_turns=len(cell) - len(turns),
        settings=settings,
        best=best,
        over_best=Spread.of([turn.ratio(AUTO, best) for turn in turns] if best else []),
        worst=min(turns, key=lambda turn: turn.ratio(AUTO)).prompt if best else "",
    )


def _figures(cell: Sequence[SpeedTurn], turns: Sequence[SpeedTurn], name: str) -> SettingFigures:
    runs = [turn.runs[name] for turn in turns]
    ratios = [turn.ratio(name) for turn in turns]
    texts = [(turn, turn.runs[name]) for turn in cell if turn.runs[name].promises_text]

    def total(figure: Callable[[SpeedRun], float]) -> float:
        return sum(figure(run) for run in runs)

    rounds, hits = max(1, total(lambda run: run.rounds)), total(lambda run: run.cache_hits)
    accepted = total(lambda run: run.accepted)
    return SettingFigures(
        speed=Spread.of([run.tokens_per_second for run in runs]),
        ratio=Spread.of(ratios),
        ratio_lower=lower_bound(ratios),
        request_ratio=Spread.of([turn.runs[PLAIN].wall_s / turn.runs[name].wall_s for turn in turns]),
        ceiling=_ceiling(turns, name),
        acceptance=accepted / max(1, total(lambda run: run.proposed)),
        accepted_length=1 + accepted / rounds,
        hit_rate=hits / max(1, total(lambda run: run.spec_rounds)),
        hit_rate_all=hits / rounds,
        first_token_ms=statistics.median(first for run in runs for first in run.first_token_ms),
        draft_wait_ms=total(lambda run: run.draft_wait_ms) / rounds,
        by_depth=_by_depth(runs),
        feature_bytes=total(lambda run: run.feature_bytes) / max(1, total(lambda run: run.tokens)),
        texts=len(texts),
        differences=tuple(
            (turn.prompt, turn.number, run.difference) for turn, run in texts if run.difference is not None
        ),
    )


def _by_depth(runs: Sequence[SpeedRun]) -> tuple[float, ...]:
    deepest = max(len(run.accepted_histogram) for run in runs)
    counts = [sum(sum(run.accepted_histogram[depth:]) for run in runs) for depth in range(deepest)]
    return tuple(count / counts[0] for count in counts[1:])


def _ceiling(turns: Sequence[SpeedTurn], name: str) -> float:
    with_steps = [turn for turn in turns if turn.runs[PLAIN].target_s > 0 and turn.runs[name].target_s > 0]
    ratios = [turn.runs[name].free_tokens_per_second / turn.runs[PLAIN].free_tokens_per_second for turn in with_steps]
    return statistics.median(ratios) if ratios else 0.0


def speed_json(rows: Sequence[SpeedRow], turns: Sequence[SpeedTurn]) -> dict[str, Any]:
    """Return everything that the Markdown says, and each turn; the report can be made from `turns` again."""
    return {"results": [asdict(row) for row in rows], "turns": [turn.as_json() for turn in turns]}


def speed_plots(rows: Sequence[SpeedRow]) -> list[Plot]:
    """Plot speed-ups with their ceilings, a plot for each temperature."""
    plots = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        of_plot = [row for row in rows if row.temperature == temperature]
        bars = []
        for name in (name for name in of_plot[0].settings if name != PLAIN):
            figures = [row.settings[name] for row in of_plot]
            bars.append(Bars(name, [each.ratio for each in figures], [each.ceiling for each in figures]))
        title = f"Speed-up over target-only, temperature {temperature:g} (dashed: ceiling)"
        plots.append(Plot(title, "times target-only", [row.kind for row in of_plot], bars, line=1.0))
    return plots


NOTES = """\
Every figure is of one interleaved run. Speed-ups are medians over turns (one prompt, one seed) of tokens per second
after the first round's tokens, over target-only's on our fastest services, or on those that all settings share.
Bounds are of the median, one-sided 95 %, by bootstrap over turns. Noise is target-only over target-only. Prompts are
cached when a turn begins, which whole requests and first tokens show. The ceiling is what the same proposals and
acceptances would gain if drafting and coordination cost nothing, from the target's own step times. The best fixed
setting is chosen for each row after the fact, from as many medians as there are settings, so noise favours it.
"""


def speed_markdown(rows: Sequence[SpeedRow]) -> str:
    """Write the report."""
    if not rows:
        return "# Speed beside target-only\n\nNo answer was long enough to have a speed.\n"
    parts = ["# Speed beside target-only", summary(rows)]
    if rows[0].best:
        parts += ["## Auto beside fixed settings\n", markdown_table([_auto_line(row) for row in rows])]
    lines = [(row, name) for row in rows for name in row.settings if name != PLAIN]
    parts += ["## Settings\n", markdown_table([_speed_line(row, name) for row, name in lines])]
    parts += ["## Rounds\n", markdown_table([_rounds_line(row, name) for row, name in lines])]
    return "\n".join([*parts, *_differences(rows), NOTES])


def summary(rows: Sequence[SpeedRow]) -> str:
    """Write the least and the median over the rows, a line for each figure."""
    figures = [("noise (target-only ÷ target-only)", [row.noise.median for row in rows])]
    if rows[0].best:
        figures = [
            ("auto ÷ best fixed", [row.over_best.median for row in rows]),
            ("auto ÷ target-only", [row.settings[AUTO].ratio.median for row in rows]),
            *figures,
        ]
    return "".join(_summary_line(title, rows, values) for title, values in figures)


def _summary_line(title: str, rows: Sequence[SpeedRow], values: Sequence[float]) -> str:
    least, row = min(zip(values, rows, strict=True), key=lambda pair: pair[0])
    where = f"{row.kind}, T={row.temperature:g}"
    return f"- {title}, over {len(rows)} rows: least {least:.3f} ({where}), median {statistics.median(values):.3f}\n"


def _key(row: SpeedRow) -> dict[str, object]:
    return {"kind": row.kind, "T": f"{row.temperature:g}"}


def _auto_line(row: SpeedRow) -> dict[str, object]:
    auto = row.settings[AUTO].ratio
    return _key(row) | {
        "noise (min to max)": spread_text(row.noise, 2),
        "best fixed": f"{row.best}: {row.settings[row.best].ratio.median:.2f}",
        "auto (min to max)": spread_text(auto, 2),
        "auto ÷ best fixed": spread_text(row.over_best, 2),
        "auto's worst prompt": f"{row.worst}: {auto.low:.2f}",
    }


def _speed_line(row: SpeedRow, name: str) -> dict[str, object]:
    one = row.settings[name]
    equal = one.texts - len(one.differences)
    return _key(row) | {
        "setting": name,
        "turns": f"{row.turns} ({row.short_turns} too short)" if row.short_turns else row.turns,
        "target-only tok/s": f"{row.settings[PLAIN].speed.median:.2f}",
        "tok/s (min to max)": spread_text(one.speed),
        "speed-up (min to max)": spread_text(one.ratio, 2),
        "lower 95 %": f"{one.ratio_lower:.2f}",
        "whole request": f"{one.request_ratio.median:.2f}",
        "ceiling": f"{one.ceiling:.2f}" if one.ceiling else "?",
        "of it": f"{one.ratio.median / one.ceiling:.0%}" if one.ceiling else "?",
        "same text": f"{equal} of {one.texts}" if one.texts else "only the distribution",
    }


def _rounds_line(row: SpeedRow, name: str) -> dict[str, object]:
    one = row.settings[name]
    depths = " ".join(f"{share:.2f}" for share in one.by_depth[:_SHOWN_DEPTHS])
    return _key(row) | {
        "setting": name,
        "acceptance": f"{one.acceptance:.2f}",
        "accepted length": f"{one.accepted_length:.2f}",
        "rounds that accept 1, 2, … or more": depths or "-",
        "hits of drafted / of all rounds": f"{one.hit_rate:.0%} / {one.hit_rate_all:.0%}",
        "first token ms (target-only)": f"{one.first_token_ms:.0f} ({row.settings[PLAIN].first_token_ms:.0f})",
        "draft wait ms a round": f"{one.draft_wait_ms:.2f}",
        "bytes of hidden states a token": f"{one.feature_bytes:.0f}",
    }


def _differences(rows: Sequence[SpeedRow]) -> list[str]:
    lines = [
        f"- {row.kind} T={row.temperature:g} {name}: prompt {prompt}, pass {number}, from token {at}\n"
        for row in rows
        for name, figures in row.settings.items()
        for prompt, number, at in figures.differences
    ]
    return ["## Texts that differ from target-only's\n", "".join(lines)] if lines else []
