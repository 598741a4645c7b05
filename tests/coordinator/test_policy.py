"""Plans for the next round, against costs and chances that are set by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from coordinator.policy.cost_model import CostModel
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.request_policy import (
    LEAST_PLAIN,
    MARGIN,
    MAX_MODEL_TOKENS,
    QUIET_ROUNDS,
    SHORT_LEASE,
    RequestPolicy,
    survival,
)
from coordinator.policy.restraint import GUARD_PAUSE, GUARD_ROUNDS
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.sampling.ngram import Match

PLAIN_MS = 20.0
ROW_MS = 0.5


def record(rows: int = 1, accepted: int = 0, proposed: int = 0, sessions: int = 1, **changes: object) -> RoundRecord:
    step = StepTimings(forward_ms=PLAIN_MS + ROW_MS * (rows - 1), rows=rows, sessions=sessions, service_ms=0)
    made = RoundRecord(
        base_length=9,
        round_ms=step.forward_ms + 1,
        draft_wait_ms=0.0,
        wire_ms=1.0,
        target=step,
        accept_ms=0.0,
        proposed=proposed,
        accepted=accepted,
        cache_hit=False,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def fresh(cost_model: CostModel, acceptance: Acceptance = Acceptance.COUPLED, sessions: int = 1) -> RequestPolicy:
    """A request that has run target-only for a while."""
    policy = RequestPolicy(cost_model, "auto", acceptance, greedy=True)
    for _ in range(30):
        policy.learn(Plan(), record(rows=sessions, sessions=sessions), None, ())
    return policy


def taught(
    share: float | None = None, step_ms: float = 1.0, acceptance: Acceptance = Acceptance.COUPLED
) -> tuple[CostModel, RequestPolicy]:
    """Knows what rows cost and, if a share is given, a model whose tokens are each accepted with that chance."""
    cost_model = CostModel()
    for rows in range(1, 81):
        for _ in range(30):
            cost_model.costs.verify.observe(rows, PLAIN_MS + ROW_MS * (rows - 1))
    if share is not None:
        accepts(fresh(cost_model, acceptance), share, step_ms)
    return cost_model, fresh(cost_model, acceptance)


def accepts(policy: RequestPolicy, share: float, step_ms: float, k: int = 8) -> None:
    rng = np.random.default_rng(1)
    proposal = Proposal(1, (7,) * k, (0.5,) * k, drafter="model")
    drafting, wait_ms = StepTimings(forward_ms=k * step_ms), 1 + k * step_ms
    for _ in range(600):
        accepted = 0
        while accepted < k and rng.random() < share:
            accepted += 1
        seen = record(k + 1, accepted, k, draft=drafting, draft_wait_ms=wait_ms)
        seen = dataclasses.replace(seen, round_ms=seen.round_ms + wait_ms)
        policy.learn(Plan(Source.WAIT, k, k), seen, proposal, tuple(range(accepted)))


def settled(policy: RequestPolicy, options: Options) -> Plan:
    """The plan behind a probe that may be due."""
    policy.plan(options)
    return policy.plan(options)


def test_survival_is_a_running_product() -> None:
    assert survival([0.5, 0.5, 0.2]) == pytest.approx([0.5, 0.25, 0.05])


def test_nothing_is_drafted_before_it_is_known_what_it_must_beat() -> None:
    cost_model = CostModel()
    options = Options(room=60, match=Match(40, (5,) * 64), drafts=True, fan_out=4)
    for _ in range(LEAST_PLAIN):
        policy = RequestPolicy(cost_model, "auto", Acceptance.COUPLED, greedy=True)
        assert policy.plan(options) == Plan()
        policy.learn(Plan(), record(), None, ())
    assert policy.plan(options).source is Source.NGRAM


def test_a_proposal_is_not_waited_for_on_a_hunch() -> None:
    """What is known of chances is not known well enough to tell a small gain from a loss."""
    _, policy = taught(0.5)
    options = Options(room=1, drafts=True)
    worth = policy._wait(options).value
    assert worth > MARGIN
    assert policy.plan(options).source is Source.WAIT
    policy._costs.draft_wire.add(policy._costs.draft_wire.weight * (worth - MARGIN / 2) / policy.rate)
    assert 0 < policy._wait(options).value < MARGIN
    assert settled(policy, options).source is Source.NONE


def test_a_wait_is_dear_where_the_step_that_others_share_leaves_meanwhile() -> None:
    cost_model, policy = taught(0.5)
    options = Options(room=60, drafts=True)
    assert settled(policy, options).source is Source.WAIT
    before = policy._wait(options).value
    late = dataclasses.replace(record(9, 1, 8).target, queue_ms=PLAIN_MS)
    for _ in range(100):
        seen = record(9, 1, 8, target=late, draft_wait_ms=9.0, draft=StepTimings(forward_ms=8.0))
        policy.learn(Plan(Source.WAIT, 8, 8), dataclasses.replace(seen, round_ms=50.0), None, ())
    assert cost_model.costs.wait(1) > PLAIN_MS / 2
    assert policy._wait(options).value < before
    assert settled(policy, options).source is Source.NONE


def test_a_queue_that_every_round_stands_in_is_no_reason_not_to_wait() -> None:
    cost_model, policy = taught(0.7)
    alone = cost_model.costs.wait(4)
    for plan in (Plan(), Plan(Source.WAIT, 8, 8)):
        for _ in range(100):
            target = dataclasses.replace(record(9).target, queue_ms=PLAIN_MS)
            policy.learn(plan, record(target=target, round_ms=2 * PLAIN_MS), None, ())
    assert cost_model.costs.wait(4) == pytest.approx(alone)


def test_what_the_target_starts_by_itself_stands_in_no_queue_and_hides_none() -> None:
    """A round that missed must be sent, with a draft or without: those are what a wait is held against."""
    cost_model, policy = taught(0.7)
    alone = cost_model.costs.wait(4)
    late = dataclasses.replace(record(9).target, queue_ms=PLAIN_MS)
    for _ in range(100):
        policy.learn(Plan(), record(9, self_started=True), None, ())
        policy.learn(Plan(), record(9, target=late), None, ())
        policy.learn(Plan(Source.WAIT, 8, 8), record(9, target=late), None, ())
    assert cost_model.costs.wait(4) == pytest.approx(alone)


def test_a_draft_that_comes_while_the_round_would_have_stood_in_a_queue_costs_less() -> None:
    cost_model, policy = taught(0.7)
    alone = cost_model.costs.wait(4)
    queued = dataclasses.replace(record(9).target, queue_ms=3.0)
    for _ in range(400):
        policy.learn(Plan(), record(9, target=queued), None, ())
        policy.learn(Plan(Source.WAIT, 8, 8), record(9), None, ())
    assert cost_model.costs.wait(4) == pytest.approx(alone - 3.0, abs=0.1)
    assert cost_model.costs.wait(0) == 0.0


def test_what_all_who_draft_add_to_a_step_is_not_laid_on_each_of_them() -> None:
    plans = []
    for sessions in (1, 32):
        cost_model, _ = taught(0.8)
        policy = fresh(cost_model, sessions=sessions)
        cost_model.costs.outcome_drafting.value = 0.05 * PLAIN_MS
        plans.append(settled(policy, Options(room=60, drafts=True, waits=False, fan_out=4)))
    assert [plan.fan_out for plan in plans] == [4, 4]


def test_a_long_match_is_proposed_at_length_and_a_short_unsure_one_is_not() -> None:
    _, policy = taught()
    for _ in range(200):
        policy.learn_match(Match(40, (5,) * 64), (5,) * 8)
        policy.learn_match(Match(2, (5,) * 64), (6,))
    sure = policy.plan(Options(room=60, match=Match(40, (5,) * 64)))
    unsure = policy.plan(Options(room=60, match=Match(2, (5,) * 64)))
    assert (sure.source, unsure.source) == (Source.NGRAM, Source.NONE)
    assert sure.nodes >= 16


@pytest.mark.parametrize("acceptance", list(Acceptance))
def test_a_model_that_is_never_right_is_dropped_and_a_good_one_is_used_deeply(acceptance: Acceptance) -> None:
    options = Options(room=60, drafts=True, trees=acceptance is Acceptance.COUPLED)
    _, policy = taught(0.02, acceptance=acceptance)
    assert settled(policy, options).source is Source.NONE
    _, policy = taught(0.95, acceptance=acceptance)
    plan = policy.plan(options)
    assert plan.source is Source.WAIT
    assert 6 <= plan.depth <= MAX_MODEL_TOKENS


def test_a_draft_step_as_slow_as_the_target_is_not_waited_for() -> None:
    _, policy = taught(0.6, step_ms=PLAIN_MS)
    assert settled(policy, Options(room=60, drafts=True)).source is Source.NONE


def test_outcomes_are_drafted_ahead_when_waiting_is_too_slow_and_overlap_is_free() -> None:
    _, policy = taught(0.6, step_ms=PLAIN_MS)
    plan = settled(policy, Options(room=60, drafts=True, fan_out=4))
    assert (plan.source, plan.fan_out) == (Source.NONE, 4)
    assert plan.branch_depth >= 2


def test_outcomes_are_not_drafted_where_that_slows_the_target_down() -> None:
    cost_model, policy = taught(0.4)
    for _ in range(60):
        cost_model.costs.outcome_drafting.add(2 * PLAIN_MS)
    assert policy.plan(Options(room=60, drafts=True, fan_out=4)).fan_out == 0


def test_a_cached_proposal_is_cut_where_its_rows_stop_paying() -> None:
    _, policy = taught(0.5)
    weak = Proposal(1, (7,) * 16, (0.5,) * 16, drafter="model")
    plan = policy.plan(Options(room=60, cached=weak, drafts=True))
    assert plan.source is Source.CACHED
    assert 2 <= plan.nodes <= 8


def test_many_sessions_make_rows_dear() -> None:
    cost_model, alone = taught(0.6)
    crowded = fresh(cost_model, sessions=40)
    cached = Proposal(1, (7,) * 8, (0.5,) * 8, drafter="model")
    options = Options(room=60, cached=cached, drafts=True)
    assert crowded.plan(options).nodes < alone.plan(options).nodes


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
def test_rejection_never_looks_at_draft_probabilities(acceptance: Acceptance) -> None:
    """`exactness` §7: what might be dropped must not decide. Coupled acceptance shows that the test can fail."""

    def nodes(rule: Acceptance, q: float) -> int:
        _, policy = taught(acceptance=rule)
        proposal = Proposal(1, (7,) * 8, (q,) * 8, drafter="model")
        return policy.plan(Options(room=60, cached=proposal, drafts=True)).nodes

    assert nodes(acceptance, 0.01) == nodes(acceptance, 0.99)
    assert nodes(Acceptance.COUPLED, 0.01) < nodes(Acceptance.COUPLED, 0.99)


def test_second_children_are_asked_for_when_they_pay() -> None:
    _, policy = taught(0.5)
    siblings = Proposal(1, (7, 8), (0.5, 0.3), parents=(-1, -1), drafter="model")
    for number in range(100):
        drafting = StepTimings(forward_ms=1.0)
        seen = record(3, 1, 1, draft=drafting, draft_wait_ms=2.0)
        policy.learn(Plan(Source.WAIT, 2, 1), seen, siblings, (number % 2,))
    plan = settled(policy, Options(room=60, drafts=True, trees=True))
    chain = settled(policy, Options(room=60, drafts=True))
    assert plan.nodes > plan.depth >= 1
    assert chain.nodes == chain.depth


def test_what_one_request_learned_the_next_one_knows() -> None:
    cost_model, _ = taught(0.02)
    other = RequestPolicy(cost_model, "auto", Acceptance.COUPLED, greedy=False)
    other.learn(Plan(), record(), None, ())
    assert settled(fresh(cost_model), Options(room=60, drafts=True)).source is Source.NONE
    assert other.plan(Options(room=60, drafts=True)).source is Source.WAIT


def test_a_model_that_was_dropped_is_probed_again() -> None:
    _, policy = taught(0.02)
    sources = set()
    for _ in range(200):
        sources.add(policy.plan(Options(room=60, drafts=True)).source)
        policy.learn(Plan(), record(), None, ())
    assert sources == {Source.NONE, Source.WAIT}


def test_drafting_that_turned_out_slow_is_stopped_whatever_it_promises() -> None:
    cost_model, policy = taught(0.9)
    cost_model.costs.plain.add(PLAIN_MS)
    cached = Proposal(1, (7,) * 4, (0.9,) * 4, drafter="model")
    options = Options(room=60, cached=cached, drafts=True, fan_out=4)
    assert policy.plan(options).source is Source.CACHED
    for _ in range(GUARD_ROUNDS):
        policy.learn(Plan(Source.CACHED, 4), record(5, 0, 4, round_ms=3 * PLAIN_MS), cached, ())
    assert policy.plan(options) == Plan()


RUN = Options(room=60, lease=16)
TRIP_MS = 3.0


def sent_and_ahead(cost_model: CostModel) -> None:
    """Rounds that are sent take a round trip longer."""
    for _ in range(30):
        cost_model.costs.sent.add(TRIP_MS)
        cost_model.costs.ahead.add(0.0)


def run_for(policy: RequestPolicy, options: Options, rounds: int) -> list[Plan]:
    """Plans of target-only rounds one after another, each learned from."""
    plans = []
    for _ in range(rounds):
        plans.append(policy.plan(options))
        policy.learn(plans[-1], record(self_started=plans[-1].lease > 0), None, ())
    return plans


def test_what_never_has_a_proposal_is_leased_little_and_soon() -> None:
    cost_model, policy = taught()
    sent_and_ahead(cost_model)
    plans = run_for(policy, RUN, 30)
    assert [plan.lease for plan in plans[:3]] == [0, 0, 0]
    assert all(SHORT_LEASE <= plan.lease <= 30 // QUIET_ROUNDS for plan in plans[10:])
    assert policy.plan(dataclasses.replace(RUN, lease=2)).lease == 2


def test_where_matches_can_be_prefetched_a_run_is_as_long_as_it_may_be() -> None:
    cost_model, policy = taught()
    sent_and_ahead(cost_model)
    plans = run_for(policy, dataclasses.replace(RUN, can_prefetch=True), 30)
    assert all(plan.lease == RUN.lease for plan in plans[10:])


def test_a_match_is_prefetched_where_it_is_worth_the_message() -> None:
    _, policy = taught()
    assert policy.worth_prefetching(40, 30) > 4
    assert policy.worth_prefetching(40, 1) == 1
    for _ in range(200):
        policy.learn_match(Match(2, (5,) * 64), (6,))
    assert policy.worth_prefetching(2, 30) == 0


def test_runs_grow_while_nothing_is_worth_proposing_and_are_short_again_after_what_was() -> None:
    cost_model, policy = taught()
    sent_and_ahead(cost_model)
    lengths = [plan.lease for plan in run_for(policy, RUN, 100)][10:]
    assert lengths == sorted(lengths)
    assert lengths[-1] == min(RUN.lease, 100 // QUIET_ROUNDS)
    assert policy.plan(dataclasses.replace(RUN, match=Match(40, (5,) * 64))).source is Source.NGRAM
    assert next(plan.lease for plan in run_for(policy, RUN, 30) if plan.lease) < lengths[-1]


def test_without_a_round_trip_to_save_nothing_is_leased() -> None:
    _, policy = taught()
    assert not any(plan.lease for plan in run_for(policy, dataclasses.replace(RUN, lease=0), 30))
    cost_model, policy = taught()
    cost_model.costs.ahead.add(1e3)
    assert not any(plan.lease for plan in run_for(policy, RUN, 30))


def test_a_match_ends_the_run_and_is_proposed_behind_it() -> None:
    cost_model, policy = taught()
    sent_and_ahead(cost_model)
    match = Match(40, (5,) * 64)
    run_for(policy, RUN, 20)
    inside = policy.plan(dataclasses.replace(RUN, match=match, leased=2))
    assert (inside.source, inside.lease) == (Source.NONE, 0)
    assert policy.plan(dataclasses.replace(RUN, match=match)).source is Source.NGRAM
    assert policy.plan(RUN).lease == 0, "where there was something to propose there may be more"


def test_where_rounds_are_leased_a_proposal_must_be_worth_the_round_trip() -> None:
    cost_model, policy = taught()
    sent_and_ahead(cost_model)
    for _ in range(400):
        policy.learn_match(Match(4, (5,) * 64), (5,))
        policy.learn_match(Match(4, (5,) * 64), (6,))
        policy.learn_match(Match(4, (5,) * 64), (6,))
        policy.learn_match(Match(5, (5,) * 64), (6,))
    weak = dataclasses.replace(RUN, match=Match(4, (5,) * 64))
    assert policy.plan(weak).source is Source.NGRAM, "where every round is sent a third of a token is worth its row"
    for _ in range(200):
        cost_model.costs.sent.add(PLAIN_MS)
    run_for(policy, RUN, 20)
    assert policy.plan(weak).source is Source.NONE


def test_a_run_ends_in_time_for_a_probe() -> None:
    cost_model, policy = taught(0.02)
    sent_and_ahead(cost_model)
    options = dataclasses.replace(RUN, drafts=True)
    leased, probes, ran = 0, [], 0
    for number in range(400):
        plan = policy.plan(dataclasses.replace(options, leased=leased))
        assert not (leased and plan.source is not Source.NONE), "a round that was started carries no proposal"
        ran += leased > 0
        leased = max(leased - 1, plan.lease)
        if plan.source is Source.WAIT:
            probes.append(number)
        policy.learn(plan, record(self_started=leased > 0), None, ())
    assert len(probes) >= 3
    assert ran > 200


def test_what_the_guard_holds_is_leased_as_long_as_it_holds() -> None:
    cost_model, policy = taught(0.9)
    cost_model.costs.plain.add(PLAIN_MS)
    cached = Proposal(1, (7,) * 4, (0.9,) * 4, drafter="model")
    while not policy._guard.left:
        policy.learn(Plan(Source.CACHED, 4), record(5, 0, 4, round_ms=3 * PLAIN_MS), cached, ())
    leases = []
    while (plan := policy.plan(dataclasses.replace(RUN, cached=cached, drafts=True))).source is Source.NONE:
        leases.append(plan.lease)
    assert leases == list(range(GUARD_PAUSE[0] - 1, -1, -1))


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
def test_how_far_a_run_goes_does_not_depend_on_draft_probabilities(acceptance: Acceptance) -> None:
    """`exactness` §7, with the same check that the test can fail."""

    def leases(rule: Acceptance, q: float) -> list[int]:
        cost_model, policy = taught(0.02, acceptance=rule)
        sent_and_ahead(cost_model)
        cached = Proposal(1, (7,) * 8, (q,) * 8, drafter="model")
        policy.plan(dataclasses.replace(RUN, cached=cached))
        return [plan.lease for plan in run_for(policy, RUN, 30)]

    assert leases(acceptance, 0.01) == leases(acceptance, 0.99)
    assert leases(Acceptance.COUPLED, 0.01) != leases(Acceptance.COUPLED, 0.99)


def test_a_target_only_token_costs_what_it_costs_where_rounds_are_leased() -> None:
    """The guard and the marginal rule must not compare drafting with a round trip that nobody need pay."""
    cost_model = CostModel()
    policy = RequestPolicy(cost_model, "auto", Acceptance.COUPLED, greedy=True)
    for _ in range(60):
        policy.learn(Plan(), record(self_started=True, round_ms=PLAIN_MS), None, ())
        policy.learn(Plan(), record(round_ms=PLAIN_MS + TRIP_MS), None, ())
    assert cost_model.costs.round_trip == pytest.approx(TRIP_MS)
    for _ in range(300):
        policy.learn(Plan(), record(round_ms=PLAIN_MS + TRIP_MS), None, ())
    assert cost_model.costs.plain.value == pytest.approx(PLAIN_MS, rel=0.01)


def test_what_a_step_takes_longer_for_being_sent_is_part_of_the_cost_of_sending() -> None:
    cost_model = CostModel()
    policy = RequestPolicy(cost_model, "auto", Acceptance.COUPLED, greedy=True)
    slower = 1.5
    cold = dataclasses.replace(record().target, forward_ms=PLAIN_MS + slower)
    for _ in range(60):
        policy.learn(Plan(), record(self_started=True, round_ms=PLAIN_MS), None, ())
        policy.learn(Plan(), record(round_ms=PLAIN_MS + slower + TRIP_MS, target=cold), None, ())
    assert cost_model.costs.round_trip == pytest.approx(TRIP_MS)
    assert cost_model.costs.sending == pytest.approx(TRIP_MS + slower)
    assert cost_model.costs.plain.value == pytest.approx(PLAIN_MS, rel=0.01)


def test_the_wait_for_a_first_draft_is_no_measure_of_the_next() -> None:
    """The draft service computes the whole text for it."""
    cost_model, policy = taught(0.6)
    before = dataclasses.asdict(cost_model.costs)
    plan = Plan(Source.WAIT, 2, 2)
    late = record(3, 1, 2, draft_wait_ms=500.0, round_ms=PLAIN_MS + 501)
    policy.learn(plan, late, Proposal(1, (1, 2), (0.5, 0.5), drafter="model"), (0,), first_draft=True)
    assert dataclasses.asdict(cost_model.costs)["draft_wire"] == before["draft_wire"]
    assert dataclasses.asdict(cost_model.costs)["draft_step"] == before["draft_step"]
    policy.learn(plan, late, Proposal(1, (1, 2), (0.5, 0.5), drafter="model"), (0,))
    assert cost_model.costs.draft_wire.value > before["draft_wire"]["value"] + 5


def test_at_a_distance_a_run_is_long_enough_to_be_extended_in_time() -> None:
    cost_model, policy = taught()
    cost_model.costs.plain.add(PLAIN_MS)
    for _ in range(400):
        cost_model.costs.sent.add(3.4 * PLAIN_MS)
        cost_model.costs.ahead.add(0.0)
    assert [policy.plan(RUN).lease for _ in range(15)][-1] == 8
