"""The planner against costs and chances that are set by hand: what it chooses, and what it may lose."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.policy.acceptance_stats import AcceptanceStats
from coordinator.policy.cycles import Cycles, Rates, Strategy
from coordinator.policy.group import Group, LossBudget
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.planner import Planner, RequestPlanner
from coordinator.policy.pricing import MAX_MATCH_TOKENS, OTHERS_WEIGHT, ProposalPricing
from coordinator.policy.round_times import DraftTimes, TargetTimes
from paceline.costs.acceptance import MAX_DEPTH, PRIOR_CHANCE
from paceline.costs.cost_line import LEAST_STEP_MS, CostLine
from paceline.costs.goodput import ALLOWED_STEPS, LOOK_STEPS, MARGIN, Mode, load_of
from paceline.costs.running_mean import SPEED_MEMORY
from paceline.costs.service_costs import LEAST_MOVE, TargetCosts
from paceline.protocol.draft import Shadow
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.records import StepTimings
from paceline.sampling.match import Match
from tests.coordinator.planned import DRAFT_MS, ROW_MS, SENT_MS, STEP_MS, SaidByDraft, SaidByTarget, World, record
from tests.coordinator.test_fairness import look

REQUESTS = 6
ENOUGH_TO_LEARN = 10
OPTIONS = Options(room=60, drafts=True, lease=16)
RULES = [Acceptance.REJECTION, Acceptance.BLOCK]


def taught(
    chance: float, world: World | None = None, acceptance: Acceptance = Acceptance.COUPLED, requests: int = 3
) -> tuple[World, RequestPlanner]:
    """A request behind others whose draft was right so often."""
    world = world or World()
    for seed in range(requests):
        world.run(lambda _: chance, seed=seed, acceptance=acceptance)
    return world, world.request(acceptance)


def best_constant(world: World, chance: float, tokens: int = 128) -> float:
    """Target-only's time over the best constant length's, by the closed form, of a text that ends."""
    speeds = []
    for k in range(MAX_DEPTH + 1):
        each = sum(chance**accepted for accepted in range(k + 1))
        ms = world.target.costs.alone.ms(1 + k) + k * world.draft.step_ms + (SENT_MS if k else 0.0)
        # Half of the last round's tokens are beyond the end.
        speeds.append(tokens / ((tokens / each + 0.5 * (each - 1) / each) * ms))
    return max(speeds) * world.target.step_ms


def cells(quick: Collection[tuple[Any, ...]], *axes: Sequence[Any]) -> list[Any]:
    """A matrix of which CI runs the quick cells."""
    return [pytest.param(*cell, marks=[pytest.mark.full] * (cell not in quick)) for cell in product(*axes)]


@pytest.mark.parametrize(
    ("draft_ms", "chance"),
    cells(
        {(0.5, 0.9), (2.0, 0.4), (2.0, 0.75), (6.0, 0.0), (6.0, 0.6), (15.0, 0.2)},
        (0.5, 2.0, 6.0, 15.0),
        (0.0, 0.2, 0.4, 0.6, 0.75, 0.9),
    ),
)
def test_no_request_loses_and_together_they_are_as_fast_as_the_best_constant_length(
    chance: float, draft_ms: float
) -> None:
    world = World(draft=SaidByDraft(draft_ms))
    slowest, total = 0.0, 0.0
    for seed in range(ENOUGH_TO_LEARN):
        over, _ = world.run(lambda _: chance, seed=seed)
        slowest = max(slowest, over)
        total += over
    assert slowest <= 1 / 0.96
    assert ENOUGH_TO_LEARN / total >= 0.93 * best_constant(world, chance)


def test_the_first_request_of_a_fresh_service_loses_no_more_than_its_account() -> None:
    for seed in range(REQUESTS):
        over, plans = World().run(lambda _: 0.0, seed=seed)
        assert any(plan.source is Source.WAIT for plan in plans), "it is tried"
        assert over <= 1 / 0.96


LIES = {("target", 0.5, 0.0), ("target", 2.0, 0.5), ("target", 0.5, 0.9)}
LIES |= {("draft", 2.0, 0.0), ("draft", 0.5, 0.5), ("draft", 2.0, 0.9)}


@pytest.mark.parametrize(("liar", "lie", "chance"), cells(LIES, ("target", "draft"), (0.5, 2.0), (0.0, 0.5, 0.9)))
def test_the_account_holds_though_a_line_lies(liar: str, lie: float, chance: float) -> None:
    world = World(draft=SaidByDraft(5.0))
    if liar == "target":
        world.said_target = SaidByTarget(lie * STEP_MS, lie * ROW_MS)
    else:
        world.said_draft = SaidByDraft(lie * 5.0)
    for seed in range(REQUESTS):
        over, _ = world.run(lambda _: chance, seed=seed)
        assert over <= 1 / 0.95


@pytest.mark.parametrize(
    ("target_ms", "draft_ms", "took_ms"),
    [
        (target_ms, draft_ms, (1e-9, STEP_MS, 1e9)[(at + place) % 3])  # all pairs
        for at, target_ms in enumerate((LEAST_STEP_MS, STEP_MS, 1e9))
        for place, draft_ms in enumerate((LEAST_STEP_MS, DRAFT_MS, 1e9))
    ],
)
def test_a_plan_is_made_whatever_lines_and_clocks_say(target_ms: float, draft_ms: float, took_ms: float) -> None:
    said = World(said_target=SaidByTarget(target_ms, 0.0), said_draft=SaidByDraft(draft_ms, 0.0))
    _, request = taught(0.9, said, requests=1)
    computing = dataclasses.replace(OPTIONS, lag=1000, open_ms=took_ms)
    for _ in range(20):
        plan = request.plan(computing)
        assert 0 <= plan.lease <= OPTIONS.lease
        request.learn(plan, record(round_ms=took_ms, self_started=plan.lease > 0), None, ())


def test_the_account_holds_though_the_draft_becomes_ten_times_slower() -> None:
    for seed in range(REQUESTS):
        world = World(said_draft=SaidByDraft())

        def slower(written: int, draft: SaidByDraft = world.draft) -> None:
            draft.step_ms = DRAFT_MS if written < 40 else 10 * DRAFT_MS

        over, plans = world.run(lambda _: 0.4, seed=seed, before_round=slower)
        assert over <= 1 / 0.95
        assert [plan.source for plan in plans[-40:]].count(Source.WAIT) <= 8, "trials alone are left"


def test_whether_the_next_request_opens_its_draft_is_what_all_requests_know() -> None:
    world, request = taught(0.9)
    assert request.expects_drafts
    request.close()
    request = world.request(Acceptance.COUPLED)
    request.plan(OPTIONS)
    request.plan(dataclasses.replace(OPTIONS, room=1))  # its text ends
    request.plan(dataclasses.replace(OPTIONS, drafts=False))  # its draft is late
    request.close()
    assert world.request(Acceptance.COUPLED).expects_drafts
    _, request = taught(0.0)
    request.plan(OPTIONS)
    assert not request.expects_drafts


def test_of_a_burst_on_a_fresh_coordinator_the_first_request_opens_its_draft() -> None:
    world = World()
    first, second = (RequestPlanner(world.planner, "draft", Acceptance.COUPLED, greedy=True) for _ in range(2))
    assert first.expects_drafts
    assert not second.expects_drafts
    first.close()
    second.move(world.target, world.draft)
    assert second.expects_drafts


def test_a_draft_that_turns_useless_is_left_and_taken_again_when_it_is_good() -> None:
    useless = range(200, 600)
    for seed in range(3):
        world = World()
        over, plans = world.run(lambda at: 0.0 if at in useless else 0.9, tokens=900, seed=seed)
        assert over <= 1 / 0.95
        turns, returns = (next(ms for written, ms in world.loss_ms if written >= at) for at in (200, 600))
        assert returns - turns <= LEAST_MOVE * len(useless) * STEP_MS, "what was gained before pays for nothing"
        sources = [plan.source for plan in plans]
        assert Source.WAIT in sources[:40]
        middle = sources[len(sources) // 2 - 60 : len(sources) // 2]
        assert middle.count(Source.WAIT) < 10
        assert sources[-20:].count(Source.WAIT) >= 15, "its shadow says so while it is not used"


def test_a_proposal_of_which_no_node_pays_is_no_choice_though_drafts_that_lost_are_tried_again() -> None:
    _, request = taught(0.5)
    assert request.target is not None
    assert request._pricing(request.target)._ready(Source.CACHED, (0.0, 0), OPTIONS).source is Source.NONE


def test_rows_are_dearer_where_others_share_the_step() -> None:
    options = dataclasses.replace(OPTIONS, cached_proposal=Proposal(1, (7,) * 8, (0.8,) * 8, drafter="model"))
    worlds = [World(target=SaidByTarget(row_ms=1.5, sessions=sessions)) for sessions in (1, 32)]
    alone, crowded = (taught(0.7, world)[1].plan(options).nodes for world in worlds)
    assert crowded < alone


def test_a_wait_is_cheap_where_all_wait_and_dear_where_nobody_does() -> None:
    """With free rows each of many sessions gains by drafting, though one that drafts alone misses nobody's step."""
    _, crowded = taught(0.8, World(target=SaidByTarget(row_ms=0.01, sessions=16)))
    assert crowded.plan(OPTIONS).source is Source.WAIT
    dear = World(target=SaidByTarget(step_ms=4.0, row_ms=4.0, sessions=16))
    _, crowded = taught(0.8, dear)
    assert crowded.plan(OPTIONS).source is Source.NONE


