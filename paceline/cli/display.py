"""How a generation is printed: coloured text while it streams, tables for people, and objects for programs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.client import Generation
from paceline.protocol.explanation import (
    EXPLAINED_ROWS,
    CandidateExplanation,
    GroupReport,
    ModeReport,
    PlanExplanation,
)
from paceline.protocol.generation import Finished, GenerateEvent, Provenance, Tokens
from paceline.protocol.records import GenerationStats, RoundRecord
from paceline.protocol.target import RowLogprobs

STYLES: Mapping[Provenance, str] = {
    Provenance.ACCEPTED: "green",
    Provenance.RECOVERED: "yellow",
    Provenance.BONUS: "cyan",
    Provenance.TARGET: "default",
}
MEANINGS: Mapping[Provenance, str] = {
    Provenance.ACCEPTED: "accepted: drafted, and what the target would have written",
    Provenance.RECOVERED: "recovered: the target's own, after a draft that missed",
    Provenance.BONUS: "bonus: the target's own, after a draft accepted whole",
    Provenance.TARGET: "target: the round carried no proposal",
}

MOST_COUNTS = 8
"""Most entries of a histogram that is printed number by number."""


def legend() -> Text:
    """One line for each provenance, in its colour."""
    lines = [Text(f"■ {meaning}", style=STYLES[provenance]) for provenance, meaning in MEANINGS.items()]
    return Text("\n").join(lines)


def coloured_text(tokens: Tokens) -> Text:
    """The text of one message, each token's part in the colour of its provenance."""
    if not tokens.text_ends:
        return Text(tokens.text, style=STYLES[tokens.provenance[-1]] if tokens.provenance else "default")
    text = Text()
    begin = 0
    for provenance, end in zip(tokens.provenance, tokens.text_ends, strict=True):
        text.append(tokens.text[begin:end], style=STYLES[provenance])
        begin = end
    return text


class StreamDisplay:
    """Writes events to a console as they arrive."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = Provenance.TARGET

    def show(self, event: GenerateEvent) -> None:
        """Write the text that an event carries."""
        if isinstance(event, Tokens):
            self._write(coloured_text(event))
            self._last = event.provenance[-1] if event.provenance else self._last
        elif isinstance(event, Finished):
            self._write(Text(event.text + "\n", style=STYLES[self._last]))

    def _write(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True, highlight=False)


def histogram_text(counts: Sequence[int]) -> str:
    """Rounds by accepted tokens, without zeros: `0: 2, 5: 1`; with many numbers in ranges: `0: 2, 4-7: 9`."""
    rounds = {str(accepted): count for accepted, count in enumerate(counts) if count}
    if len(rounds) > MOST_COUNTS:
        ranges: dict[str, int] = {}
        for accepted, count in enumerate(counts):
            least = 1 << accepted.bit_length() >> 1
            most = min(max(2 * least - 1, 0), len(counts) - 1)
            name = f"{least}-{most}" if most > least else str(least)
            ranges[name] = ranges.get(name, 0) + count
        rounds = {name: count for name, count in ranges.items() if count}
    return ", ".join(f"{name}: {count}" for name, count in rounds.items()) or "-"


def stats_table(stats: GenerationStats, seed: int) -> Table:
    """The round statistics for people."""
    table = Table(title="round statistics", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    accepted = f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} ({stats.draft_acceptance_rate:.0%})"
    rows = (
        ("rounds", str(stats.rounds)),
        ("tokens committed", str(stats.committed)),
        ("drafted tokens accepted", accepted),
        ("mean acceptance length", f"{stats.mean_acceptance_length:.2f}"),
        ("rounds by tokens accepted", histogram_text(stats.acceptance_histogram)),
        ("speculation cache hits / misses", f"{stats.cache_hits} / {stats.cache_misses}"),
        ("time to first token", f"{stats.time_to_first_token_ms:.0f} ms"),
        ("verify, median", f"{stats.verify_ms_p50:.1f} ms"),
        ("draft wait, median", f"{stats.draft_wait_ms_p50:.1f} ms"),
        ("tokens per second", f"{stats.tokens_per_second:.1f}"),
        ("seed", str(seed)),
    )
    for row in rows:
        table.add_row(*row)
    return table


def comparison(ours: Generation, plain: Generation) -> Text:
    """Compare our speed with target-only's, and whether the tokens are the same.

    Both ran on the same services, with one prompt and seed.
    """
    mine, theirs = ours.stats.tokens_per_second, plain.stats.tokens_per_second
    ratio = f" ({mine / theirs:.2f} times)" if theirs > 0 else ""
    same = "the same tokens" if ours.token_ids == plain.token_ids else "other tokens"
    return Text(
        f"with speculation  {mine:8.1f} tokens per second{ratio}\n"
        f"target-only       {theirs:8.1f} tokens per second, {same}"
    )


def generation_json(generation: Generation) -> dict[str, object]:
    """What `--json` prints; `stats.speculative_decoding` has the shape that vLLM returns per request."""
    stats = generation.stats
    parts = {"reasoning": stats.reasoning, "answer": stats.answer}
    return {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "prompt_token_ids": list(generation.prompt_token_ids),
        "finish_reason": generation.finish_reason.value,
        "seed": generation.seed,
        "sample_index": generation.sample_index,
        "provenance": [provenance.value for provenance in generation.provenance],
        "stats": {
            "rounds": stats.rounds,
            "committed": stats.committed,
            "cache_hits": stats.cache_hits,
            "cache_misses": stats.cache_misses,
            "time_to_first_token_ms": stats.time_to_first_token_ms,
            "tokens_per_second": stats.tokens_per_second,
            "verify_ms_p50": stats.verify_ms_p50,
            "draft_wait_ms_p50": stats.draft_wait_ms_p50,
            "prediction_accepted": stats.prediction_accepted,
            "prediction_rejected": stats.prediction_rejected,
            "speculative_decoding": {
                "mean_acceptance_length": stats.mean_acceptance_length,
                "draft_acceptance_rate": stats.draft_acceptance_rate,
                "acceptance_histogram": list(stats.acceptance_histogram),
                "num_spec_steps": stats.num_spec_steps,
                "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
                "num_draft_tokens": stats.num_draft_tokens,
                "num_spec_tokens": stats.num_spec_tokens,
            },
            **{name: asdict(part) for name, part in parts.items() if part is not None},
        },
    }


def prompt_table(generation: Generation) -> Table:
    """A line for each token of the prompt, by its id."""
    table = Table(title="prompt, log-probabilities", title_justify="left")
    for name in ("position", "token", "log-probability"):
        table.add_column(name, justify="right")
    table.add_column("most probable in its place")
    rows = (None, *generation.prompt_logprobs)
    for position, (token, row) in enumerate(zip_longest(generation.prompt_token_ids, rows)):
        own, best = (f"{row.logprobs[0]:.4f}", _best(row)) if row else ("-", "")
        table.add_row(str(position), str(token), own, best)
    return table


def prompt_json(generation: Generation) -> dict[str, object]:
    """One entry for each token of the prompt, null for the first; empty if the request didn't ask for them."""
    if not generation.prompt_logprobs:
        return {}
    entries = [
        {"token_id": token, "logprob": logprob, "top": [{"token_id": i, "logprob": x} for i, x in best]}
        for (token, logprob), *best in (_pairs(row) for row in generation.prompt_logprobs)
    ]
    return {"prompt_logprobs": [None, *entries]}


