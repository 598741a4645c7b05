"""Replays a schedule, or searches many: `python -m tests.interleaving --help`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.interleaving.oracle import run
from tests.interleaving.schedules import Schedule, seeded
from tests.interleaving.setups import SETUPS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interleaving", description=__doc__)
    parser.add_argument("setup", nargs="?", choices=[*SETUPS], help="of the schedule to replay")
    parser.add_argument("schedule", nargs="?", default="::", help="as a failed test prints it")
    parser.add_argument("--runs", type=int, default=100, help="schedules to search, where none is replayed")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    given = parser.parse_args()
    if given.setup is not None:
        return replay(given.setup, Schedule.parse(given.schedule))
    return search(range(given.seed, given.seed + given.runs))


def say(text: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{text}\n")


def replay(setup: str, schedule: Schedule) -> int:
    """Run one schedule, and say what happened."""
    ran = run(SETUPS[setup], schedule, say)
    say(f"{ran.turns} turns, all holds: {dict(ran.counts)}")
    return 0


def search(seeds: range) -> int:
    """Run many schedules on each of the setups, and say which fail."""
    counts, orders, failed, began = Counter[str](), set[tuple[str, ...]](), 0, time.perf_counter()
    for seed in seeds:
        setup = [*SETUPS.values()][seed % len(SETUPS)]
        try:
            ran = run(setup, seeded(seed))
        except AssertionError as error:
            failed += 1
            say(f"seed {seed}: {error}\n  python -m tests.interleaving '{setup.name}' '{seeded(seed)}'")
        else:
            counts += ran.counts
            orders.add(ran.moved)
    took = time.perf_counter() - began
    say(f"{len(seeds)} runs in {took:.0f} s, {failed} failed, {len(orders)} interleavings: {dict(counts)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
