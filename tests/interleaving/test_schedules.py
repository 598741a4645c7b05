"""The real coordinator and services under any order of messages, any plans and any broken links."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.interleaving.mutants import MUTANTS, ProductMutant
from tests.interleaving.oracle import Ran, run
from tests.interleaving.schedules import Schedule, Setup, schedules, seeded
from tests.interleaving.setups import SETUPS

FEW, MANY = 60, 5_000
MOST_FOR_A_MUTANT = 30
TURNS_BETWEEN = 3
"""Turns from one break to the next: as many as a message takes at least, from its lane to what it causes."""
CHECKED = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.differing_executors)


def explore(examples: int, *, fixed: bool) -> list[tuple[str, Ran]]:
    """Each setup that ran, and what its schedule came to."""
    explored: list[tuple[str, Ran]] = []

    @settings(
        max_examples=examples, derandomize=fixed, database=None, deadline=None, suppress_health_check=CHECKED,
        phases=(Phase.generate, Phase.shrink), print_blob=False,
    )  # fmt: skip
    @given(st.sampled_from([*SETUPS]), schedules())
    def holds(name: str, schedule: Schedule) -> None:
        note(f"python -m tests.interleaving '{name}' '{schedule}'")
        explored.append((name, run(SETUPS[name], schedule)))

    holds()
    return explored


def test_what_must_hold_does_in_any_order() -> None:
    explored = explore(FEW, fixed=True)
    counts = sum((ran.counts for _, ran in explored), Counter[str]())
    kinds = ("leases", "self-started rounds", "opened in mid-text", "prefetch", "features")
    assert min(counts[kind] for kind in kinds), "the search goes there"
    assert len({(name, ran.moved) for name, ran in explored}) > 0.8 * len(explored)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_what_must_hold_does_in_many_orders() -> None:
    explore(MANY, fixed=False)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setup", SETUPS.values(), ids=lambda setup: setup.name)
def test_a_link_may_break_at_any_message(setup: Setup) -> None:
    for turn in range(0, run(setup, Schedule(policy=bytes(range(64)))).turns, TURNS_BETWEEN):
        for which in range(2 * (setup.targets + setup.drafts)):
            run(setup, Schedule(policy=bytes(range(turn % 16, 64)), faults=((turn, which),)))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_search_finds_a_mistake_in_the_product(mutant: ProductMutant) -> None:
    with mutant.patch(), pytest.raises(AssertionError) as failed:
        for seed in range(MOST_FOR_A_MUTANT):
            run(SETUPS[mutant.setup], seeded(seed))
    assert re.search(mutant.shows, str(failed.value)), failed.value


FOUND = {"a link breaks under a round that may still prefetch": ("drafters change", ":01000001000001:0.0,55.10")}
"""Schedules of defects that the search found."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_holds(name: str) -> None:
    setup, schedule = FOUND[name]
    run(SETUPS[setup], Schedule.parse(schedule))


def test_a_schedule_is_replayed_by_its_text() -> None:
    schedule = seeded(3)
    assert Schedule.parse(str(schedule)) == schedule
    first, again = (run(SETUPS["pools"], each) for each in (schedule, Schedule.parse(str(schedule))))
    assert first == again
