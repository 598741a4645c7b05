"""How a generation is printed: coloured text while it streams, statistics, and the JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.client import Generation
from paceline.protocol.generation import Finished, GenerateEvent, Provenance, Tokens
from paceline.protocol.records import GenerationStats

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
