"""From contest runs to the figures of `bench peers`, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline_lab.bench.peers.run import OURS, PLAIN, REPRODUCIBLE, Contest, ContestRun
from paceline_lab.bench.speed.run import first_difference
from paceline_lab.reporting.figures import Spread, lower_bound
from paceline_lab.reporting.presentation import Bars, Plot, failures_text, markdown_table, spread_text

Key = tuple[str, int, str, int]
"""(kind, users, first prompt, number): runs of one key have the same prompts."""
_OUR_SYSTEMS = (OURS, REPRODUCIBLE)


@dataclass(frozen=True)
class PeerRow:
    """One contestant on one kind of prompt, with so many users at once.

    Attributes:
        speed: tokens per second of whole requests, prompts included, of all users together.
        over_plain: ÷ the same system's plain run of the same pass.
        cpu_ms_per_token: CPU time of all its processes.
        tokens_per_step: new tokens ÷ forward passes of the target.
        same_as_plain: runs whose text equals the system's own plain text, of `plain_compared`.
        same_as_ours: runs whose text equals Paceline's target-only text, of `ours_compared`.
        first_difference: the smallest index at which a text left its system's plain one; None: none did.
    """

    kind: str
    users: int
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
    """One of our modes beside a peer's plain or best mode: ratios of runs of the same pass."""

    kind: str
    users: int
    ours: str
    peer: str
    ratio: Spread
    lower: float


def peer_rows(contest: Contest) -> list[PeerRow]:
    """Return a row for each kind and contestant, in the order in which they first ran."""
    cells: dict[tuple[str, int, str, str], list[ContestRun]] = {}
    for run in contest.runs:
        cells.setdefault((run.kind, run.users, run.system, run.mode), []).append(run)
    loads = dict.fromkeys((run.kind, run.users) for run in contest.runs)
    contestants = dict.fromkeys((run.system, run.mode) for run in contest.runs)
    by_contestant = {of: _by_key(contest.runs, *of) for of in contestants}
    return [
        _row(cells[*load, *of], by_contestant.get((of[0], PLAIN), {}), by_contestant.get((OURS, PLAIN), {}))
        for load in loads
        for of in sorted(contestants, key=lambda one: one[0] not in _OUR_SYSTEMS)
        if (*load, *of) in cells
    ]


def _key(run: ContestRun) -> Key:
    return run.kind, run.users, run.prompt, run.number


def _by_key(runs: Sequence[ContestRun], system: str, mode: str) -> dict[Key, ContestRun]:
    return {_key(run): run for run in runs if (run.system, run.mode) == (system, mode)}


def _pairs(runs: Sequence[ContestRun], others: Mapping[Key, ContestRun]) -> list[tuple[ContestRun, ContestRun]]:
    pairs = [(run, others.get(_key(run))) for run in runs]
    return [(run, other) for run, other in pairs if other is not None]


