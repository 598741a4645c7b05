"""The report of a run of faults: what fell where, what it cost, what was lost."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline_lab.reporting.figures import percentile
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, report_file, write_report
from tests.chaos.cluster import FLAGS, NEAR, TARGET
from tests.chaos.runner import Outcome
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
