"""`python -m tests.chaos --seed 1 --faults 1000 --out docs/reports`: faults under load, with a report.

Every fault is decided by the seed. A run goes on behind what today's report of that folder has of its seed, so that
it can be made in pieces (`--seconds`). `--soak` lets faults fall for so long that end no process, and follows what
each holds. Exit status 1 says that something was lost, changed or leaked, or that memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.runtime.process import signals_interrupt
from paceline_lab.reporting.figures import percentile
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, report_file, write_report
from tests.chaos.cluster import FLAGS, NEAR, TARGET, ChaosCluster
from tests.chaos.faults import POINTS, Fault, plan
from tests.chaos.growth import WARM_SHARE, Growth
from tests.chaos.requests import all_requests
from tests.chaos.runner import Outcome, Runner
from tests.chaos.shapes import SHAPES
from tests.chaos.states import State

WRONG = ("lost", "changed", "leaked")
Record = Mapping[str, Any]


def as_record(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON has it; its seed and shape decide what else there is to a fault."""
    fault, judged = outcome.fault, outcome.judged
    record: dict[str, Any] = {
        "shape": fault.shape,
        "seed": fault.seed,
        "kind": fault.kind.value,
        "peer": fault.peer,
        "state": fault.state.value,
        "moment": fault.moment.value,
        "struck": outcome.struck,
        "requests": outcome.requests,
        "excused": judged.excused,
    }
    times = {"notice_ms": outcome.notice_s, "recover_ms": outcome.recover_s}
    record |= {name: round(1e3 * value, 1) for name, value in times.items() if value is not None}
    return record | {name: list(told) for name in WRONG if (told := getattr(judged, name))}


def earlier_records(folder: Path, name: str) -> list[dict[str, Any]]:
    file = report_file(folder, name, "json")
    found: list[dict[str, Any]] = json.loads(file.read_text())["results"] if file.exists() else []
    return found


def write(folder: Path, name: str, records: Sequence[Record], seeds: Iterable[int], more: str = "") -> Path:
    facts = describe() | {
        "seeds of plans": ", ".join(str(seed) for seed in sorted(set(seeds))),
        "target": TARGET,
        "draft": NEAR,
        "processes": "2 targets (reproducible), 2 draft services, coordinator, gateway; 4 requests at once",
        "patience": f"target {FLAGS['coordinator']['round_timeout_ms']:g} ms, draft "
        f"{FLAGS['coordinator']['draft_timeout_ms']:g} ms",
    }
    return write_report(folder, name, facts, {"results": list(records)}, f"{as_text(records)}\n{more}")


def as_text(records: Sequence[Record]) -> str:
    struck = [each for each in records if each["struck"]]
    parts = [
        "# Faults under load\n",
        f"{len(struck)} faults fell. {len(records) - len(struck)} more met no frame of their state and don't count. "
        f"{sum(each['requests'] for each in struck)} requests ran.\n",
        markdown_table([_totals(struck)]),
        "## By kind\n",
        markdown_table([{"kind": kind} | _figures(of) for kind, of in _by(struck, _kind)]),
        "## By state of a round\n",
        markdown_table([{"state": state} | _figures(of) for state, of in _by(struck, _state)]),
        "## Kinds and states\n",
        _crossed(struck),
        *_failures(struck),
    ]
    return "\n".join(parts)


def _totals(struck: Sequence[Record]) -> dict[str, object]:
    return (
        {"faults": len(struck)}
        | _wrong(struck)
        | {"typed errors that the fault left no way around": sum(each["excused"] for each in struck)}
    )


def _wrong(records: Sequence[Record]) -> dict[str, object]:
    return {name: sum(len(each.get(name, ())) for each in records) for name in WRONG}


def _figures(records: Sequence[Record]) -> dict[str, object]:
    shown: dict[str, object] = {"faults": len(records)} | _wrong(records)
    for name in ("notice", "recover"):
        took = [each[f"{name}_ms"] for each in records if f"{name}_ms" in each]
        shown[f"{name} p50, ms"] = f"{percentile(took, 50):.0f}" if took else "–"
        shown[f"{name} p99, ms"] = f"{percentile(took, 99):.0f}" if took else "–"
    return shown


