"""What suffix matches bring on known texts beside n-gram look-ups, without a model.

    python -m benchmarks.suffixes --answers text.npz --questions spec-bench.jsonl --out docs/reports

Rounds and tokens depend on the texts alone. Microseconds are of the thread on its core: other work on the machine
moves them less than a clock's, and still moves them.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import REPORTS
from benchmarks.reporting.figures import Spread, lower_bound
from benchmarks.reporting.presentation import markdown_table, spread_text, titled
from benchmarks.reporting.reports import load_average, write_rows
from benchmarks.suffixes.ngram_lookup import NgramLookup
from benchmarks.suffixes.replay import SOURCES, Replayed, ReplayText, replay
from benchmarks.suffixes.texts import all_texts
from paceline.models.tokenizer import load_tokenizer
from paceline.runtime.config import DEFAULT_MODEL
from paceline.sampling import suffix
from paceline.sampling.suffix import SuffixAutomaton

BASE = "n-gram"
BUILT_TOKENS = 32_768


@dataclass(frozen=True)
class SuffixRow:
    """One kind by one source, means over its tokens; `faster`: steps of n-gram look-ups ÷ its own, median of texts.

    Attributes:
        steps: time a token where a step of one row takes 1 and each further row 3 % of it.
        lower: bound of `faster`'s median from below, one-sided 95 %.
        losses: texts that take more time than by n-gram look-ups.
    """

    kind: str
    source: str
    texts: int
    tokens: int
    accepted_a_round: float
    proposed_a_round: float
    steps: float
    faster: str
    lower: float
    losses: int
    us_a_token: float


@dataclass(frozen=True)
class BuildRow:
    """A text of many tokens taken in at once."""

    source: str
    tokens: int
    us_a_token: float
    bytes_a_token: float


def row_of(kind: str, source: str, found: Sequence[Replayed], base: Sequence[Replayed]) -> SuffixRow:
    """Fold one kind's texts."""
    tokens, rounds = sum(each.tokens for each in found), sum(each.rounds for each in found)
    ratios = [one.steps / each.steps for one, each in zip(base, found, strict=True)]
    return SuffixRow(
        kind=kind,
        source=source,
        texts=len(found),
        tokens=tokens,
        accepted_a_round=sum(each.accepted for each in found) / rounds,
        proposed_a_round=sum(each.proposed for each in found) / rounds,
        steps=sum(each.steps * each.tokens for each in found) / tokens,
        faster=spread_text(Spread.of(ratios), 2),
        lower=lower_bound(ratios),
        losses=sum(ratio < 1 for ratio in ratios),
        us_a_token=sum(each.us * each.tokens for each in found) / tokens,
    )


def rows_of(texts: Mapping[str, Sequence[ReplayText]]) -> list[SuffixRow]:
    """Every kind by every source."""
    rows = []
    for kind, some in texts.items():
        found = {source: replay(some, source) for source in SOURCES}
        rows += [row_of(kind, source, each, found[BASE]) for source, each in found.items()]
    return rows


def build_rows() -> list[BuildRow]:
    """What taking in a long prompt costs, by a text of words as frequent as those of a language."""
    rng = random.Random(1)  # noqa: S311 - no secret
    text = [min(40_000, int(rng.paretovariate(0.8))) for _ in range(BUILT_TOKENS)]
    begun = time.thread_time()
    NgramLookup(text)
    lookup_us = 1e6 * (time.thread_time() - begun) / len(text)
    tracemalloc.start()
    kept = NgramLookup(text)
    lookup_bytes = tracemalloc.get_traced_memory()[0] / len(text)
    tracemalloc.stop()
    del kept
    begun = time.thread_time()
    automaton = SuffixAutomaton(text)
    automaton_us = 1e6 * (time.thread_time() - begun) / len(text)
    return [
        BuildRow(BASE, len(text), lookup_us, lookup_bytes),
        BuildRow("suffix", len(text), automaton_us, automaton.used_bytes / len(text)),
    ]


NOTES = """
`n-gram` takes what followed the last 5 to 2 tokens the last time, the longest agreement of 8 places first. `suffix`
takes what followed the longest suffix most often. `suffix+shared` has the kind's texts before this one besides, as
texts that the same tenant's requests finished. Each proposes as many tokens as are worth their rows by what it has
learned so far. `faster` is n-gram's steps ÷ its own, median (least to most) over texts. Microseconds are of the
thread on its core; other work on the machine moves them.
"""


def main() -> None:
    """Replay and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suffixes", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="names the tokenizer")
    parser.add_argument("--texts", type=int, default=24, help="most texts of a kind, at least 8")
    parser.add_argument("--answers", type=Path, help=".npz shard of texts that the model wrote")
    parser.add_argument("--questions", type=Path, help="JSONL of questions in Spec-Bench's form")
    parser.add_argument("--out", type=Path, default=REPORTS)
    args = parser.parse_args()
    suffix.warm_up()
    before = load_average()
    rows = rows_of(all_texts(load_tokenizer(args.model), args.texts, args.answers, args.questions))
    tables = markdown_table([titled(row) for row in rows]) + NOTES
    tables += "\n## Taking in a long text\n\n" + markdown_table([titled(row) for row in build_rows()])
    settings = {"tokenizer": args.model, "load average before": before}
    print(write_rows(args.out, "suffixes", settings, rows, tables))


if __name__ == "__main__":
    main()
