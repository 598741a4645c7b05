"""`python -m tests.chaos.soak --minutes 60 --seed 1 --out docs/reports`: faults under load for long, with a report.

Faults of the seed's plan fall one after the other while requests run; behind each of them a calm wave of requests
is compared with its undisturbed texts, too, and then every process is sampled, idle. In the first quarter of the
time faults may end processes. Behind it none does, and from half of the time on each process is followed, warm: its
memory, descriptors and threads. Exit status 1 says that something was lost, changed or leaked, or that memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from paceline.local.service_process import Flags, ProcessName
from paceline.runtime.process import signals_interrupt
from paceline_lab.bench.resources import KINDS, Drift, ResourceWatch, Samples
from paceline_lab.reporting.presentation import markdown_table
from paceline_lab.reporting.reports import describe, load_average, write_report
from tests.chaos.cluster import NEAR, TARGET, ChaosCluster
from tests.chaos.faults import Fault, Kind, plan
from tests.chaos.oracle import same_text
from tests.chaos.report import as_record, as_text
from tests.chaos.requests import Asked, all_requests
from tests.chaos.runner import Outcome, Runner
from tests.chaos.states import State

SHAPE = "plain"
ENDING = (Kind.KILL, Kind.RESTART, Kind.MEMORY)
"""Faults behind which a process is another one; so are all that fall while one drains."""
SMALL: dict[ProcessName, Flags] = {"target": {"model": f"{TARGET},max_kv_rows=8192"}}
"""Room for 40 sessions: what a target keeps of prefixes fills the rest within minutes, and grows no further."""
ENDING_SHARE, WARM_SHARE = 1 / 4, 1 / 2
"""Of the time: until when they fall, and from when on processes are followed. Allocators grow for some minutes, by 1
to 2 % in two (measured), until they have what they need."""
LEAST_JUDGED_MINUTES = 10
"""Growth over fewer is shown and not judged."""
CALM = 8
"""Requests of a wave in which nothing is done to anybody: twice those beside a fault."""
FLAT_SHARE_AN_HOUR = 0.02
"""Growth in an hour, over what a process holds, that counts as none: a month of it is what restarts are for."""
MOST_A_MINUTE = 120
"""Faults, from above: each takes half a second at least, with its requests."""


@dataclass
class Soaked:
    """What came of it.

    Attributes:
        outcomes: of the faults.
        calm: requests of calm waves.
        wrong: what was lost or changed in calm waves, in words.
        lives: samples of each process's last life, by label.
        ended: processes that were replaced while none should end, by label.
        seconds: all together.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    calm: int = 0
    wrong: list[str] = field(default_factory=list)
    lives: dict[str, Samples] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def totals(self) -> dict[str, int]:
        """How much of what."""
        judged = [each.judged for each in self.outcomes]
        return {
            "faults": sum(each.struck for each in self.outcomes),
            "requests": self.calm + sum(each.requests for each in self.outcomes),
            "lost": sum(len(each.lost) for each in judged) + sum(what.startswith("lost") for what in self.wrong),
            "changed": sum(len(each.changed) for each in judged)
            + sum(what.startswith("changed") for what in self.wrong),
            "leaked": sum(len(each.leaked) for each in judged),
            "processes that ended unasked": len(self.ended),
        }

    def failures(self) -> list[str]:
        """What must not be, in words."""
        found = [f"{name}: {count}" for name, count in self.totals().items() if name not in ("faults", "requests")]
        grown = [f"memory of {label} grows: {life.drift(KINDS[0])} MiB a minute" for label, life in self.growing()]
        return [each for each in found if not each.endswith(": 0")] + grown

    def growing(self) -> Iterator[tuple[str, Samples]]:
        """Processes whose memory grows for certain, and by more than what counts as none."""
        for label, life in self.lives.items():
            if life.minutes < LEAST_JUDGED_MINUTES:
                continue
            allowed = FLAT_SHARE_AN_HOUR * life.most(KINDS[0]) / 60
            if life.drift(KINDS[0]).low > allowed:
                yield label, life


class SoakCluster(ChaosCluster):
    """Its targets keep few prefixes."""

    def _flags_of(self, label: str, name: ProcessName) -> Flags:
        return super()._flags_of(label, name) | SMALL.get(name, {})


class SoakRunner(Runner):
    """Runs calm waves, too."""

    async def calm(self, asked: Sequence[Asked]) -> list[str]:
        """What was lost or changed of requests to which nothing was done."""
        got = await self._load(asked)
        lost = [f"lost: {each}: {ended.error} {ended.message}" for each, ended in got.items() if ended.error]
        changed = [
            f"changed: {each}: {ended.result}"
            for each, ended in got.items()
            if not ended.error and not same_text(each, self._expected, ended)
        ]
        return [*lost, *changed]


