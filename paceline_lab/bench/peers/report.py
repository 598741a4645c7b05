"""From contest runs to the figures of `bench peers`, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline_lab.bench.peers.run import OURS, PLAIN, Contest, ContestRun
from paceline_lab.bench.speed.run import first_difference
from paceline_lab.reporting.figures import Spread, lower_bound
from paceline_lab.reporting.presentation import Bars, Plot, failures_text, markdown_table, spread_text

Key = tuple[str, str, int]
"""(kind, prompt, pass): runs of one key have the same prompt."""


@dataclass(frozen=True)
class PeerRow:
    """One contestant on one kind of prompt.

    Attributes:
        speed: tokens per second of whole requests, prompt included.
        over_plain: ÷ the same system's plain run of the same pass.
        cpu_ms_per_token: CPU time of all its processes.
        tokens_per_step: new tokens ÷ forward passes of the target.
        same_as_plain: runs whose text equals the system's own plain text, of `plain_compared`.
        same_as_ours: runs whose text equals Paceline's target-only text, of `ours_compared`.
        first_difference: the smallest index at which a text left its system's plain one; None: none did.
    """

    kind: str
    system: str
    mode: str
    runs: int
    speed: Spread
    over_plain: Spread
    wall_s: Spread
    cpu_s: Spread
    cpu_ms_per_token: float
    tokens_per_step: float
    same_as_plain: int
    plain_compared: int
    same_as_ours: int
    ours_compared: int
    first_difference: int | None


@dataclass(frozen=True)
class Duel:
    """Our best mode beside a peer's best mode on one kind: ratios of runs of the same pass."""

    kind: str
    ours: str
    peer: str
    ratio: Spread
    lower: float


def peer_rows(contest: Contest) -> list[PeerRow]:
    """Return a row for each kind and contestant, in the order in which they first ran."""
    cells: dict[tuple[str, str, str], list[ContestRun]] = {}
    for run in contest.runs:
        cells.setdefault((run.kind, run.system, run.mode), []).append(run)
    kinds = dict.fromkeys(run.kind for run in contest.runs)
    contestants = dict.fromkeys((run.system, run.mode) for run in contest.runs)
    by_contestant = {of: _by_key(contest.runs, *of) for of in contestants}
    return [
        _row(cells[kind, *of], by_contestant.get((of[0], PLAIN), {}), by_contestant.get((OURS, PLAIN), {}))
        for kind in kinds
        for of in sorted(contestants, key=lambda one: one[0] != OURS)
        if (kind, *of) in cells
    ]


def _by_key(runs: Sequence[ContestRun], system: str, mode: str) -> dict[Key, ContestRun]:
    return {(run.kind, run.prompt, run.number): run for run in runs if (run.system, run.mode) == (system, mode)}


def _pairs(runs: Sequence[ContestRun], others: Mapping[Key, ContestRun]) -> list[tuple[ContestRun, ContestRun]]:
    pairs = [(run, others.get((run.kind, run.prompt, run.number))) for run in runs]
    return [(run, other) for run, other in pairs if other is not None]


def _row(runs: Sequence[ContestRun], plain: Mapping[Key, ContestRun], ours: Mapping[Key, ContestRun]) -> PeerRow:
    beside_plain, beside_ours = _pairs(runs, plain), _pairs(runs, ours)
    differences = [first_difference(other.token_ids, run.token_ids) for run, other in beside_plain]
    indices = [at for at in differences if at is not None]
    tokens = sum(len(run.token_ids) for run in runs)
    return PeerRow(
        kind=runs[0].kind,
        system=runs[0].system,
        mode=runs[0].mode,
        runs=len(runs),
        speed=Spread.of([run.tokens_per_second for run in runs]),
        over_plain=Spread.of([_over(run, other) for run, other in beside_plain]),
        wall_s=Spread.of([run.wall_s for run in runs]),
        cpu_s=Spread.of([run.cpu_s for run in runs]),
        cpu_ms_per_token=1e3 * sum(run.cpu_s for run in runs) / max(1, tokens),
        tokens_per_step=tokens / max(1, sum(run.target_steps for run in runs)),
        same_as_plain=len(differences) - len(indices),
        plain_compared=len(differences),
        same_as_ours=sum(run.token_ids == other.token_ids for run, other in beside_ours),
        ours_compared=len(beside_ours),
        first_difference=min(indices, default=None),
    )


