"""The group of a target's requests: which mode it is in by what it measures, and what being wrong may cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.policy.group import Group
from paceline.costs.goodput import ALLOWED_STEPS, FIRST_PAUSE, LOOK_STEPS, MARGIN, SHORT_PAUSE, Mode
from paceline.costs.running_mean import MEMORY, SPEED_MEMORY
from paceline.protocol.records import RoundRecord, StepTimings

STEP_MS = 20.0
WAVE = 96
"""Steps of a request at rest."""
Gain = Callable[[Mode], float]
"""Tokens of a mode beside rest."""


def gains(matches: float, drafts: float) -> Gain:
    return {Mode.REST: 1.0, Mode.MATCHES: matches, Mode.DRAFTS: drafts}.__getitem__


USEFUL, USELESS = gains(1.0, 1.5), gains(1.0, 0.5)


def step_ms(rows: float) -> float:
    return STEP_MS + 0.5 * rows


def run(
    group: Group,
    sessions: int,
    gain: Gain,
    steps: int,
    *,
    prefix_rows: int = 0,
    line: Callable[[float], float] = step_ms,
    reads: bool = False,
) -> tuple[float, list[Mode]]:
    """Steps of all sessions, one token a round; returns the time beside rest's, and the mode of each step.

    `line`: what the target says of its steps.
    """
    modes: list[Mode] = []
    rest_ms, ms = step_ms(sessions), 0.0
    for _ in range(steps):
        mode = group.mode(sessions)
        modes.append(mode)
        round_ms = rest_ms / gain(mode)
        ms += round_ms
        step = StepTimings(
            forward_ms=round_ms, rows=sessions + prefix_rows, sessions=sessions, prefix_rows=prefix_rows
        )
        proposed = int(mode is not Mode.REST and gain(mode) != 1.0)
        for _ in range(sessions):
            record = RoundRecord(9, round_ms, 0, 0, step, 0, proposed, 0, cache_hit=False, self_started=True)
            group.learn(record, sessions, sessions, line, reads=reads and mode is Mode.DRAFTS)
    return ms / (steps * rest_ms), modes


def share(modes: list[Mode], mode: Mode) -> float:
    return modes.count(mode) / len(modes)


FEW_AND_MANY = [(2, 0.3), (4, 0.7), (16, 0.9), pytest.param(64, 0.7, marks=pytest.mark.full)]


@pytest.mark.parametrize(("sessions", "worst"), FEW_AND_MANY)
def test_modes_that_lose_cost_a_bounded_trial_whose_share_falls(sessions: int, worst: float) -> None:
    group = Group(promise=2.0)
    first, _ = run(group, sessions, gains(worst, worst), WAVE)
    # The last round of a trial is known to have lost only when it is over.
    assert first * WAVE - WAVE <= 2 * (ALLOWED_STEPS + 1 / worst)
    later, modes = run(group, sessions, gains(worst, worst), 30 * WAVE)
    assert later <= 1.01
    assert share(modes, Mode.REST) >= 0.9


@pytest.mark.parametrize("sessions", [2, pytest.param(64, marks=pytest.mark.full)])
def test_what_gains_is_kept(sessions: int) -> None:
    group = Group(promise=1.5)
    ratio, modes = run(group, sessions, gains(1.1, 1.5), 10 * WAVE)
    assert ratio <= 1 / 1.45
    assert share(modes, Mode.DRAFTS) >= 0.93
    assert modes[: int(LOOK_STEPS)] == [Mode.MATCHES] * int(LOOK_STEPS), "drafts are judged beside matches"


def test_drafts_that_bring_less_than_matches_are_left_though_they_gain() -> None:
    group = Group(promise=1.2)
    ratio, modes = run(group, 4, gains(1.6, 1.2), 10 * WAVE)
    assert share(modes, Mode.MATCHES) >= 0.95
    assert ratio <= 1 / 1.55


def test_drafts_that_still_read_the_texts_owe_no_gain_beside_matches_but_may_cost_only_so_much() -> None:
    def drafting_steps(reading: float, *, reads: bool) -> int:
        group = Group(promise=1.5)
        run(group, 4, gains(1.3, 1.5), int(LOOK_STEPS))
        return run(group, 4, gains(1.3, reading), WAVE, reads=reads)[1].count(Mode.DRAFTS)

    assert drafting_steps(1.0, reads=True) >= 0.95 * WAVE, "behind the rest of the look"
    assert drafting_steps(1.0, reads=False) <= ALLOWED_STEPS / 0.3 + 1
    assert 0 < drafting_steps(0.8, reads=True) <= ALLOWED_STEPS / (1 / 0.8 - 1) + 1


def test_what_turns_useless_is_left_and_taken_again_once_it_is_good() -> None:
    group = Group(promise=1.5)
    run(group, 8, USEFUL, 2 * WAVE)
    steps = int(SHORT_PAUSE)
    ratio, _ = run(group, 8, USELESS, steps)
    until_known = MEMORY * math.log((1.5 - 0.5) / (MARGIN - 0.5))
    assert ratio * steps - steps <= 0.5 * until_known + 1 / 0.5, "what has gained is left once its latest rounds lose"
    _, modes = run(group, 8, USEFUL, int(FIRST_PAUSE) + WAVE)
    assert share(modes[-WAVE:], Mode.DRAFTS) >= 0.8


def test_a_bad_stretch_does_not_end_what_gains() -> None:
    group = Group(promise=1.5)
    run(group, 8, USEFUL, 2 * WAVE)
    run(group, 8, USELESS, 3 * int(ALLOWED_STEPS))
    _, modes = run(group, 8, USEFUL, WAVE)
    assert share(modes, Mode.DRAFTS) == 1.0


def test_a_load_that_ran_long_ago_or_never_is_taken_to_be_as_the_nearest_one() -> None:
    group = Group(promise=1.5)
    run(group, 2, USEFUL, WAVE)
    run(group, 8, USEFUL, 4 * int(FIRST_PAUSE))
    assert run(group, 2, USEFUL, int(LOOK_STEPS))[1] == [Mode.DRAFTS] * int(LOOK_STEPS)
    gaining, losing = Group(promise=1.5), Group()
    run(gaining, 16, USEFUL, WAVE)
    assert gaining.mode(8) is Mode.DRAFTS
    run(losing, 16, gains(0.5, 0.5), WAVE)
    assert losing.mode(32) is Mode.REST


def test_drafts_that_lost_are_tried_again_for_a_while_though_what_they_promised_last_was_too_little() -> None:
    group = Group(promise=1.5)
    run(group, 8, USELESS, WAVE)
    group.promise = 0.9  # nobody drafts, so nothing else will be learned of them
    _, modes = run(group, 8, USEFUL, int(FIRST_PAUSE))
    until_seen = 1.5 * MEMORY * math.log(MEMORY / (MEMORY - SPEED_MEMORY))  # of a mean that forgets
    assert modes.count(Mode.DRAFTS) == pytest.approx(until_seen, abs=1)
    group.promise = 1.5  # that is what the trial taught
    assert share(run(group, 8, USEFUL, WAVE)[1], Mode.DRAFTS) >= 0.8


def test_one_request_alone_has_an_account_of_its_own() -> None:
    group = Group()
    run(group, 1, lambda mode: 0.1, WAVE)
    assert group.mode(1) is Mode.DRAFTS
    assert not group.tries_drafts(1)
    assert not group.accounts, "who never shared a target has no group to report"


def test_the_first_and_last_request_of_a_burst_does_what_the_others_did_until_it_has_been_alone_for_a_while() -> None:
    group = Group()
    run(group, 4, gains(0.5, 0.5), 2 * WAVE)
    _, modes = run(group, 1, lambda _: 1.0, 3 * int(LOOK_STEPS))
    assert modes.index(Mode.DRAFTS) == LOOK_STEPS == modes.count(Mode.REST)
    run(group, 4, gains(2.0, 0.5), 20 * WAVE)
    assert group.mode(1) is Mode.MATCHES


@pytest.mark.parametrize(
    ("own", "foreign_rows", "accepted", "pays"),
    [
        pytest.param(2, 0, 1, False, id="two of eight that bring little"),
        pytest.param(2, 0, 2, True, id="two of eight that bring much"),
        pytest.param(8, 0, 1, False, id="all, which bring little"),
        pytest.param(8, 0, 2, True, id="all, which bring much"),
        pytest.param(4, 12, 0, False, id="half of those that draft, in vain"),
        pytest.param(4, 12, 2, True, id="half of those that draft, who bring much"),
    ],
)
def test_what_rows_take_from_another_coordinators_requests_is_the_groups_loss(
    own: int, foreign_rows: int, accepted: int, *, pays: bool
) -> None:
    """A step of 8 sessions takes 36 ms, and 2 ms more for each row of a proposal: three of each of its own requests.

    `foreign_rows`: of the other coordinator's proposals, which are there whatever the group does.
    """
    group, sessions, rows, modes = Group(promise=2.0), 8, 3, []

    def line(rows: float) -> float:
        return STEP_MS + 2.0 * rows

    for _ in range(4 * WAVE):
        modes.append(mode := group.mode(sessions))
        drafts = int(mode is Mode.DRAFTS)
        step = StepTimings(rows=sessions + foreign_rows + own * rows * drafts, sessions=sessions)
        ms, right = line(step.rows), accepted * drafts
        for _ in range(own):
            record = RoundRecord(9, ms, 0, 0, step, 0, rows * drafts, right, cache_hit=False, self_started=True)
            group.learn(record, sessions, own, line)
    assert (share(modes, Mode.DRAFTS) > 0.5) is pays


@pytest.mark.parametrize("own", [2, 8])
def test_at_rest_a_round_of_all_stands_for_a_step(own: int) -> None:
    group, sessions = Group(has_line=False), 8
    step = StepTimings(rows=sessions, sessions=sessions)
    for _ in range(3 * own):
        record = RoundRecord(9, step_ms(sessions), 0, 0, step, 0, 0, 0, cache_hit=False, self_started=True)
        assert group.mode(sessions) is not Mode.REST or group.learn(record, sessions, own, step_ms) in (0.0, 1.0)
    assert group.mode(sessions) is Mode.REST
    assert group.steps == 3


def test_a_prompt_in_the_step_is_not_the_modes_price() -> None:
    group = Group()
    _, modes = run(group, 4, lambda mode: 0.2, WAVE // 5, prefix_rows=128)
    assert set(modes) == {Mode.MATCHES}


def test_what_slows_every_round_of_a_mode_is_seen_by_looks_at_rest() -> None:
    """The line of a target is learned in all modes, so the coordinator's own work is in it."""
    _, modes = run(Group(), 4, gains(0.95, 0.95), 20 * WAVE, line=lambda rows: step_ms(rows) / 0.95)
    first = int(ALLOWED_STEPS / (MARGIN - 1)) - 1
    assert set(modes[:first]) == {Mode.MATCHES}, "before the first look"
    assert share(modes[5 * WAVE :], Mode.REST) >= 0.8