def faults_of(seed: int, count: int) -> tuple[Sequence[Fault], Sequence[Fault]]:
    """So many faults, and those of them that end no process."""
    every = plan(seed, count, SHAPE)
    return every, [fault for fault in every if fault.kind not in ENDING and fault.state is not State.DRAIN]


async def soak(folder: Path, seed: int, seconds: float) -> Soaked:
    """Let faults fall for so long; a cluster that does not settle is replaced."""
    found, began, source = Soaked(), time.monotonic(), Random(seed)
    every, staying = map(iter, faults_of(seed, 4 * math.ceil(MOST_A_MINUTE * seconds / 60)))
    while time.monotonic() - began < seconds:
        with SoakCluster(folder / str(len(found.outcomes))) as cluster:
            runner = SoakRunner(cluster)
            await runner.prepare(all_requests(SHAPE))
            watch = _Lives(cluster, found)
            while time.monotonic() - began < seconds:
                share = (time.monotonic() - began) / seconds
                await _cycle(runner, next(every if share < ENDING_SHARE else staying), source, found)
                watch.look(staying=share >= ENDING_SHARE, warm=share >= WARM_SHARE)
                if found.outcomes[-1].judged.leaked:
                    break
    found.seconds = time.monotonic() - began
    return found


async def _cycle(runner: SoakRunner, fault: Fault, source: Random, found: Soaked) -> None:
    found.outcomes.append(await runner.run(fault))
    calm = await runner.calm(source.sample(all_requests(SHAPE), CALM))
    found.wrong += calm
    found.calm += CALM
    judged = found.outcomes[-1].judged
    wrong = [*judged.lost, *judged.changed, *judged.leaked, *(f"calm: {each}" for each in calm)]
    for each in wrong or [f"{found.totals()}"]:
        print(f"{len(found.outcomes)}. {each}", file=sys.stderr, flush=True)  # noqa: T201


class _Lives:
    """Samples processes for as long as each is the same."""

    def __init__(self, cluster: ChaosCluster, found: Soaked) -> None:
        self._cluster, self._found = cluster, found
        self._watch = ResourceWatch()
        self._pids: dict[str, int] = {}

    def look(self, *, staying: bool, warm: bool) -> None:
        """Sample each where it is warm; whoever is replaced where none should end is noted, and begins anew."""
        self._cluster.settle()
        pids = {label: self._cluster.held(label).pid for label in self._cluster.shape.labels}
        replaced = [label for label, pid in self._pids.items() if pids[label] != pid]
        for label in replaced:
            self._watch.samples.pop(label, None)
        if staying:
            self._found.ended += replaced
        if warm:
            self._watch.sample(pids)
        self._pids = pids
        self._found.lives = self._watch.samples


def report_of(found: Soaked) -> str:
    """The report behind its facts."""
    lives = [_life(label, life) for label, life in found.lives.items()]
    verdict = "; ".join(found.failures()) or "none"
    faults = as_text([as_record(each) for each in found.outcomes]).partition("\n")[2]
    return (
        f"# Soak under faults\n\n{markdown_table([found.totals()])}\nWhat must not be: {verdict}.\n\n"
        f"## Processes, idle between faults, in the second half of the time\n\n{markdown_table(lives)}\n"
        f"## The faults\n{faults}"
    )


def _life(label: str, life: Samples) -> dict[str, object]:
    drifts: dict[str, Drift] = {kind: life.drift(kind) for kind in KINDS}
    held = {kind: f"{life.values[kind][0]:.0f}, at most {life.most(kind):.0f}" for kind in KINDS if life.at_s}
    shown: dict[str, object] = {"process": label, "samples": len(life.at_s)}
    for kind in KINDS:
        shown |= {f"{kind}, first": held.get(kind, "–"), f"{kind} a minute (95 %)": str(drifts[kind])}
    return shown


@signals_interrupt()
def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="Folder of the report; none: it is not written.")
    given = parser.parse_args()
    before = load_average()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(soak(Path(folder), given.seed, 60 * given.minutes))
    text = report_of(found)
    if given.out:
        facts = describe() | {
            "seed": str(given.seed),
            "minutes": f"{found.seconds / 60:.1f}",
            "target": TARGET,
            "draft": NEAR,
            "load average": f"{before} before, {load_average()} after",
        }
        values = {
            "totals": found.totals(),
            "wrong": found.wrong,
            "lives": {label: asdict(life) for label, life in found.lives.items()},
            "faults": [as_record(each) for each in found.outcomes],
        }
        text = str(write_report(given.out, "soak-faults", facts, values, text))
    print(text)  # noqa: T201
    return 1 if found.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
