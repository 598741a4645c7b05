"""A plan as a report: first the verdict, then its grounds. Every figure but acceptance is marked as predicted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from paceline_lab.plan.document import ReportPart, as_html, as_markdown_text
from paceline_lab.plan.options import Origin
from paceline_lab.plan.plots import calibration, chains_of, gain_by_load, tokens_by_length
from paceline_lab.plan.reasoning import reasoning_parts
from paceline_lab.plan.run import PlanResult
from paceline_lab.predict.cycle import PredictedSpeed
from paceline_lab.predict.positions import DrafterPositions, calibration_of
from paceline_lab.predict.prices import fleet_of
from paceline_lab.predict.published import check_rows
from paceline_lab.predict.rounds import ProposalShape, plus_minus
from paceline_lab.predict.verdict import (
    LEAST_GAIN,
    MOST_SCALE,
    MOST_SESSIONS,
    MOST_TRIP_MS,
    ProfitInequality,
    profit_inequality,
)
from paceline_lab.reporting.reports import describe

NAME = "plan"
ABSENT_CELL = "absent"
"""A table's cell of a figure that is not known."""
SHOWN_SETTINGS = 8
PLOTTED_K = 8
PLOTTED_LOADS = (1, 2, 4, 8, 16, 32, 64)


def write_plan(plan: PlanResult) -> Path:
    """Write plan.md with its plots, plan.html and plan.json into the plan's folder; return the page."""
    out = plan.options.out
    out.mkdir(parents=True, exist_ok=True)
    title, facts, parts = f"Plan for {_name(plan.options.target)}", plan_facts(plan), list(report_parts(plan))
    for part in parts:
        for name, svg in part.plots.items():
            (out / f"{name}.svg").write_text(svg)
    (out / f"{NAME}.md").write_text(as_markdown_text(title, facts, parts))
    values = {"facts": facts, "parts": {part.title: list(part.sentences) + list(part.tables) for part in parts}}
    (out / f"{NAME}.json").write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    page = out / f"{NAME}.html"
    page.write_text(as_html(title, facts, parts))
    return page


def plan_facts(plan: PlanResult) -> dict[str, str]:
    """Return the facts of a plan: command, machine and versions, and the sample."""
    sample = plan.options.sample
    return describe() | {
        "target": _name(plan.options.target),
        "drafters": ", ".join(plan.drafters),
        "sample": _sample_words(plan),
        **_reader_facts(plan),
        "temperatures": ", ".join(f"{each:g}" for each in plan.candidates),
        "acceptance": "coupled",
        "seed": str(sample.seed),
        **plan.times.origins,
        "ways there and back": f"target {plan.times.target_trip_ms:g} ms, draft {plan.times.draft_trip_ms:g} ms, "
        + ("drafts on hardware of their own" if plan.times.apart else "drafts share the target's hardware"),
    }


def _sample_words(plan: PlanResult) -> str:
    sample = plan.options.sample
    if not plan.texts:
        requests = len(next(iter(plan.candidates[next(iter(plan.candidates))].positions.values())))
        return f"{sample.file.name}: a trace of {requests} requests; ranks as the draft's shadow told them"
    own = sum(text.own for text in plan.texts)
    positions = sum(text.target.places.size for text in plan.texts)
    return (
        f"{sample.file.name}: {len(plan.texts)} texts over all temperatures, {own} written by the target, "
        f"{positions} positions, at most {sample.answer_tokens} of a text"
    )


def _reader_facts(plan: PlanResult) -> dict[str, str]:
    """Return the services that read the texts, if it was not this machine."""
    services = plan.options.services
    if services is None or not plan.texts:
        return {}
    facts = {"read by": f"running services: {services.words}"}
    if plan.feature_drafters:
        facts["not read"] = f"{', '.join(plan.feature_drafters)}: they read the target's features"
    return facts


def report_parts(plan: PlanResult) -> Iterator[ReportPart]:
    """Yield the parts in the order in which people read them."""
    yield ReportPart("Verdict", list(_verdict_lines(plan)), verdict=_pays(plan))
    yield ReportPart("Does it pay?", [_INEQUALITY], [list(_inequality_rows(plan))])
    yield ReportPart("What would turn the verdict", [_TURNS], [list(_turn_rows(plan))])
    yield ReportPart("The fastest settings", [_SPEEDS], [list(_speed_rows(plan))], _load_plots(plan))
    yield ReportPart("Tokens a round", [_TOKENS], [list(_token_rows(plan))], _token_plots(plan))
    yield from reasoning_parts(plan.texts, plan.options.shapes, plan.times)
    if plan.texts:
        sentences = [_FIGURES] if plan.options.services is None else [_FIGURES, _SERVICE_FIGURES]
        yield ReportPart("What the drafters say", sentences, [list(_figure_rows(plan))], _calibration_plots(plan))
    yield ReportPart("Step times", list(_time_lines(plan)), [_line_rows(plan), _checks(plan)])
    yield ReportPart("What this leaves out", _LIMITS)