def test_outcomes_are_drafted_ahead_where_that_is_free_and_not_where_it_slows_the_target_down() -> None:
    options = dataclasses.replace(OPTIONS, fan_out=4)
    _, apart = taught(0.8, World(draft=SaidByDraft(4.0)))
    plan = apart.plan(options)
    assert plan.ahead.fan_out == 4
    assert plan.ahead.max_tokens >= 2
    _, shared = taught(0.8, World(draft=SaidByDraft(4.0), target=SaidByTarget(slower=2.0)))
    assert shared.plan(options).ahead.fan_out == 0


def test_a_long_match_is_copied_at_length_and_a_short_unsure_one_is_not() -> None:
    request = World().request()
    for _ in range(200):
        request.stats.take_match(Match(40, (5,) * 64), (5,) * 8)
        request.stats.take_match(Match(2, (5,) * 64), (6,))
    sure = request.plan(Options(room=60, match=Match(40, (5,) * 64)))
    unsure = request.plan(Options(room=60, match=Match(2, (5,) * 64)))
    assert (sure.source, unsure.source) == (Source.NGRAM, Source.NONE)
    assert sure.nodes >= 16


@pytest.mark.parametrize("rule", RULES)
def test_a_sure_stretch_may_go_further_than_the_fixed_length_of_a_rule_that_may_not_look(rule: Acceptance) -> None:
    sure, fixed = (taught(0.6, acceptance=each)[1].plan(OPTIONS) for each in (Acceptance.COUPLED, rule))
    assert sure.source is fixed.source is Source.WAIT
    assert 0 == fixed.least_chance < sure.least_chance < 1
    assert 2 * fixed.depth < sure.depth
    assert fixed.depth < MAX_DEPTH