def _by(records: Sequence[Record], key: Callable[[Record], str]) -> list[tuple[str, list[Record]]]:
    groups = defaultdict[str, list[Record]](list)
    for each in records:
        groups[key(each)].append(each)
    return sorted(groups.items())


def _crossed(records: Sequence[Record]) -> str:
    states = [state.value for state in State]
    rows = []
    for kind, of in _by(records, _kind):
        counts = {state: len(found) for state, found in _by(of, _state)}
        rows.append({"kind": kind} | {state: counts.get(state, 0) for state in states})
    return markdown_table(rows)


def _failures(records: Sequence[Record]) -> list[str]:
    lines = [
        f"- {name}, {_kind(each)} in {_state(each)}, {each['shape']}, seed {each['seed']}: {what[:300]}"
        for each in records
        for name in WRONG
        for what in each.get(name, ())
    ]
    return ["## What went wrong\n", *lines, ""] if lines else []


def _kind(record: Record) -> str:
    return f"{record['kind']}, {record['peer']}"


def _state(record: Record) -> str:
    return str(record["state"])


async def run_faults(
    folder: Path, faults: Sequence[Fault], seconds: float, growth: Growth | None = None
) -> list[Outcome]:
    """Run faults until they are done or the time is over; a cluster that does not settle is replaced."""
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + seconds
    while len(outcomes) < len(faults) and time.monotonic() < deadline:
        shape = faults[0].shape
        with ChaosCluster(folder / str(len(outcomes)), SHAPES[shape]) as cluster:
            runner = Runner(cluster)
            await runner.prepare(all_requests(shape))
            for fault in faults[len(outcomes) :]:
                outcomes.append(await runner.run(fault))
                print(_line(len(outcomes), outcomes[-1]), file=sys.stderr, flush=True)  # noqa: T201
                if outcomes[-1].judged.leaked or time.monotonic() >= deadline:
                    break
                if growth is not None:
                    growth.look({label: cluster.held(label).pid for label in cluster.shape.labels})
    return outcomes


def _line(number: int, outcome: Outcome) -> str:
    fault, judged = outcome.fault, outcome.judged
    wrong = [f"{name}: {what}" for name in ("lost", "changed", "leaked") for what in getattr(judged, name)]
    what = f"{fault.kind.value}, {fault.peer}, {fault.moment.value} {fault.state.value}"
    fell = f"fell on {outcome.victim}" if outcome.struck else "met no frame"
    return f"{number}. {what}: {fell}, {outcome.seconds:.1f} s {' '.join(wrong)[:400]}"


@signals_interrupt()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=1000, help="Of the seed's plan, earlier pieces included.")
    parser.add_argument("--shape", choices=tuple(POINTS), default="plain", help="Of the cluster, and so its faults.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Begin no fault after so long.")
    parser.add_argument("--soak", action="store_true", help="For `--seconds`; no process is ended, all are followed.")
    parser.add_argument("--out", type=Path, default=None, help="Folder of the report; none: it is not written.")
    given = parser.parse_args()
    name = "soak-faults" if given.soak else "chaos"
    growth = Growth(WARM_SHARE * given.seconds) if given.soak else None
    faults = plan(given.seed, given.faults, given.shape, staying=given.soak)
    records: list[dict[str, Any]] = earlier_records(given.out, name) if given.out else []
    done = {(each["shape"], each["seed"]) for each in records}
    with tempfile.TemporaryDirectory() as folder:
        left = [fault for fault in faults if (fault.shape, fault.seed) not in done]
        outcomes = asyncio.run(run_faults(Path(folder), left, given.seconds, growth))
    records += [as_record(outcome) | {"plan": given.seed} for outcome in outcomes]
    if given.out:
        more = growth.text() if growth else ""
        print(write(given.out, name, records, {each["plan"] for each in records}, more))  # noqa: T201
    wrong = [o for o in outcomes if o.judged.lost or o.judged.changed or o.judged.leaked]
    grown = growth.failures() if growth else []
    for each in grown:
        print(each, file=sys.stderr)  # noqa: T201
    return 1 if wrong or grown else 0


if __name__ == "__main__":
    sys.exit(main())