def test_what_gains_less_than_it_takes_of_shared_cores_is_left() -> None:
    _, modes = run(Group(), 16, gains(MARGIN - 0.03, 1.0), 20 * WAVE)
    assert share(modes, Mode.MATCHES) <= 0.2
    assert modes[: int(ALLOWED_STEPS / 0.05)] == [Mode.MATCHES] * int(ALLOWED_STEPS / 0.05)


@pytest.mark.parametrize("sessions", [1, 4])
def test_a_long_proposal_whose_round_takes_many_times_a_step_is_a_loss(sessions: int) -> None:
    """Its rows are dear, and a draft that spins on the target's cores makes them dearer: six tokens in 15 steps."""
    group, rest_ms = Group(promise=2.0), step_ms(sessions)
    step = StepTimings(forward_ms=15 * rest_ms, rows=6 * sessions, sessions=sessions)
    slow = RoundRecord(9, 15 * rest_ms, 0, 0, step, 0, 5, 5, cache_hit=True)

    def dear(rows: float) -> float:
        return rest_ms * (1 + 0.5 * (rows - sessions) / sessions)

    assert group.learn(slow, sessions, sessions, dear) > 2 * 6
    pause = replace(slow, round_ms=1000 * rest_ms)
    assert group.learn(pause, sessions, sessions, dear) < 20, "a pause of the machine has little weight"