_INEQUALITY = (
    "Drafting one request just in time pays if ways + drafting + t(rows) < E[tokens] · t(1) (arXiv 2606.25091), the "
    f"right side being {LEAST_GAIN:g} times the left one or more. The best setting of each drafter; milliseconds; "
    "predicted."
)
_TURNS = (
    "At these values the best setting's gain passes "
    f"{LEAST_GAIN:g}, everything else as it is and the setting chosen anew; of ways, how much more or less on both. "
    f"Looked for in acceptance up to {MOST_SCALE:g} times, {MOST_TRIP_MS:g} ms more on each way down to none, up to "
    f"{MOST_SESSIONS} requests, and draft steps of 0 to 100 times theirs. Predicted."
)
_SPEEDS = (
    "Predicted. Tokens per second are of one target with all its requests; without prices the cost is 0. "
    "`auto` serves chains and trees that it chooses round by round, which is not predicted here."
)
_TOKENS = (
    "Expected tokens that a round commits, the target's own included, replayed on the texts; ± one standard error "
    "over texts. Widths are children of each node by depth."
)
_FIGURES = (
    "Read off two teacher-forced passes. First, 2, 4: chance that the target's token is the drafter's first choice, "
    "or among its first, under shared noise. Overlap is 1 - TV, KL is of the target from the draft, both and the "
    "entropies in nats at the temperature (at 0: at 1); the last column is the expected calibration error over all "
    "positions together."
)
_SERVICE_FIGURES = (
    "The texts were read by running services, which say draws and ranks and no whole distributions. A rank is that "
    "of the one draw that text and noise have, not averaged over noise (the same at temperature 0); what would need "
    f"distributions is {ABSENT_CELL}."
)
_LIMITS = (
    "Prompts: the time to the first token, and prefills of other requests in a step.",
    "What starts with a request's first round. Each text's end cuts its last round: where answers were read in part, "
    "whole ones gain a little more.",
    "Matches that go on behind a whole proposal: they are prefetched, which saves their round the way to the target.",
    "Outcomes that a draft has no rows left for, where it drafts ahead for many requests at once.",
    "Mixed drafting: matches and a model in one request, and lengths that change, as `--drafter auto` has them.",
    "Contexts longer than those that steps were measured behind, unless times are modelled for a context.",
)


def _verdict_lines(plan: PlanResult) -> Iterator[str]:
    for temperature, by_load in plan.verdicts.items():
        for load, verdict in by_load.items():
            requests = "1 request" if load == 1 else f"{load} requests"
            yield f"Temperature {temperature:g}, {requests} at once: {verdict.words} (predicted)."
    names = [name for name, origin in plan.times.origins.items() if origin not in set(Origin)]
    if names:
        yield f"Modelled, not measured: {', '.join(names)}."


def _pays(plan: PlanResult) -> bool:
    return any(verdict.pays for by_load in plan.verdicts.values() for verdict in by_load.values())


def _inequality_rows(plan: PlanResult) -> Iterator[dict[str, object]]:
    for temperature, candidates in plan.candidates.items():
        for drafter in plan.drafters:
            inequalities: list[tuple[ProposalShape, ProfitInequality]] = [
                (shape, profit_inequality(plan.times, drafter, candidates.rounds_of(drafter, shape)))
                for shape in candidates.shapes_of(drafter)
            ]
            if inequalities:
                shape, best = max(inequalities, key=lambda each: each[1].gain)
                yield {
                    "drafter": drafter,
                    "T": f"{temperature:g}",
                    "setting": shape.name,
                    "ways": f"{best.trip_ms:.2f}",
                    "drafting": f"{best.draft_ms:.2f}",
                    "t(rows)": f"{best.verify_ms:.2f}",
                    "sum": f"{best.left_ms:.2f}",
                    "E[tokens] · t(1)": f"{best.tokens:.3f} · {best.single_ms:.2f} = {best.right_ms:.2f}",
                    "pays": "yes" if best.holds else "no",
                }


def _turn_rows(plan: PlanResult) -> Iterator[dict[str, object]]:
    load = plan.options.loads[0]
    for temperature, turns in plan.turns.items():
        yield {
            "T": f"{temperature:g}",
            "now": "pays" if plan.verdicts[temperature][load].pays else "does not pay",
            "acceptance times": _turning_text(turns.acceptance),
            "ms on both ways": _turning_text(turns.trips_ms, "+"),
            "requests at once": _turning_text(turns.sessions),
            "draft steps times": _turning_text(turns.draft),
        }


def _turning_text(value: float | None, sign: str = "") -> str:
    return "never" if value is None else f"{value:{sign}.3g}"


def _speed_rows(plan: PlanResult) -> Iterator[dict[str, object]]:
    for temperature, candidates in plan.candidates.items():
        for load in plan.options.loads:
            plain, *drafted = candidates.speeds(plan.times, load)
            drafted.sort(key=lambda each: -each.tokens_per_second)
            for speed in (plain, *drafted[:SHOWN_SETTINGS]):
                yield _speed_row(plan, temperature, speed, plain)