def test_a_draft_is_waited_for_no_longer_than_half_of_what_may_be_lost_or_twice_what_it_should_take() -> None:
    _, request = taught(0.6)
    request.loss_budget = LossBudget()
    plan = request.plan(OPTIONS)
    assert plan.patience_ms == pytest.approx(ALLOWED_STEPS * STEP_MS / 2)
    _, slow = taught(0.9, World(draft=SaidByDraft(4.0)))
    slow.loss_budget = LossBudget()
    plan = slow.plan(OPTIONS)
    assert plan.source is Source.WAIT
    assert plan.patience_ms <= ALLOWED_STEPS * STEP_MS


@pytest.mark.parametrize(("share", "source"), [(1.5, Source.WAIT), (0.9, Source.NONE)])
def test_one_level_is_waited_for_while_all_that_may_still_be_lost_covers_it(share: float, source: Source) -> None:
    """Half of what is left would be too little, and the request rest for good behind one wait in vain."""
    _, request = taught(0.9)
    assert request.draft is not None
    left_ms = share * request.draft.waits()[0]
    request.loss_budget = LossBudget(ALLOWED_STEPS - left_ms / STEP_MS)
    plan = request.plan(OPTIONS)
    assert plan.source is source
    if source is Source.WAIT:
        assert plan.patience_ms <= left_ms