def _row(runs: Sequence[ContestRun], plain: Mapping[Key, ContestRun], ours: Mapping[Key, ContestRun]) -> PeerRow:
    beside_plain, beside_ours = _pairs(runs, plain), _pairs(runs, ours)
    differences = [first_difference(other.token_ids, run.token_ids) for run, other in beside_plain]
    indices = [at for at in differences if at is not None]
    tokens = sum(len(run.token_ids) for run in runs)
    return PeerRow(
        kind=runs[0].kind,
        users=runs[0].users,
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
    """Compare each of our modes with each other system's plain and best mode, by median speed, load by load."""
    return [_duel(contest, ours, theirs) for ours in rows if _is_ours(ours) for theirs in _opponents(ours, rows)]


def _is_ours(row: PeerRow) -> bool:
    return row.system in _OUR_SYSTEMS


def _opponents(ours: PeerRow, rows: Sequence[PeerRow]) -> list[PeerRow]:
    """Each other system's plain row of the same load, and its best one if that is another."""
    plain: dict[str, PeerRow] = {}
    best: dict[str, PeerRow] = {}
    for row in rows:
        if (row.kind, row.users) == (ours.kind, ours.users) and not _is_ours(row):
            plain |= {row.system: row} if row.mode == PLAIN else {}
            best[row.system] = max(best.get(row.system, row), row, key=lambda one: one.speed.median)
    pairs = [(plain.get(system), row) for system, row in best.items()]
    return [row for pair in pairs for row in dict.fromkeys(pair) if row is not None]


def _duel(contest: Contest, ours: PeerRow, theirs: PeerRow) -> Duel:
    load = (ours.kind, ours.users)
    of_load = [run for run in contest.runs if (run.kind, run.users) == load]
    our_runs = _by_key(of_load, ours.system, ours.mode).values()
    ratios = [
        _over(run, other)
        for run, other in _pairs([*our_runs], _by_key(of_load, theirs.system, theirs.mode))
        if other.tokens_per_second > 0
    ]
    our_name, their_name = (f"{row.system} {row.mode}" for row in (ours, theirs))
    return Duel(*load, our_name, their_name, Spread.of(ratios), lower_bound(ratios))


def peers_json(contest: Contest) -> dict[str, Any]:
    """Return everything that the Markdown says, and each run's own figures."""
    rows = peer_rows(contest)
    figures = ("system", "mode", "kind", "users", "prompt", "number", "wall_s", "cpu_s", "target_steps")
    return {
        "peers": dict(contest.facts),
        "failures": dict(contest.failures),
        "results": [asdict(row) for row in rows],
        "duels": [asdict(duel) for duel in duels(contest, rows)],
        "processes": _processes(contest),
        "runs": [
            {name: getattr(run, name) for name in figures} | {"tokens": len(run.token_ids)} for run in contest.runs
        ],
    }


def peers_plots(contest: Contest) -> list[Plot]:
    """Plot tokens per second by kind, users and contestant."""
    cells = {(_load_text(row), f"{row.system} {row.mode}"): row.speed for row in peer_rows(contest)}
    kinds, contestants = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    bars = [Bars(one, [cells.get((kind, one)) for kind in kinds]) for one in contestants]
    return [Plot("Whole requests, greedy", "tokens per second", kinds, bars)] if cells else []


def _load_text(row: PeerRow) -> str:
    return row.kind if row.users == 1 else f"{row.kind}, {row.users} users"


NOTES = """\
Whole requests, prompt included, greedy, every system on the same cores, one contestant at a time; `users` prompts
come at once, and no system keeps what it has computed of a prompt. `tokens per target step` is new tokens ÷ forward
passes of the target, of each text those that it took part in: no load of the machine disturbs it. A text that differs
from the system's own plain text was changed by its speculation, or by arithmetic that rounds otherwise for other row
counts. llama.cpp's server never writes an end that is to be ignored, others do: behind it texts differ. Memory is
what all processes of a contestant have resident after a run, at most: files that they map count.
"""


def peers_markdown(contest: Contest) -> str:
    """Write the report."""
    rows = peer_rows(contest)
    parts = ["# Beside other systems", "## Our modes beside each system's plain and best mode\n"]
    parts += [markdown_table([_duel_line(duel) for duel in duels(contest, rows)])]
    parts += ["## All modes\n", markdown_table([_line(row) for row in rows])]
    parts += ["## Memory and start\n", markdown_table(_processes(contest))]
    parts += [failures_text("## Not measured, or not to the end", contest.failures), NOTES]
    return "\n".join(part for part in parts if part)


def _processes(contest: Contest) -> list[dict[str, object]]:
    """Each contestant's memory, in MiB, and the seconds until it was ready."""
    most: dict[tuple[str, str], int] = {}
    for run in contest.runs:
        most[run.system, run.mode] = max(run.resident_bytes, most.get((run.system, run.mode), 0))
    return [
        {"system": of[0], "mode": of[1], "MiB": resident >> 20, "start s": f"{contest.starts_s[of]:.1f}"}
        for of, resident in most.items()
    ]


def _duel_line(duel: Duel) -> dict[str, object]:
    return {
        "kind": duel.kind,
        "users": duel.users,
        "ours": duel.ours,
        "theirs": duel.peer,
        "ours ÷ theirs (min to max)": spread_text(duel.ratio, 2),
        "lower 95 %": f"{duel.lower:.2f}",
    }


def _line(row: PeerRow) -> dict[str, object]:
    first = f" (first from token {row.first_difference})" if row.first_difference is not None else ""
    return {
        "kind": row.kind,
        "users": row.users,
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
