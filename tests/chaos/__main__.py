"""`python -m tests.chaos --seed 1 --faults 1000 --out docs/reports`: faults under load, with a report.

Every fault is decided by the seed. A run goes on behind what today's report of that folder has of its seed, so that
it can be made in pieces (`--seconds`). `--soak` lets faults fall for so long that end no process, and follows what
each holds. Exit status 1 says that something was lost, changed or leaked, or that memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.runtime.process import signals_interrupt
from tests.chaos.cluster import ChaosCluster
from tests.chaos.faults import POINTS, Fault, plan
from tests.chaos.growth import WARM_SHARE, Growth
from tests.chaos.report import as_record, earlier_records, write
from tests.chaos.requests import all_requests
from tests.chaos.runner import Outcome, Runner
from tests.chaos.shapes import SHAPES


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
