"""What the soak says of runs that went well, and of runs in which something was planted."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from paceline_lab.bench.resources import KINDS, Samples
from tests.chaos.faults import cells
from tests.chaos.oracle import Judged
from tests.chaos.runner import Outcome
from tests.chaos.soak import ENDING, SHAPE, Soaked, faults_of, report_of
from tests.chaos.states import State


def outcome(**judged: Any) -> Outcome:
    return Outcome(faults_of(1, 1)[0][0], True, "target", 4, Judged(**judged), 0.1, 0.2, 1.0)


def life(grows_a_minute: float, minutes: int = 40) -> Samples:
    source, samples = Random(1), Samples()
    samples.at_s = [10.0 * place for place in range(6 * minutes)]
    values = [200 + grows_a_minute * at_s / 60 + source.gauss(0, 0.5) for at_s in samples.at_s]
    samples.values = {kind: list(values) for kind in KINDS}
    return samples


def test_a_good_run_has_nothing_that_must_not_be() -> None:
    found = Soaked([outcome(), outcome()], calm=16, lives={"target": life(0.0)})
    assert found.failures() == []
    assert found.totals()["requests"] == 24
    assert "What must not be: none." in report_of(found)


PLANTED: dict[str, dict[str, Any]] = {
    "a lost text beside a fault": {"outcomes": [outcome(lost=("it",))]},
    "a changed text beside a fault": {"outcomes": [outcome(changed=("it",))]},
    "a session that stays": {"outcomes": [outcome(leaked=("it",))]},
    "a text lost in the calm": {"wrong": ["lost: it"]},
    "a text changed in the calm": {"wrong": ["changed: it"]},
    "a process that ended": {"ended": ["draft"]},
    "a byte a second for each kilobyte": {"lives": {"coordinator": life(0.2)}},
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_found(planted: str) -> None:
    found = Soaked(**PLANTED[planted])
    assert len(found.failures()) == 1
    assert found.failures()[0] in report_of(found)


def test_growth_over_few_minutes_is_not_judged() -> None:
    assert Soaked(lives={"coordinator": life(0.2, minutes=5)}).failures() == []


def test_faults_of_the_last_part_end_no_process_and_a_seed_decides_them() -> None:
    every, staying = faults_of(3, 800)
    kinds = {cell.kind for cell in cells(SHAPE)}
    assert {fault.kind for fault in every} == kinds >= set(ENDING)
    assert State.DRAIN in {fault.state for fault in every}
    assert {fault.kind for fault in staying} == kinds - set(ENDING)
    assert State.DRAIN not in {fault.state for fault in staying}
    assert faults_of(3, 20) == faults_of(3, 20) != faults_of(4, 20)