def test_a_request_alone_reads_its_text_once_that_brings_no_matches_though_others_did() -> None:
    request = World().request()
    for _ in range(50):
        request.stats.pool.texts.match_value.add(4.0)
    request = RequestPlanner(request.planner, "auto", Acceptance.COUPLED, greedy=True)
    target, draft = SaidByTarget(), SaidByDraft()
    request.move(target, draft)
    unread = Options(room=60, drafts=True, lag=50, lease=16)
    request.plan(unread)
    assert not request.expects_drafts, "as far as others tell, matches bring more"
    for _ in range(60):
        request.learn(request.plan(unread), record(), None, ())
    assert request.stats.pool.texts.match_value.value > 1.0
    assert request.expects_drafts


def test_the_target_goes_on_alone_for_as_long_as_the_draft_computes_the_prompt_and_no_longer() -> None:
    world, request = taught(0.9)
    prompt_ms = world.draft.costs.line.ms(1000)
    computing = dataclasses.replace(OPTIONS, lag=1000, open_ms=1.0)
    plan = request.plan(computing)
    assert plan.source is Source.NONE
    assert plan.lease == int((prompt_ms - 1.0) / world.target.step_ms) < OPTIONS.lease
    assert request.plan(dataclasses.replace(computing, open_ms=prompt_ms)).source is Source.WAIT
    assert request.plan(dataclasses.replace(computing, open_ms=0.0)).lease == OPTIONS.lease, (
        "nobody computes anything"
    )


@pytest.mark.parametrize("rule", RULES)
def test_rejection_never_looks_at_draft_probabilities(rule: Acceptance) -> None:
    """`exactness` §7: what might be dropped must not decide. Coupled acceptance shows that the test can fail."""

    def nodes(acceptance: Acceptance, q: float) -> int:
        proposal = Proposal(1, (7,) * 8, (q,) * 8, drafter="model")
        request = World(target=SaidByTarget(row_ms=2.0)).request(acceptance)
        return request.plan(dataclasses.replace(OPTIONS, cached_proposal=proposal)).nodes

    assert nodes(rule, 0.01) == nodes(rule, 0.99)
    assert nodes(Acceptance.COUPLED, 0.01) < nodes(Acceptance.COUPLED, 0.99)


def test_second_children_are_asked_for_where_they_pay() -> None:
    def plan(second: int, *, trees: bool) -> Plan:
        request = World(target=SaidByTarget(row_ms=0.05), draft=SaidByDraft(4.0)).request()
        for number in range(200):
            rank = 1 if number % 2 else second
            request.stats.take_shadow(Shadow(1, number, (rank,), (0.5,)))
        return request.plan(dataclasses.replace(OPTIONS, trees=trees))

    often, never, chain = plan(2, trees=True), plan(0, trees=True), plan(2, trees=False)
    assert often.nodes > often.depth >= 1
    assert never.nodes <= never.depth
    assert chain.nodes == chain.depth


def test_what_one_request_learned_the_next_one_knows_and_a_sampled_one_does_not() -> None:
    world, request = taught(0.02)
    assert request.plan(OPTIONS).source is Source.NONE
    request.close()
    assert world.request(greedy=False).plan(OPTIONS).source is Source.WAIT


def test_where_the_target_says_nothing_of_its_steps_nothing_is_drafted() -> None:
    class Silent:
        costs = TargetCosts()

    request = RequestPlanner(Planner(), "auto", Acceptance.COUPLED, greedy=True)
    assert request.plan(OPTIONS) == Plan(mode=Mode.DRAFTS), "it has no target yet"
    request.move(Silent(), SaidByDraft())
    assert request.plan(OPTIONS) == Plan(lease=16, mode=Mode.DRAFTS)


def test_the_first_lease_lasts_no_longer_than_a_look_since_the_load_that_was_stated_may_be_gone() -> None:
    world = World(target=SaidByTarget(sessions=16))
    first = world.request()
    assert first.target is not None
    first.target.group.promise = 0.5
    first.close()
    request = RequestPlanner(world.planner, "auto", Acceptance.COUPLED, greedy=True)
    assert request.plan(OPTIONS).lease == LOOK_STEPS < OPTIONS.lease
    request.move(world.said_target, world.said_draft)
    assert request.plan(OPTIONS).lease == OPTIONS.lease


def rested(request: RequestPlanner, rounds: int, options: Options) -> list[int]:
    """Leases of rounds that were all target-only."""
    leases = []
    for _ in range(rounds):
        plan = request.plan(options)
        leases.append(plan.lease)
        request.learn(plan, record(self_started=plan.lease > 0, round_ms=STEP_MS), None, ())
    return leases


