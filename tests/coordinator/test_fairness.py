"""What requests that share a target may take from each other: by their matches, and by trials of drafts that lost."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest

from coordinator.policy.cycles import Cycles
from coordinator.policy.group import Group
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.planner import RequestPlanner
from coordinator.policy.round_times import TargetTimes
from paceline.costs.goodput import ALLOWED_STEPS, FIRST_PAUSE, LOOK_STEPS, MARGIN, Mode
from paceline.costs.running_mean import SPEED_MEMORY
from paceline.protocol.draft import Shadow
from paceline.sampling.match import Match
from tests.coordinator.planned import DRAFT_MS, STEP_MS, SaidByDraft, SaidByTarget, World, record
from tests.coordinator.test_group import run

SURE = Match(24, tuple(range(8)))
OPTIONS = Options(room=60, lease=16)


def together(
    requests: int = 2, draft_ms: float = DRAFT_MS, slower: float = 1.0
) -> tuple[list[RequestPlanner], TargetTimes]:
    """Requests on one target whose rows cost something, and which follow its group."""
    world = World(target=SaidByTarget(sessions=requests, slower=slower), draft=SaidByDraft(draft_ms))
    everyone = [world.request() for _ in range(requests)]
    target = world.planner.target(world.target)
    for each in everyone:
        target.requests[each] = None  # as its first plan does
    return everyone, target


@pytest.mark.parametrize("expects_matches", [False, True])
def test_nobody_copies_while_another_has_lost_what_it_may_and_has_no_matches_of_its_own(
    *, expects_matches: bool
) -> None:
    """The matches of the other are worth a token a round by the second case, so it wins back what it loses."""
    (copier, other), _ = together()
    assert copier.plan(dataclasses.replace(OPTIONS, match=SURE)).source is Source.NGRAM
    assert copier.worth_copying(SURE, 60, ends_lease=False)
    other.loss_budget.add(0.0, 2 * ALLOWED_STEPS)
    assert other.loss_budget.is_spent()
    if expects_matches:
        other.stats.own.texts.match_value.value = 1.0
    plan = copier.plan(dataclasses.replace(OPTIONS, match=SURE))
    assert (plan.source is Source.NGRAM) is expects_matches
    assert (copier.worth_copying(SURE, 60, ends_lease=False) > 0) is expects_matches
    other.close()
    assert copier.worth_copying(SURE, 60, ends_lease=False), "an end leaves nobody to lose"


@pytest.mark.parametrize(
    ("mode", "sources"),
    [
        (Mode.REST, [Source.NONE, Source.NONE]),
        (Mode.MATCHES, [Source.NONE, Source.NGRAM]),
        (Mode.DRAFTS, [Source.WAIT, Source.NGRAM]),
    ],
)
def test_a_mode_leaves_the_options_that_it_has(mode: Mode, sources: list[Source]) -> None:
    (request, _), target = together()
    group = target.group
    look(group, 2, *Mode)
    for other in (Mode.MATCHES, Mode.DRAFTS):
        if other > mode:
            group.account(2, other).opens_at = FIRST_PAUSE
    group.promise = 2 * MARGIN
    options = dataclasses.replace(OPTIONS, drafts=True)
    plans = [request.plan(each) for each in (options, dataclasses.replace(options, match=SURE))]
    assert [plan.source for plan in plans] == sources
    assert {plan.mode for plan in plans} == {mode}
    if mode is not Mode.DRAFTS:
        assert plans[0].lease == OPTIONS.lease


def test_no_lease_of_a_look_lasts_beyond_its_end_so_that_all_begin_to_draft_together() -> None:
    (request, *_), target = together(4)
    group, leases = target.group, list[int]()
    group.promise = 2 * MARGIN
    while group.mode(4) is Mode.MATCHES:
        leases.append(request.plan(dataclasses.replace(OPTIONS, drafts=True)).lease)
        run(group, 4, lambda mode: 1.0, 1)
    assert leases == sorted(leases, reverse=True)
    assert (leases[0], leases[-1]) == (LOOK_STEPS, 1)
    assert group.mode(4) is Mode.DRAFTS


def look(group: Group, sessions: int, *modes: Mode) -> None:
    """The group has just looked at these modes."""
    for mode in modes:
        account = group.account(sessions, mode)
        account.last_at, account.steps = group.steps, float(SPEED_MEMORY)


def trial(requests: list[RequestPlanner], target: TargetTimes) -> None:
    """Drafts ran once, were forgotten since, and promise too little."""
    target.group.steps = 2 * FIRST_PAUSE
    look(target.group, len(requests), *Mode)
    target.group.account(len(requests), Mode.DRAFTS).steps = 0.0
    target.group.promise = MARGIN / 2
    assert requests[0].mode is Mode.DRAFTS


def test_one_request_tries_drafts_that_lost_and_waits_for_none_that_computes_its_text() -> None:
    requests, target = together(4, draft_ms=10 * STEP_MS)
    trial(requests, target)
    opening = Options(room=60, drafts=True, lag=50, lease=16, trees=True)
    plans = [request.plan(opening) for request in requests]
    assert [plan.source for plan in plans] == [Source.NONE] * 4
    assert [plan.shadow for plan in plans].count(True) == 1
    assert [plan.reads for plan in plans] == [plan.shadow for plan in plans], "nobody reads the others' texts"
    tryer = requests[[plan.shadow for plan in plans].index(True)]
    is_open = dataclasses.replace(opening, lag=0)
    assert not tryer.plan(is_open).reads
    assert [request.plan(is_open).source is Source.WAIT for request in requests] == [
        request is tryer for request in requests
    ]
    tryer.loss_budget.add(0.0, 2 * ALLOWED_STEPS)
    assert tryer.plan(is_open).source is Source.NONE, "then it is another's turn"
    assert [request.plan(is_open).source for request in requests].count(Source.WAIT) == 1


@pytest.mark.parametrize(
    ("lag", "slower", "rounds", "begins"),
    [(0, 1.5, 0, True), (4000, 1.5, 0, False), (4000, 1.5, 16, False), (4000, 1.5, 64, True), (4000, 1.0, 0, True)],
)
def test_a_group_begins_to_draft_only_where_that_wins_back_what_reading_all_texts_takes_from_its_steps(
    *, lag: int, slower: float, rounds: int, begins: bool
) -> None:
    """A text goes on as long as it has, so from some length on it does; a draft on cores of its own takes nothing."""
    requests, target = together(4, slower=slower)
    look(target.group, 4, *Mode)
    reader = requests[0]
    for number in range(200):
        reader.stats.take_shadow(Shadow(1, number, (1,), (0.9,)))
    reader.rounds = rounds
    reader.plan(Options(room=60, drafts=True, lag=lag, lease=16))
    assert (target.group.promise > MARGIN) is begins


def test_a_prompt_is_drafted_on_at_once_only_where_drafts_promise_to_pay_for_all() -> None:
    requests, target = together()
    trial(requests, target)
    request = requests[0]
    assert not request.expects_drafts
    target.group.promise = 2 * MARGIN
    assert request.expects_drafts


def test_requests_that_name_their_drafting_say_nothing_of_what_the_group_gains() -> None:
    (following, named), target = together()
    named.close()
    named.learn(Plan(), record(), None, ())  # learns how many share the target
    steps: list[float] = []
    for request, mode in ((named, None), (following, None), (following, Mode.DRAFTS)):
        for _ in range(2):
            request.learn(Plan(mode=mode), record(), None, ())
        steps.append(target.group.steps)
    assert steps[0] == steps[1] == 0 < steps[2]
    assert [*target.requests] == [following]


@pytest.mark.parametrize("rounds_alone", [2, 0])
def test_who_comes_once_a_burst_has_ended_is_not_taken_for_the_last_of_it(rounds_alone: int) -> None:
    (last, *others), target = together(8)
    peer = target.peer
    assert isinstance(peer, SaidByTarget)
    assert target.group.mode(8) is Mode.MATCHES
    for each in others:
        each.close()
    peer.sessions = 1
    for _ in range(rounds_alone):
        assert target.group.mode(1) is not Mode.DRAFTS
        target.group.steps += 1
    last.close()
    target.group.steps += 1
    assert target.group.mode(1) is Mode.DRAFTS


def test_what_drafts_promise_one_request_alone_opens_none_for_a_burst_that_follows() -> None:
    world = World()
    alone = world.request()
    alone.plan(Options(room=60, drafts=True, lag=50, lease=16))
    assert alone.target is not None
    assert alone.target.group.promise_alone > MARGIN
    assert alone.expects_drafts
    alone.close()
    world.target.sessions = 4
    look(alone.target.group, 4, Mode.REST, Mode.MATCHES)
    for request in [world.request() for _ in range(4)]:
        plan = request.plan(Options(room=60, drafts=True, lag=50, lease=16))
        assert (plan.mode, plan.source, request.expects_drafts) == (Mode.MATCHES, Source.NONE, False)


def test_while_a_group_rests_one_request_works_out_for_all_what_drafts_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, target = together(8)
    rates_now = mock.Mock(side_effect=RequestPlanner._rates_now)
    monkeypatch.setattr(RequestPlanner, "_rates_now", lambda *arguments: rates_now(*arguments))
    target.group.account(8, Mode.REST).steps = 0.0
    for due, expected in ((True, 1), (False, 1), (True, 2)):
        if due:
            target.group.steps = target.group.promise_due
        assert {each.plan(OPTIONS).mode for each in requests} == {Mode.REST}
        assert rates_now.call_count == expected
    assert target.group.promise > 0


def test_while_a_group_follows_matches_one_request_works_out_for_all_what_drafts_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, target = together(8)
    all_cycles = mock.Mock(side_effect=Cycles.all)
    monkeypatch.setattr(Cycles, "all", lambda cycles, *, drafts: all_cycles(cycles, drafts=drafts))
    assert {each.plan(OPTIONS).mode for each in requests} == {Mode.MATCHES}
    assert [call.kwargs["drafts"] for call in all_cycles.call_args_list].count(True) == 1
    assert target.group.promise > 0
