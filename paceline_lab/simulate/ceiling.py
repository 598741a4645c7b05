"""What drafting could bring to many sessions if nothing but steps took time: cost lines and recorded acceptance.

`python -m paceline_lab.simulate.ceiling TRACE…` replays the texts of a trace, whose lines, ranks and chances say what
each proposal would have cost and brought. All sessions run in step. Messages, planning, prompts and the time between
steps cost nothing. Three ways are compared with target-only, each with the constants that are best in hindsight:

- matches: proposals are n-gram matches of the request's own text, which cost their rows.
- synchronous: the draft works, then the target verifies; a request with a match needs no draft.
- alternating: half of the sessions is drafted for while the other half is verified, on hardware of its own.

No planner is held to reach it: it can't know the constants, and its messages take time. A planner that chooses for
each round and request may still be above it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice, pairwise, product
from pathlib import Path

from paceline.protocol.errors import require
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, write_report
from paceline_lab.simulate.trace import Trace, TracedRequest, TracedSetting, match_shadow, read_trace

SESSIONS = (1, 4, 8, 16, 64)
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
LEAST_MATCHES = (2, 4, 8, 16)
LEAST_CHANCES = (0.0, 0.3, 0.5, 0.7, 0.9)
ROUNDS = 256
"""Of the sessions, for each way: some thousand proposals at 16 sessions."""


@dataclass(frozen=True)
class Proposing:
    """Which proposals a request makes.

    Attributes:
        depth: most tokens; 0: none.
        least_match: length from which a match is proposed; 0: none is.
        least_chance: of a draft's path, below which it stops; above 1: no draft works.
    """

    depth: int = 0
    least_match: int = 0
    least_chance: float = 2.0

    @property
    def name(self) -> str:
        """For tables."""
        parts = [f"≤ {self.depth}"] if self.depth else []
        parts += [f"matches from {self.least_match}"] if self.least_match else []
        parts += [f"drafts from {self.least_chance:g}"] if self.least_chance <= 1 else []
        return ", ".join(parts)


NOTHING = Proposing()
MATCHES = tuple(Proposing(depth, least) for depth, least in product(DEPTHS, LEAST_MATCHES))
DRAFTS = tuple(Proposing(depth, least, chance) for depth, least, chance in product(DEPTHS, (0, 2, 8), LEAST_CHANCES))


@dataclass(frozen=True)
class ScriptedProposal:
    """What a request would propose at a place of its answer: rows, levels of the draft, and tokens accepted."""

    rows: int = 0
    levels: int = 0
    accepted: int = 0


class ScriptedAnswer:
    """A recorded answer, and what any proposal at any place of it would have brought."""

    def __init__(self, request: TracedRequest) -> None:
        self.tokens = request.tokens
        self._request = request
        self._lengths, self._right = match_shadow(request.prompt, request.answer)
        self.proposal = cache(self._proposal)

    def _proposal(self, place: int, way: Proposing) -> ScriptedProposal:
        room = min(way.depth, self.tokens - place - 1)
        if room <= 0:
            return ScriptedProposal()
        if 0 < way.least_match <= self._lengths[place]:
            return ScriptedProposal(rows=room, accepted=min(room, self._right[place]))
        return self._drafted(place, room, way.least_chance)

    def _drafted(self, place: int, room: int, least_chance: float) -> ScriptedProposal:
        rows = levels = accepted = 0
        chance, is_right = 1.0, True
        while rows < room and least_chance <= 1:
            levels += 1
            chance *= self._request.chances[place + rows]
            if chance < least_chance:
                break
            is_right = is_right and self._request.ranks[place + rows] == 1
            accepted += is_right
            rows += 1
        return ScriptedProposal(rows, levels, accepted)


class ScriptedSession:
    """A session: one answer after the other, without their prompts."""

    def __init__(self, answers: Iterator[ScriptedAnswer]) -> None:
        self._answers = answers
        self._answer, self._at = next(answers), 0

    def propose(self, way: Proposing) -> ScriptedProposal:
        """What it proposes now; its next round is behind what is accepted of it."""
        proposal = self._answer.proposal(self._at, way)
        self._at += proposal.accepted + 1
        if self._at >= self._answer.tokens:
            self._answer, self._at = next(self._answers), 0
        return proposal


@dataclass(frozen=True)
class GroupRound:
    """A round of sessions in step: how long draft and target work for it, and the tokens that it commits."""

    draft_ms: float
    target_ms: float
    tokens: int


def group_rounds(setting: TracedSetting, sessions: Sequence[ScriptedSession], way: Proposing) -> Iterator[GroupRound]:
    """Rounds of sessions that run in step, without end."""
    while True:
        proposals = [session.propose(way) for session in sessions]
        levels = max(each.levels for each in proposals)
        working = (sum(each.levels > level for each in proposals) for level in range(levels))
        yield GroupRound(
            draft_ms=sum(setting.draft.ms(rows) for rows in working),
            target_ms=setting.alone.ms(sum(1 + each.rows for each in proposals)),
            tokens=sum(1 + each.accepted for each in proposals),
        )


@dataclass(frozen=True)
class Ceiling:
    """The best constants of one way to draft, tokens per second of all sessions."""

    speed: float
    way: Proposing = NOTHING


class CeilingTrace:
    """A trace whose sessions can be run at any number of them."""

    def __init__(self, setting: TracedSetting, requests: Sequence[TracedRequest]) -> None:
        self._setting = setting
        self._answers = [ScriptedAnswer(each) for each in requests]

    def sessions(self, count: int) -> list[ScriptedSession]:
        """So many sessions, each of which begins with another answer."""
        return [
            ScriptedSession(islice(cycle(self._answers), first % len(self._answers), None)) for first in range(count)
        ]

    def synchronous(self, sessions: int, way: Proposing) -> float:
        """Tokens per second where draft and target work one after the other, for all sessions at once."""
        rounds = [*islice(group_rounds(self._setting, self.sessions(sessions), way), ROUNDS)]
        return 1e3 * sum(each.tokens for each in rounds) / sum(each.draft_ms + each.target_ms for each in rounds)

    def alternating(self, sessions: int, way: Proposing) -> float:
        """Tokens per second where half of the sessions is drafted for while the other half is verified.

        Each half's round lasts as long as its verification or the other's draft, whichever is longer.
        """
        all_sessions = self.sessions(sessions)
        halves = [group_rounds(self._setting, part, way) for part in (all_sessions[::2], all_sessions[1::2])]
        rounds = [next(halves[number % 2]) for number in range(ROUNDS + 1)]
        ms = sum(max(now.target_ms, following.draft_ms) for now, following in pairwise(rounds))
        return 1e3 * sum(each.tokens for each in rounds[:-1]) / ms

    def row(self, sessions: int) -> dict[str, object]:
        """A table's line."""
        off = self.synchronous(sessions, NOTHING)
        drafts = DRAFTS if self._setting.draft.is_known else ()
        ways = {
            "matches": [Ceiling(self.synchronous(sessions, way), way) for way in MATCHES],
            "synchronous": [Ceiling(self.synchronous(sessions, way), way) for way in drafts],
            "alternating": [Ceiling(self.alternating(sessions, way), way) for way in drafts if sessions > 1],
        }
        cells: dict[str, object] = {"sessions": sessions, "off tokens/s": round(off, 1)}
        for name, ceilings in ways.items():
            best = max([Ceiling(off), *ceilings], key=lambda each: each.speed)
            cells |= {name: f"{best.speed / off:.2f}" if ceilings else "–", f"{name} by": best.way.name or "nothing"}
        return cells