def test_what_never_has_a_proposal_is_leased_as_long_as_it_may_be() -> None:
    leases = rested(World().request(), 60, dataclasses.replace(OPTIONS, drafts=False))
    assert leases[-1] == 16
    assert rested(World().request(), 30, dataclasses.replace(OPTIONS, drafts=False, lease=0))[-1] == 0


def test_a_match_ends_the_run_and_is_proposed_behind_it() -> None:
    request = World().request()
    options = dataclasses.replace(OPTIONS, drafts=False)
    rested(request, 30, options)
    match = dataclasses.replace(options, match=Match(40, (5,) * 64))
    inside = request.plan(dataclasses.replace(match, leased_rounds=2))
    assert (inside.source, inside.lease) == (Source.NONE, 0)
    assert request.plan(match).source is Source.NGRAM


def test_where_rounds_are_leased_a_proposal_must_be_worth_being_sent() -> None:
    world = World()
    request = world.request()
    for _ in range(200):
        request.stats.take_match(Match(4, (5,) * 64), (5,))
        request.stats.take_match(Match(4, (5,) * 64), (6,))
        request.stats.take_match(Match(5, (5,) * 64), (6,))
    weak = dataclasses.replace(OPTIONS, drafts=False, match=Match(4, (5,) * 64))
    assert request.plan(weak).source is Source.NGRAM
    for _ in range(100):
        request.learn(Plan(), record(round_ms=2 * STEP_MS), None, ())
    assert request.plan(weak).source is Source.NONE


def test_the_wait_for_a_first_draft_is_no_measure_of_the_next() -> None:
    """The draft service computes the whole text for it."""
    world = World()
    request = world.request()
    times = world.planner.draft(world.draft)
    plan = Plan(Source.WAIT, 2, 2)
    late = record(
        3, 1, 2, draft_wait_ms=500.0, round_ms=STEP_MS + 501, draft=StepTimings(forward_ms=2 * DRAFT_MS, rows=1)
    )
    proposal = Proposal(1, (1, 2), (0.5, 0.5), drafter="model")
    before = times.wires[0].value
    request.learn(dataclasses.replace(plan, reads=True), late, proposal, (0,))
    assert times.wires[0].value == before
    request.learn(plan, late, proposal, (0,))
    assert times.wires[0].value > before + 5


def test_a_wait_in_vain_tells_the_least_that_a_draft_takes() -> None:
    """Its line may lag behind a service that has become slow."""
    world = World()
    request = world.request()
    wires = world.planner.draft(world.draft).wires[0]
    before = wires.value

    def wait_in_vain(ms: float) -> float:
        request.learn(Plan(Source.WAIT, 2, 2), record(draft_wait_ms=ms, round_ms=STEP_MS + ms), None, ())
        return wires.value

    assert (slow := wait_in_vain(STEP_MS)) > before + 1
    assert wait_in_vain(DRAFT_MS / 2) == slow, "one that was cut off early tells nothing"


@pytest.mark.parametrize("by_load", [True, False])
def test_what_a_crowd_waits_for_is_not_expected_by_one_alone(monkeypatch: pytest.MonkeyPatch, by_load: bool) -> None:
    if not by_load:  # a mutant
        monkeypatch.setattr("coordinator.policy.round_times.load_of", lambda sessions: 0)
    said = SaidByTarget()
    target, draft = times(said)
    alone_ms = target.late_ms(STEP_MS), draft.waits()[0]
    said.sessions = 16
    crowded = record(
        1, 0, 16, draft_wait_ms=400.0, round_ms=STEP_MS + 450, draft=StepTimings(forward_ms=DRAFT_MS, rows=1)
    )
    for _ in range(20):
        target.learn(crowded, beside=False, late=True)
        draft.learn(crowded, 16)
    assert target.late_ms(STEP_MS) > alone_ms[0] + 20
    assert draft.waits(16)[0] > alone_ms[1] + 5
    said.sessions = 1
    assert ((target.late_ms(STEP_MS), draft.waits()[0]) == alone_ms) is by_load


def test_what_a_draft_takes_from_a_step_beside_it_does_not_count_as_late() -> None:
    """The first such round: no line says yet what steps take then. What only waits would look dearer than it is."""
    target, _ = times(SaidByTarget())
    waited = record(1, 0, draft_wait_ms=DRAFT_MS, round_ms=2 * STEP_MS)
    target.learn(waited, beside=True, late=True)
    assert not target.late
    target.learn(waited, beside=False, late=True)
    assert target.late_ms(0.0) > DRAFT_MS


