"""The explanation of a request's drafting: tables for people, an object for programs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from paceline.protocol.explanation import EXPLAINED_ROWS, CandidateExplanation, PlanExplanation
from paceline.protocol.records import GenerationStats, RoundRecord

WAYS: Mapping[str, str] = {
    "none": "target-only",
    "ngram": "n-gram match",
    "wait": "drafted just in time",
    "ahead": "drafted ahead",
}
NO_EXPLANATION = "This coordinator doesn't explain its drafting; the tables below have the rounds that it ran."


def explanation_tables(stats: GenerationStats) -> list[RenderableType]:
    """What the planner knew and compared, and what the rounds did."""
    outcomes = [_rounds(stats.records), *_parts(stats)]
    if stats.explanation is None:
        return [Text(NO_EXPLANATION, style="yellow"), *outcomes]
    plan = stats.explanation
    trips = Text(
        f"round trip: target {plan.target_trip_ms:.2f} ms, draft {plan.draft_trip_ms:.2f} ms; "
        f"sessions that share the target: {plan.target_sessions}"
    )
    return [_costs(plan), trips, _acceptance(plan), _candidates(plan.candidates), *outcomes, account_text(plan)]


def explanation_json(stats: GenerationStats) -> dict[str, object]:
    """The explanation under its name; empty if there is none."""
    return {} if stats.explanation is None else {"explanation": asdict(stats.explanation)}


def account_text(plan: PlanExplanation) -> Text:
    """The request's time compared with target-only's, and the most that it may lose."""
    overtime_ms = plan.account_ms
    stands = f"{overtime_ms:.1f} ms more than" if overtime_ms > 0 else f"{-overtime_ms:.1f} ms less than"
    is_over = overtime_ms > plan.account_bound_ms > 0
    ends = ", and it is: the request runs target-only" if is_over else ""
    return Text(
        f"account: {stands} target-only for the same tokens; bound {plan.account_bound_ms:.1f} ms{ends}",
        style="yellow" if is_over else "default",
    )


def _costs(plan: PlanExplanation) -> Table:
    table = _table("what steps take, ms", "", *(f"{rows} row{'s' * (rows > 1)}" for rows in EXPLAINED_ROWS))
    table.add_row("target, no draft at work", *_cells(plan.target_alone_ms))
    table.add_row("target, a draft at work", *_cells(plan.target_beside_ms))
    table.add_row("draft", *_cells((plan.draft_ms,) if plan.draft_ms else ()))
    return table


def _cells(times: Sequence[float]) -> list[str]:
    return [f"{times[place]:.2f}" if place < len(times) else "?" for place in range(len(EXPLAINED_ROWS))]


def _acceptance(plan: PlanExplanation) -> Table:
    depths = max(len(plan.acceptance), len(plan.ngram_acceptance), 1)
    table = _table("chance of depth", "all accepted up to", *map(str, range(1, depths + 1)))
    for name, chances in ((f"draft, {plan.positions} positions", plan.acceptance), ("n-gram", plan.ngram_acceptance)):
        table.add_row(name, *(f"{chance:.2f}" for chance in chances), *["-"] * (depths - len(chances)))
    return table


def _candidates(candidates: Sequence[CandidateExplanation]) -> Table:
    """The candidates in the planner's order; the fastest is bold."""
    table = _table("what was compared", "way", "proposed", "tokens a round", "ms a round", "tokens/s", "rounds")
    best = max((one.tokens_per_second for one in candidates), default=0.0)
    for one in candidates:
        cells = (
            WAYS.get(one.name, one.name),
            str(one.draft_tokens),
            f"{one.tokens:.2f}",
            f"{one.ms:.2f}" if one.ms > 0 else "?",
            f"{one.tokens_per_second:.1f}" if one.ms > 0 else "?",
            str(one.rounds or "-"),
        )
        table.add_row(*cells, style="bold" if 0 < best == one.tokens_per_second else "")
    return table


def _rounds(records: Sequence[RoundRecord]) -> Table:
    """The rounds by drafter and proposed tokens, without the first one, which waited for the prompt."""
    groups: dict[tuple[str, int], list[RoundRecord]] = {}
    for record in records[1:]:
        groups.setdefault((record.drafter if record.proposed else "", record.proposed), []).append(record)
    titles = ("drafter", "proposed", "tokens a round", "ms a round", "tokens/s", "rounds")
    table = _table("what the rounds did", *titles)
    for (drafter, proposed), group in sorted(groups.items()):
        tokens = statistics.fmean(record.accepted + 1 for record in group)
        ms = statistics.fmean(record.round_ms for record in group)
        speed = f"{1e3 * tokens / ms:.1f}" if ms > 0 else "?"
        table.add_row(drafter or "target-only", str(proposed), f"{tokens:.2f}", f"{ms:.2f}", speed, str(len(group)))
    return table


def _parts(stats: GenerationStats) -> list[Table]:
    """A table of reasoning and answer; none if there was no reasoning."""
    parts = {"reasoning": stats.reasoning, "answer": stats.answer}
    table = _table("reasoning and answer", "", "tokens", "rounds", "accepted", "tokens a proposing round", "tokens/s")
    for name, part in parts.items():
        if part is not None:
            accepted = f"{part.draft_acceptance_rate:.0%}" if part.num_draft_tokens else "-"
            length, speed = f"{part.mean_acceptance_length:.2f}", f"{part.tokens_per_second:.1f}"
            table.add_row(name, str(part.committed), str(part.rounds), accepted, length, speed)
    return [table] if table.rows else []


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", style="bold" if not number else None)
    return table