def _best(row: RowLogprobs) -> str:
    return "  ".join(f"{token} {logprob:.4f}" for token, logprob in _pairs(row)[1:])


def _pairs(row: RowLogprobs) -> list[tuple[int, float]]:
    return [*zip(row.token_ids, row.logprobs, strict=True)]


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
    group = [group_text(plan.group)] if plan.group is not None else []
    tables = (_costs(plan), trips, _acceptance(plan), _candidates(plan.candidates))
    return [*tables, *outcomes, account_text(plan), *group]


def account_text(plan: PlanExplanation) -> Text:
    """The request's time compared with target-only's, and the most that it may lose."""
    overtime_ms = plan.account_ms
    stands = f"{overtime_ms:.1f} ms more than" if overtime_ms > 0 else f"{-overtime_ms:.1f} ms less than"
    is_over = overtime_ms > plan.account_bound_ms > 0
    ends = ", exceeded: no draft is used" if is_over else ""
    return Text(
        f"account: {stands} target-only for the same tokens; bound {plan.account_bound_ms:.1f} ms{ends}",
        style="yellow" if is_over else "default",
    )


DOINGS: Mapping[str, str] = {"rest": "rest", "matches": "copy matches", "drafts": "draft"}
"""What requests do in each mode of their group."""


def group_text(group: GroupReport) -> Text:
    """What the requests of the target do together, and why not something else."""
    doing = DOINGS.get(group.mode, group.mode)
    if group.sessions <= 1:
        head = f"group: one request is alone on the target, so its account decides; several would {doing}"
    else:
        since = f"for the time of {group.mode_steps:.0f} steps at rest"
        head = f"group: {group.sessions} sessions share the target, and {doing} {since}"
    return Text("\n".join((head, *(f"  {each.name}: {_standing(each, group)}" for each in group.modes))))


def _standing(mode: ModeReport, group: GroupReport) -> str:
    """Whether a mode runs, or why not; and its gain."""
    promise = f"promises {group.promise:.2f} times what matches bring" if group.promise else "promises nothing yet"
    standings = {
        "runs": "in force",
        "waits": f"looked at in {mode.wait_steps:.0f} steps",
        "paused": f"lost more than it may, so it is paused for {mode.wait_steps:.0f} more steps",
        "unpromising": f"the closed form {promise}, and a trial takes more than {group.promise_bound:.2f}",
    }
    gain = "" if mode.gain is None else f"; {mode.gain:.2f} tokens for each of resting"
    return standings.get(mode.state, mode.state) + gain


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
