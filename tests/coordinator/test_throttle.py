"""What all requests together may use, judged by what comes out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from coordinator.policy.throttle import MANY_ROUNDS, MARGIN, Level, Throttle

MS_PER_ROUND = 10.0


class Machine:
    """Requests whose tokens a round depend on the level in force; `now` in milliseconds."""

    def __init__(self, requests: int, *, follows: bool = True, off: bool = False) -> None:
        self.throttle = Throttle()
        self.now = 0.0
        self.ms_at = dict.fromkeys(Level, 0.0)
        for _ in range(requests):
            self.throttle.enter(self.now, follows=follows, off=off)

    def run(self, ms: float, tokens_per_round: Mapping[Level, float]) -> None:
        end = self.now + ms
        while self.now < end:
            level = self.throttle.level
            ms = MS_PER_ROUND / self.rate(level, tokens_per_round)
            self.now += ms
            self.ms_at[level] += ms
            self.throttle.add(1, self.now)
            self.seen(level)

    def rate(self, level: Level, tokens_per_round: Mapping[Level, float]) -> float:
        """How fast the next round runs."""
        return tokens_per_round[level]

    def seen(self, level: Level) -> None:
        """A round has run at this level; for tests to look at."""


@pytest.mark.parametrize("best", list(Level))
def test_most_time_goes_to_the_best_level_and_little_to_trials(best: Level) -> None:
    machine = Machine(4)
    rates = {level: 1.5 if level is best else 0.3 for level in Level}
    machine.run(20_000, rates)
    machine.ms_at = dict.fromkeys(Level, 0.0)
    machine.run(400_000, rates)
    assert machine.ms_at[best] > 0.98 * sum(machine.ms_at.values())
    assert all(machine.ms_at.values()), "every level is tried again"


def test_a_level_that_became_better_is_found() -> None:
    machine = Machine(4)
    machine.run(100_000, {Level.NONE: 1.0, Level.NGRAM: 0.9, Level.FULL: 0.5})
    assert machine.throttle.level is Level.NONE
    machine.run(1_000_000, {Level.NONE: 1.0, Level.NGRAM: 0.9, Level.FULL: 2.0})
    machine.ms_at = dict.fromkeys(Level, 0.0)
    machine.run(100_000, {Level.NONE: 1.0, Level.NGRAM: 0.9, Level.FULL: 2.0})
    assert machine.ms_at[Level.FULL] > 0.9 * sum(machine.ms_at.values())


def test_requests_that_choose_for_themselves_are_no_evidence() -> None:
    machine = Machine(4, follows=False)
    machine.run(50_000, dict.fromkeys(Level, 0.01))
    assert machine.throttle.level is Level.FULL


def test_target_only_requests_say_what_target_only_is_worth() -> None:
    machine = Machine(4, follows=False, off=True)
    machine.run(20_000, dict.fromkeys(Level, 1.0))
    for _ in range(4):
        machine.throttle.leave(machine.now, follows=False, off=True)
    for _ in range(4):
        machine.throttle.enter(machine.now, follows=True, off=False)
    seen = set()
    for _ in range(15):
        seen.add(machine.throttle.level)
        machine.run(100, {Level.NONE: 1.0, Level.NGRAM: 1.2, Level.FULL: 1.1})
    assert seen == {Level.NGRAM, Level.FULL}, "target-only needs no trial of its own yet"


def test_more_requests_begin_with_what_fewer_have_learned() -> None:
    machine = Machine(4)
    machine.run(100_000, {Level.NONE: 1.0, Level.NGRAM: 0.9, Level.FULL: 0.2})
    for _ in range(6):
        machine.throttle.enter(machine.now, follows=True, off=False)
    assert machine.throttle.level is Level.NONE


def test_a_load_that_nothing_is_known_of_takes_after_the_nearest() -> None:
    machine = Machine(64)
    machine.run(100_000, {Level.NONE: 1.0, Level.NGRAM: 0.9, Level.FULL: 0.2})
    for _ in range(64 - 9):
        machine.throttle.leave(machine.now, follows=True, off=False)
    seen = [machine.throttle.level]
    machine.run(100_000, {Level.NONE: 1.0, Level.NGRAM: 0.9, Level.FULL: 1.5})
    seen.append(machine.throttle.level)
    for _ in range(4):
        machine.throttle.leave(machine.now, follows=True, off=False)
    seen.append(machine.throttle.level)
    assert seen == [Level.NONE, Level.FULL, Level.FULL], "what 64 want, what 9 want, and 5 are nearer to those"


class Turning(Machine):
    """A machine on which the first round of each request after a change of level costs what the worst level does."""

    rounds = 0
    turning_rounds = 4
    since_change = turning_rounds
    before: Level | None = None

    def rate(self, level: Level, tokens_per_round: Mapping[Level, float]) -> float:
        changed = self.before not in (None, level)
        self.since_change = 0 if changed else self.since_change + 1
        self.before = level
        turning = self.since_change < self.turning_rounds
        return self.turning_rate(level, tokens_per_round) if turning else tokens_per_round[level]

    def turning_rate(self, level: Level, tokens_per_round: Mapping[Level, float]) -> float:
        return min(tokens_per_round.values())

    def seen(self, level: Level) -> None:
        self.rounds += 1


def test_what_the_change_to_a_trial_and_back_costs_counts_as_the_trials() -> None:
    machine = Turning(4)
    rates = {Level.NONE: 1.0, Level.NGRAM: 0.8, Level.FULL: 0.25}
    machine.run(50_000, rates)
    self_started, machine.rounds = machine.now, 0
    machine.run(400_000, rates)
    lost = machine.now - self_started - machine.rounds * MS_PER_ROUND
    assert 0 < lost < 0.0125 * (machine.now - self_started)


def test_a_first_trial_at_a_bad_time_does_not_count_for_long() -> None:
    machine = Machine(4)
    rates = {Level.NONE: 1.4, Level.NGRAM: 0.9, Level.FULL: 1.0}
    machine.run(2_000, rates | {Level.NONE: 0.3})
    machine.run(20_000, rates)
    machine.ms_at = dict.fromkeys(Level, 0.0)
    machine.run(40_000, rates)
    assert machine.ms_at[Level.NONE] > 0.9 * sum(machine.ms_at.values())


def test_the_draft_service_is_used_only_where_it_brings_all_more_than_the_unluckiest_loses() -> None:
    for gain, best in ((1 + 0.7 * (MARGIN - 1), Level.NONE), (1 + 1.3 * (MARGIN - 1), Level.FULL)):
        machine = Machine(4)
        machine.run(100_000, {Level.NONE: 1.0, Level.NGRAM: 0.9, Level.FULL: gain})
        machine.ms_at = dict.fromkeys(Level, 0.0)
        machine.run(100_000, {Level.NONE: 1.0, Level.NGRAM: 0.9, Level.FULL: gain})
        assert machine.ms_at[best] > 0.9 * sum(machine.ms_at.values())


class Slow(Turning):
    """Six rounds of each request after a change of level run half as fast as they will."""

    turning_rounds = 24

    def turning_rate(self, level: Level, tokens_per_round: Mapping[Level, float]) -> float:
        return 0.5 * tokens_per_round[level]


def test_trials_that_end_early_do_not_say_how_good_a_level_is() -> None:
    """Six slow rounds outlast what settles and what a trial gets that goes badly."""
    machine = Slow(4)
    rates = {Level.NONE: 1.0, Level.NGRAM: 0.9, Level.FULL: 1.2}
    machine.run(200_000, rates)
    machine.turning_rounds = 0
    machine.run(100_000, rates | {Level.NONE: 1.4})
    machine.ms_at = dict.fromkeys(Level, 0.0)
    machine.run(100_000, rates | {Level.NONE: 1.4})
    assert machine.ms_at[Level.NONE] > 0.9 * sum(machine.ms_at.values())


class Busy(Machine):
    """Requests come and go all the time."""

    def seen(self, level: Level) -> None:
        if self.rounds % 20 == 0:
            self.throttle.leave(self.now, follows=True, off=False)
        if self.rounds % 20 == 10:
            self.throttle.enter(self.now, follows=True, off=False)
        self.rounds += 1

    rounds = 0


def test_requests_that_come_and_go_at_one_load_are_measured_together() -> None:
    machine = Busy(17)
    rates = {Level.NONE: 1.0, Level.NGRAM: 0.9, Level.FULL: 0.5}
    machine.run(100_000, rates)
    machine.ms_at = dict.fromkeys(Level, 0.0)
    machine.run(100_000, rates)
    assert machine.ms_at[Level.NONE] > 0.95 * sum(machine.ms_at.values())


def test_an_idle_coordinator_measures_nothing() -> None:
    machine = Machine(4)
    machine.run(1_000, dict.fromkeys(Level, 1.0))
    for _ in range(4):
        machine.throttle.leave(machine.now, follows=True, off=False)
    machine.now += 1e9
    for _ in range(4):
        machine.throttle.enter(machine.now, follows=True, off=False)
    machine.run(20_000, {Level.NONE: 0.5, Level.NGRAM: 0.5, Level.FULL: 1.0})
    assert machine.throttle.level is Level.FULL


def test_few_requests_are_left_to_their_own_policy() -> None:
    machine = Machine(3)
    machine.run(50_000, {Level.NONE: 1.0, Level.NGRAM: 1.0, Level.FULL: 0.1})
    assert machine.throttle.level is Level.FULL


class Forecasts(Machine):
    """Holds what is said of the rounds before a trial against when it comes."""

    def __init__(self, requests: int) -> None:
        super().__init__(requests)
        self.requests = requests
        self.round = 0
        self.latest_promise = 0.0
        self.broken = 0
        self.longest = 0

    def seen(self, level: Level) -> None:
        self.round += 1
        if level is Level.NONE and self.throttle.level is not Level.NONE:
            self.broken += self.round < self.latest_promise
        left = self.throttle.rounds_left(self.now)
        if self.throttle.level is Level.NONE:
            self.longest = max(self.longest, left)
            self.latest_promise = self.round + (left - 1) * self.requests
        else:
            self.latest_promise = 0.0


def test_how_long_target_only_lasts_is_told_so_that_runs_end_before_a_trial() -> None:
    machine = Forecasts(8)
    machine.run(400_000, {Level.NONE: 1.0, Level.NGRAM: 0.8, Level.FULL: 0.5})
    assert machine.throttle.level is Level.NONE or machine.ms_at[Level.NONE] > 390_000
    assert machine.longest > 100
    assert machine.broken == 0


def test_while_requests_differ_nothing_is_tried_and_target_only_lasts() -> None:
    machine = Machine(8)
    machine.throttle.enter(0.0, follows=False, off=True)
    machine.run(100_000, dict.fromkeys(Level, 1.0))
    assert machine.throttle.rounds_left(machine.now) == MANY_ROUNDS