def _speed_row(
    plan: PlanResult, temperature: float, speed: PredictedSpeed, plain: PredictedSpeed
) -> dict[str, object]:
    fleet = fleet_of(speed, plan.options.prices, apart=plan.times.apart)
    return {
        "setting": speed.name,
        "T": f"{temperature:g}",
        "requests": speed.sessions,
        "tokens a round": speed.tokens,
        "round, ms": f"{speed.round_ms:.2f}",
        "ms a token": f"{speed.ms_per_token:.2f}",
        "tokens/s": f"{speed.tokens_per_second:.1f}",
        "over target-only": speed.gain(plain),
        "cost per million": f"{fleet.cost_per_million:.3g}",
        "targets": f"{fleet.targets:g}",
        "drafts": f"{fleet.drafts:.3g}",
        "GPUs": f"{fleet.gpus:.3g}",
    }


def _token_rows(plan: PlanResult) -> Iterator[dict[str, object]]:
    shapes = [shape for shape in plan.options.shapes if shape.depth]
    for temperature, candidates in plan.candidates.items():
        for drafter in plan.drafters:
            drafter_shapes = candidates.shapes_of(drafter)
            row: dict[str, object] = {"drafter": drafter, "T": f"{temperature:g}"}
            for shape in shapes:
                rounds = candidates.rounds_of(drafter, shape) if shape in drafter_shapes else None
                row[shape.name] = "" if rounds is None else f"{rounds.tokens:.2f}{plus_minus(rounds.error)}"
            yield row


def _figure_rows(plan: PlanResult) -> Iterator[dict[str, object]]:
    for temperature, candidates in plan.candidates.items():
        target = [text.target.entropies for text in plan.texts if text.temperature == temperature]
        entropy = _figure_cell(float(np.concatenate(target).mean()))
        for drafter, positions in candidates.positions.items():
            reach = np.concatenate([each.reach[:, 0] for each in positions])
            yield {
                "drafter": drafter,
                "T": f"{temperature:g}",
                "positions": len(reach),
                "says something": _share(positions),
                **{f"first {rank}" if rank > 1 else "first": float(reach[:, rank - 1].mean()) for rank in (1, 2, 4)},
                "overlap": _figure_cell(_mean(positions, "overlaps")),
                "KL": _figure_cell(_mean(positions, "divergences")),
                "H(draft)": _figure_cell(_mean(positions, "entropies")),
                "H(target)": entropy,
                "ECE": calibration_of(positions),
            }


def _figure_cell(figure: float) -> float | str:
    return ABSENT_CELL if math.isnan(figure) else figure


def _share(positions: Sequence[DrafterPositions]) -> float:
    """Return the share of positions at which the drafter has a choice."""
    return float(np.concatenate([each.offered > 0 for each in positions]).mean())


def _mean(positions: Sequence[DrafterPositions], figure: str) -> float:
    """Return the mean of a figure over those positions."""
    values = np.concatenate([getattr(each, figure)[each.offered > 0] for each in positions])
    return float(values.mean()) if values.size else 0.0


def _line_rows(plan: PlanResult) -> list[dict[str, object]]:
    rows = (1, 2, 4, 5, 8, 16, 32, 64)
    lines = {"target": plan.times.target, **plan.times.drafts}
    return [
        {"step": name, **{f"{count} row" + "s" * (count > 1): f"{line.ms(count):.2f}" for count in rows}}
        for name, line in lines.items()
    ]


def _time_lines(plan: PlanResult) -> Iterator[str]:
    yield "Milliseconds of a step by its rows."
    for name, origin in plan.times.origins.items():
        yield f"{name}: {origin}."
    for name, ms in {"target": plan.times.session_ms, **plan.times.draft_session_ms}.items():
        if ms:
            yield f"Keys and values of each session add {ms:.3g} ms to a step of {name} (modelled)."


def _checks(plan: PlanResult) -> list[dict[str, object]]:
    """Return published speeds beside the roofline's, if the plan uses it."""
    has_model = any(origin not in set(Origin) for origin in plan.times.origins.values())
    return check_rows() if has_model else []


def _load_plots(plan: PlanResult) -> dict[str, str]:
    gains = {
        f"T = {temperature:g}": [(load, candidates.best(plan.times, load)[1]) for load in PLOTTED_LOADS]
        for temperature, candidates in plan.candidates.items()
    }
    return {f"{NAME}-load": gain_by_load(gains, "Best setting by load")}


def _token_plots(plan: PlanResult) -> dict[str, str]:
    return {
        f"{NAME}-tokens-{_digits(temperature)}": tokens_by_length(
            {name: chains_of(each, PLOTTED_K) for name, each in candidates.positions.items()},
            f"Tokens a round, T = {temperature:g}",
        )
        for temperature, candidates in plan.candidates.items()
    }


def _calibration_plots(plan: PlanResult) -> Mapping[str, str]:
    return {
        f"{NAME}-calibration-{_digits(temperature)}": calibration(
            candidates.positions, f"Calibration, T = {temperature:g}"
        )
        for temperature, candidates in plan.candidates.items()
    }


def _digits(temperature: float) -> str:
    return f"{temperature:g}".replace(".", "")


def _name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def console_lines(plan: PlanResult) -> list[str]:
    """Return the lines for a terminal."""
    return list(_verdict_lines(plan))