def times(target: SaidByTarget) -> tuple[TargetTimes, DraftTimes]:
    return TargetTimes(target), DraftTimes(SaidByDraft())


def test_a_cycle_is_its_steps_and_its_waits() -> None:
    target, draft = times(SaidByTarget())
    cycles = Cycles(target, draft, AcceptanceStats()).all()
    waiting = cycles[Strategy(Source.WAIT, 3)]
    assert waiting.tokens == pytest.approx(sum(PRIOR_CHANCE**depth for depth in range(4)))
    step_ms = STEP_MS + 3 * ROW_MS
    assert waiting.ms == pytest.approx(step_ms + target.late_ms(STEP_MS) + draft.waits()[2])
    assert cycles[Strategy()].ms == STEP_MS
    assert cycles[Strategy()].tokens == 1


def test_a_round_goes_on_without_a_draft_where_waiting_for_one_costs_a_step() -> None:
    said = SaidByTarget()
    target, draft = times(said)

    def goes_on(*, can_go_on: bool = True) -> set[bool]:
        cycles = Cycles(target, draft, AcceptanceStats(), can_ahead=True, can_go_on=can_go_on).all()
        return {strategy.goes_on for strategy in cycles if strategy.source is Source.CACHED and strategy.depth <= 2}

    assert goes_on() == {False}
    said.sessions = 8
    for _ in range(20):
        target.learn(record(2, 0, 8, round_ms=3 * STEP_MS), beside=True, late=True)
    assert goes_on() == {True}
    assert goes_on(can_go_on=False) == {False}


def test_the_factor_of_a_line_that_lies_is_found() -> None:
    target, _ = times(SaidByTarget(2 * STEP_MS, 2 * ROW_MS))
    for _ in range(50):
        target.learn(record(self_started=True, round_ms=STEP_MS), beside=False, late=False)
    assert target.steps()(1) == pytest.approx(STEP_MS, rel=0.05)
    assert target.steps()(9) == pytest.approx(STEP_MS + 8 * ROW_MS, rel=0.05)


def test_what_a_request_won_the_next_one_may_lose() -> None:
    """A good draft's first proposals fail at times: behind a gain a request goes on then, behind a loss it rests."""

    def goes_on_behind(loss: float) -> bool:
        request.loss_budget.loss = loss
        request.close()
        following = world.request()
        following.loss_budget.add(0.0, 1.5 * ALLOWED_STEPS)
        return following.plan(OPTIONS).source is Source.WAIT

    world, request = taught(0.9)
    assert goes_on_behind(-ALLOWED_STEPS)
    assert not goes_on_behind(0.0)
    assert not goes_on_behind(ALLOWED_STEPS), "a loss is not handed on"


def test_a_match_must_bring_more_than_its_rows_take_from_the_others_and_a_draft_as_much() -> None:
    _, request = taught(0.9)
    match = Match(40, (5,) * 64)
    for _ in range(100):
        request.stats.take_match(match, (5,) * 8)
    rate = 1 / STEP_MS

    def value_of(others_rate: float) -> tuple[float, float]:
        rates = Rates(rate, others_rate, rows=1)
        pricing = ProposalPricing(request.target, None, request.stats, rates, math.inf)  # type: ignore[arg-type]
        proposal = Proposal(0, (5,), (0.9,))
        return pricing.match_value(match, 1)[0], pricing.draft_value(proposal)[0]

    (match_alone, draft_alone), (match_beside, draft_beside) = value_of(0.0), value_of(rate)
    row_price = ROW_MS * rate
    assert draft_alone - draft_beside == pytest.approx(row_price, rel=0.01)
    assert match_alone - match_beside == pytest.approx(OTHERS_WEIGHT * row_price, rel=0.01)