def ceiling_rows(name: str, trace: Trace, sessions: Sequence[int]) -> list[dict[str, object]]:
    """The table of a trace.

    Raises:
        InvalidInput: a number of sessions below 1.
    """
    for count in sessions:
        require(count >= 1, "sessions", count, "at least 1")
    ceilings = CeilingTrace(trace.setting, trace.requests)
    return [{"trace": name} | ceilings.row(count) for count in sessions]


def main() -> None:
    """Print the ceilings of traces, and write a report."""
    parser = argparse.ArgumentParser(description="What drafting could bring if nothing but steps took time.")
    parser.add_argument("traces", nargs="+", type=Path, help="as `paceline bench record` writes them")
    parser.add_argument("--sessions", default=",".join(map(str, SESSIONS)), help="with commas between")
    parser.add_argument("--out", type=Path, help="folder of the report")
    arguments = parser.parse_args()
    sessions = [int(count) for count in arguments.sessions.split(",")]
    traces = {path.stem: read_trace(path) for path in arguments.traces}
    rows = [row for name, trace in traces.items() for row in ceiling_rows(name, trace, sessions)]
    text = f"# The ceiling of drafting together\n\n{__doc__}\n{markdown_table(rows)}"
    if arguments.out is not None:
        origins = {f"trace {name}": trace.setting.notes.get("command", "") for name, trace in traces.items()}
        write_report(arguments.out, "ceiling", describe() | origins, {"rows": rows}, text)
    print(text)


if __name__ == "__main__":
    main()