def _over(run: ContestRun, other: ContestRun) -> float:
    return run.tokens_per_second / other.tokens_per_second if other.tokens_per_second > 0 else 0.0


def duels(contest: Contest, rows: Sequence[PeerRow]) -> list[Duel]:
    """Compare our best mode with each other system's, by median speed, kind by kind."""
    duels_of_kinds = []
    for kind in dict.fromkeys(row.kind for row in rows):
        best: dict[str, PeerRow] = {}
        for row in rows:
            if row.kind == kind and (row.system not in best or row.speed.median > best[row.system].speed.median):
                best[row.system] = row
        ours = best.pop(OURS, None)
        if ours is not None:
            duels_of_kinds += [_duel(contest, ours, theirs) for theirs in best.values()]
    return duels_of_kinds


def _duel(contest: Contest, ours: PeerRow, theirs: PeerRow) -> Duel:
    our_runs = [run for run in contest.runs if (run.system, run.mode, run.kind) == (OURS, ours.mode, ours.kind)]
    ratios = [
        _over(run, other)
        for run, other in _pairs(our_runs, _by_key(contest.runs, theirs.system, theirs.mode))
        if other.tokens_per_second > 0
    ]
    return Duel(ours.kind, ours.mode, f"{theirs.system} {theirs.mode}", Spread.of(ratios), lower_bound(ratios))


def peers_json(contest: Contest) -> dict[str, Any]:
    """Return everything that the Markdown says, and each run's own figures."""
    rows = peer_rows(contest)
    figures = ("system", "mode", "kind", "prompt", "number", "wall_s", "cpu_s", "target_steps")
    return {
        "peers": dict(contest.facts),
        "failures": dict(contest.failures),
        "results": [asdict(row) for row in rows],
        "duels": [asdict(duel) for duel in duels(contest, rows)],
        "runs": [
            {name: getattr(run, name) for name in figures} | {"tokens": len(run.token_ids)} for run in contest.runs
        ],
    }


def peers_plots(contest: Contest) -> list[Plot]:
    """Plot tokens per second by kind and contestant."""
    cells = {(row.kind, f"{row.system} {row.mode}"): row.speed for row in peer_rows(contest)}
    kinds, contestants = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    bars = [Bars(one, [cells.get((kind, one)) for kind in kinds]) for one in contestants]
    return [Plot("Whole requests, greedy, float32", "tokens per second", kinds, bars)] if cells else []


NOTES = """\
Whole requests, prompt included, greedy, every system on the same cores, one request at a time. `tokens per target
step` is new tokens ÷ forward passes of the target: no load of the machine disturbs it. A text that differs from the
system's own plain text was changed by its speculation, or by arithmetic that rounds otherwise for other row counts.
"""


def peers_markdown(contest: Contest) -> str:
    """Write the report."""
    rows = peer_rows(contest)
    parts = ["# Beside other systems", "## Our best mode beside each system's best\n"]
    parts += [markdown_table([_duel_line(duel) for duel in duels(contest, rows)])]
    parts += ["## All modes\n", markdown_table([_line(row) for row in rows])]
    parts += [failures_text("## Not measured, or not to the end", contest.failures), NOTES]
    return "\n".join(part for part in parts if part)


def _duel_line(duel: Duel) -> dict[str, object]:
    return {
        "kind": duel.kind,
        "ours": duel.ours,
        "theirs": duel.peer,
        "ours ÷ theirs (min to max)": spread_text(duel.ratio, 2),
        "lower 95 %": f"{duel.lower:.2f}",
    }


def _line(row: PeerRow) -> dict[str, object]:
    first = f" (first from token {row.first_difference})" if row.first_difference is not None else ""
    return {
        "kind": row.kind,
        "system": row.system,
        "mode": row.mode,
        "tok/s (min to max)": spread_text(row.speed),
        "over its plain": spread_text(row.over_plain, 2) if row.over_plain.count else "?",
        "wall s": f"{row.wall_s.median:.2f}",
        "CPU s": f"{row.cpu_s.median:.2f}",
        "CPU ms per token": f"{row.cpu_ms_per_token:.0f}",
        "tokens per target step": f"{row.tokens_per_step:.2f}",
        "same as its plain": f"{row.same_as_plain} of {row.plain_compared}{first}",
        "same as our target-only": f"{row.same_as_ours} of {row.ours_compared}",
    }