@pytest.mark.parametrize("others_rate", [0.0, 7 / STEP_MS])
@pytest.mark.parametrize("ends", [(20.5, 21.0), (20.5, 90.0), (92.0, 93.0)])
def test_the_worth_of_a_match_is_that_of_its_best_length(ends: tuple[float, float], others_rate: float) -> None:
    """Also where the first rows are dear and those behind them cheap: none pays by itself, and all together do."""
    request, match, rows = taught(0.9)[1], Match(40, (5,) * 64), 3.0
    for _ in range(100):
        request.stats.take_match(match, (5,) * 8)
    line = CostLine(((3.0, 20.0), (6.0, ends[0]), (64.0, ends[1])))
    target = TargetTimes(cast("Any", SimpleNamespace(costs=TargetCosts(line))))
    pricing = ProposalPricing(target, None, request.stats, Rates(1 / STEP_MS, others_rate, rows=rows - 1), math.inf)
    price = 1 / STEP_MS + OTHERS_WEIGHT * others_rate
    chances = request.stats.own.texts.ngrams.prefix_chances(match, MAX_MATCH_TOKENS)
    sums = enumerate(accumulate(chances), 1)
    best = max(tokens - price * (line.ms(rows + length) - line.ms(rows)) for length, tokens in sums)
    assert pricing.match_value(match, 64)[0] == pytest.approx(max(0.0, best))


@pytest.mark.parametrize(("loss", "most"), [(0.0, 4), (1.0, 2), (1.9, 0), (-2.0, 8)])
def test_no_match_costs_more_than_may_still_be_lost(loss: float, most: int) -> None:
    """Where a row takes half a step; sure as the match is, it may be the first that fails."""
    _, request = taught(0.9, World(target=SaidByTarget(row_ms=STEP_MS / 2)))
    match = Match(40, (5,) * 64)
    for _ in range(100):
        request.stats.take_match(match, (5,) * 64)
    request.loss_budget.loss = loss
    assert request.worth_copying(match, 64, ends_lease=False) == most


@pytest.mark.parametrize(("row_ms", "follows"), [(ROW_MS, True), (1.2 * STEP_MS, False)])
def test_matches_that_come_true_while_they_are_left_out_are_followed_again(row_ms: float, follows: bool) -> None:
    """Bad luck at first must not end a copy, and what costs more than a token must not be followed."""
    _, request = taught(0.0, World(target=SaidByTarget(row_ms=row_ms)))
    match = Match(40, (5,) * 64)
    options = dataclasses.replace(OPTIONS, match=match, drafts=False)
    request.loss_budget.loss = request.loss_budget.bound + 1.5

    def right(token: int) -> Source:
        request.take_match(match, (token,), is_left_out=True)
        return request.plan(options).source

    assert right(5) is Source.NONE, "one step won back of one and a half"
    assert right(6) is Source.NONE
    assert right(5) is (Source.NGRAM if follows else Source.NONE)
    request.loss_budget.loss += 1.0
    assert request.plan(options).source is Source.NONE, "what fails now is no paper loss"


def test_a_match_left_out_tells_nothing_where_the_target_has_said_no_times() -> None:
    """As after a move to one that nobody has used."""

    class Silent:
        costs = TargetCosts()

    _, request = taught(0.9)
    silent = Silent()
    request.move(silent, None)
    request.loss_budget.loss = request.loss_budget.bound + 1.0
    request.take_match(Match(40, (5,) * 64), (5,), is_left_out=True)
    assert request.loss_budget.regret == 0


def test_what_matches_left_out_would_have_gained_lets_no_draft_work() -> None:
    _, request = taught(0.9)
    request.loss_budget.loss = request.loss_budget.bound + 1.0
    for _ in range(50):
        request.take_match(Match(40, (5,) * 64), (5,), is_left_out=True)
    assert request.plan(OPTIONS).source is Source.NONE
    assert request.loss_budget.regret > 0
    request.loss_budget.add(4.0, 1.0)
    assert request.loss_budget.regret == 0, "nothing is left out any more"
    assert request.plan(OPTIONS).source is Source.WAIT


def drafting_ahead() -> tuple[RequestPlanner, Options]:
    """A request whose last round left with a mixed lease, and what the options of such rounds are."""
    request = World(target=SaidByTarget(sessions=4)).request()
    assert request.target is not None
    group = request.target.group
    group.mode(4)
    group.calm_at = 0.0  # the load has been so for a while
    look(group, 4, *Mode)
    group.promise = 2 * MARGIN
    options = dataclasses.replace(OPTIONS, fan_out=4, can_prefetch=True)
    first = request.plan(options)
    assert first.ahead.fan_out
    assert first.lease == options.lease
    return request, options


