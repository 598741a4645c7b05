"""What is believed of the tokens of matches beside what came true, replayed from recorded texts.

The statistics are a coordinator's own: each request begins with what those before it taught, and all learn from every
token. Texts are taken in turn, the first of each trace, then the second; a kind of prompt is a trace's file name.
Scores, lengths and beliefs are of the next token, at each position with a match. A depth is that of a chance that all
tokens down to it are right. `prior` is what a fresh coordinator believes, which has learned nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from coordinator.policy.acceptance_stats import AcceptanceStats, NgramShadow, RequestStats
from coordinator.text.matches import Matches
from paceline.costs.acceptance import BINS, MAX_DEPTH
from paceline.protocol.errors import require
from paceline.protocol.proposal import NGRAM, Acceptance
from paceline.sampling.match import Match
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, write_report
from paceline_lab.simulate.trace import Trace, TracedRequest, read_trace

RELIABLE = 0.1
"""Most that a bin may be off by."""
LEAST_POSITIONS = 100
"""Positions of a bin that is held to that."""
HALVES = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}
"""The texts of each trace that are replayed: what is tuned on one half is shown on the other."""
Titles = tuple[str, ...]
Place = tuple[str | int, ...]


@dataclass
class BinTally:
    """Sums over the positions of a bin."""

    positions: int = 0
    right: int = 0
    belief: float = 0.0
    prior: float = 0.0

    def add(self, right: bool, belief: float, prior: float) -> None:
        """Count one position."""
        self.positions, self.right = self.positions + 1, self.right + right
        self.belief, self.prior = self.belief + belief, self.prior + prior

    def row(self) -> dict[str, object]:
        """Return means, and what beliefs are off by: above 0 they are too bold."""
        realised = self.right / self.positions
        row: dict[str, object] = {"positions": self.positions, "realised": realised}
        for name, total in (("believed", self.belief), ("prior", self.prior)):
            mean = total / self.positions
            row |= {name: mean, f"{name} off by": f"{mean - realised:+.3f}"}
        return row

    def verdict(self) -> tuple[bool, bool, bool]:
        """Return whether the bin is held to the bar, and whether what is believed, and the prior, misses it."""
        counts, most = self.positions >= LEAST_POSITIONS, RELIABLE * self.positions
        return counts, counts and abs(self.belief - self.right) > most, counts and abs(self.prior - self.right) > most


Table = dict[Place, BinTally]


@dataclass
class Reliability:
    """Tables of bins, each by the titles of what tells its bins apart."""

    tables: dict[Titles, Table] = field(default_factory=lambda: defaultdict(lambda: defaultdict(BinTally)))

    def add(self, kind: str, match: Match, rest: Sequence[int], beliefs: Sequence[tuple[float, float]]) -> None:
        """Count a position: its match, the text from there on, and what is and was first believed, by depth."""
        right = True
        tokens = zip(match.following, rest, beliefs, strict=False)
        for depth, (guess, token, (belief, prior)) in enumerate(tokens, 1):
            right = right and guess == token
            least = _least(depth)
            bins: dict[Titles, Place] = {("depth from",): (least,), ("kind", "depth from"): (kind, least)}
            if depth == 1:
                bins["score from",] = (_tenth(match.score()),)
                bins["length from",] = (_least(match.length),)
                bins["kind", "believed from"] = (kind, _tenth(belief))
            for titles, place in bins.items():
                self.tables[titles][place].add(right, belief, prior)

    def text(self) -> str:
        """Return the tables, and how many bins are off."""
        bins = [tally for table in self.tables.values() for tally in table.values()]
        count, off, prior_off = map(sum, zip(*(each.verdict() for each in bins), strict=True))
        bar = f"bins of {LEAST_POSITIONS} positions or more"
        text = f"Of {count} {bar} {off} are off by more than {RELIABLE}, the prior by itself in {prior_off}.\n"
        for titles, table in sorted(self.tables.items(), key=lambda item: len(item[0])):
            rows = [dict(zip(titles, place, strict=True)) | table[place].row() for place in sorted(table)]
            text += f"\n{markdown_table(rows)}"
        return text


def replay(traces: Mapping[str, Trace], half: str = "all") -> Reliability:
    """Replay the texts of traces, by kind of prompt."""
    reliability, pool, fresh = Reliability(), AcceptanceStats(), NgramShadow()
    for kind, request in _in_turn(traces, HALVES[half]):
        stats = RequestStats(lambda _: pool, NGRAM, Acceptance.COUPLED, greedy=True)
        for match, rest in _matches(request):
            if match is not None:
                chances = (each.prefix_chances(match, MAX_DEPTH) for each in (stats.own.texts.ngrams, fresh))
                reliability.add(kind, match, rest, [*zip(*chances, strict=True)])
            stats.take_match(match, rest[:1])
    return reliability


def report_reliability(files: Sequence[Path], half: str, out: Path, name: str) -> Path:
    """Replay the traces of files and write the report.

    Raises:
        InvalidInput: there is no such half, or a trace can't be read.
    """
    require(half in HALVES, "half", half, f"one of {', '.join(HALVES)}")
    traces = {file.stem: read_trace(file) for file in files}
    models = {trace.setting.notes.get("model", "unknown") for trace in traces.values()}
    facts = {"model": ", ".join(sorted(models)), "texts": f"{half}, of {', '.join(traces)}"}
    text = f"# Reliability of matches\n\n{__doc__}\n{replay(traces, half).text()}"
    return write_report(out, name, describe() | facts, {}, text)


def _in_turn(traces: Mapping[str, Trace], half: slice) -> Iterator[tuple[str, TracedRequest]]:
    """The first text of each kind, then the second; each once, however often it was recorded."""
    texts = [
        [(kind, each) for each in {(each.prompt, each.answer): each for each in trace.requests}.values()][half]
        for kind, trace in traces.items()
    ]
    return (text for turn in zip_longest(*texts) for text in turn if text is not None)


def _matches(request: TracedRequest) -> Iterator[tuple[Match | None, Sequence[int]]]:
    """The best match behind each token of an answer, and the rest of the answer."""
    matches, committed = Matches(len(request.prompt), (), ngrams=True), [*request.prompt]
    for place, token in enumerate(request.answer[:-1], 1):
        committed.append(token)
        matches.extend(committed)
        yield matches.best, request.answer[place:]


def _tenth(share: float) -> str:
    return f"{min(int(share * BINS), BINS - 1) / BINS:.1f}"


def _least(count: int) -> int:
    """The least count of a bin: up to 8 each has its own, then bins double."""
    return count if count <= 8 else (1 << (count - 1).bit_length() - 1) + 1