def test_a_mixed_lease_is_drafted_for_until_it_ends_though_waiting_is_better_by_now() -> None:
    request, options = drafting_ahead()
    request.rounds = round(SPEED_MEMORY) + 1
    request.rates = dataclasses.replace(request.rates, strategy=Strategy(Source.WAIT, 3))
    leased = request.plan(dataclasses.replace(options, leased_rounds=1))
    assert leased.ahead.fan_out
    assert not leased.lease, "it isn't renewed"
    assert not request.plan(options).ahead.fan_out, "it has ended"
    assert not request.plan(dataclasses.replace(options, leased_rounds=1)).ahead.fan_out, "of another kind"


@pytest.mark.parametrize("lags", [(0, 0, 0), (80, 0, 0), (0, 80, 0), (0, 0, 80)])
def test_an_outcome_is_not_missed_while_the_draft_computes_a_text(lags: tuple[int, int, int]) -> None:
    """Be it the request's, when the outcomes' round left or now, or another's, whose rows are in the same steps."""
    request, options = drafting_ahead()
    other = RequestPlanner(request.planner, "model", Acceptance.COUPLED, greedy=True)
    assert request.target is not None
    request.target.requests[other] = None
    hits = request.stats.own.hits[load_of(4), False]
    request._ahead_lag, lag, other._ahead_lag = lags
    before = hits.value
    request.plan(dataclasses.replace(options, leased_rounds=1, lag=lag))
    assert (hits.value < before) is not any(lags)


def test_a_proposal_that_the_target_has_not_in_time_is_a_hit_for_who_waits_alone() -> None:
    request, options = drafting_ahead()
    own = request.stats.own
    hits, prefetch_hits = own.hits[load_of(4), False], own.hits[load_of(4), True]
    before = hits.value, prefetch_hits.value
    proposal = Proposal(1, (1, 2), (0.9, 0.9), drafter="model")
    request.plan(dataclasses.replace(options, leased_rounds=1, cached_proposal=proposal))
    assert hits.value > before[0]
    assert prefetch_hits.value < before[1]


def test_who_is_alone_waits_where_the_target_seldom_has_in_time_what_is_drafted_in_time() -> None:
    target, draft = times(SaidByTarget())
    stats = AcceptanceStats()

    def best() -> Strategy:
        cycles = Cycles(target, draft, stats.child(), can_ahead=True, can_go_on=True).all()
        return max(cycles, key=lambda strategy: cycles[strategy].rate)

    def learn(*, hit: bool, at_target: bool) -> None:
        for _ in range(200):
            stats.hits[0, False].add(float(hit))
            stats.hits[0, True].add(float(at_target))

    learn(hit=True, at_target=True)
    assert best().goes_on
    learn(hit=True, at_target=False)
    assert (best().source, best().goes_on) == (Source.CACHED, False)


def test_what_comes_too_late_in_a_crowd_may_come_in_time_for_one_alone() -> None:
    said = SaidByTarget(sessions=16)
    target, draft = times(said)
    crowded = AcceptanceStats().child()
    for _ in range(20):
        for at_target in (False, True):
            crowded.hits[load_of(16), at_target].add(0.0)

    def drafting_ahead(stats: AcceptanceStats) -> dict[Strategy, float]:
        cycles = Cycles(target, draft, stats.child(), can_ahead=True, can_go_on=True).all()
        return {strategy: cycle.rate for strategy, cycle in cycles.items() if strategy.source is Source.CACHED}

    assert max(drafting_ahead(crowded).values()) < max(drafting_ahead(AcceptanceStats()).values())
    said.sessions = 1
    assert drafting_ahead(crowded) == drafting_ahead(AcceptanceStats())


def test_there_is_a_choice_where_drafts_may_work_or_matches_pay_for_the_search_and_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request, rounds = World().request(), range(65)

    def choices(mode: Mode, value: float) -> list[int]:
        monkeypatch.setattr(Group, "mode", lambda *_: mode)
        request.stats.own.texts.match_value.value, found = value, list[int]()
        for request.rounds in rounds:
            found += [] if request.is_idle else [request.rounds]
        return found

    now_and_then = [0, 1, 2, 4, 8, 16, 32, 48, 64]
    assert choices(Mode.REST, 1.0) == choices(Mode.MATCHES, MARGIN - 1 - 1e-6) == now_and_then
    assert choices(Mode.MATCHES, MARGIN - 1 + 1e-6) == choices(Mode.DRAFTS, 0.0) == [*rounds]
