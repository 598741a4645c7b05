"""Plans for the next round, against costs and chances that are set by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from coordinator.knowledge import Knowledge
from coordinator.policy import MAX_MODEL_TOKENS, Options, Plan, RequestPolicy, Source, survival
from coordinator.restraint import GUARD_ROUNDS
from paceline.ngram import Match
from paceline.types import Acceptance, Proposal, RoundRecord, StepTimings

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


def fresh(knowledge: Knowledge, acceptance: Acceptance = Acceptance.COUPLED, sessions: int = 1) -> RequestPolicy:
    """A request that has run target-only for a while."""
    policy = RequestPolicy(knowledge, "auto", acceptance, greedy=True)
    for _ in range(30):
        policy.learn(Plan(), record(rows=sessions, sessions=sessions), None, ())
    return policy


def taught(
    share: float | None = None, step_ms: float = 1.0, acceptance: Acceptance = Acceptance.COUPLED
) -> tuple[Knowledge, RequestPolicy]:
    """Knows what rows cost and, if a share is given, a model whose tokens are each accepted with that chance."""
    knowledge = Knowledge()
    for rows in range(1, 81):
        for _ in range(30):
            knowledge.costs.verify.add(rows, PLAIN_MS + ROW_MS * (rows - 1))
    if share is not None:
        accepts(fresh(knowledge, acceptance), share, step_ms)
    return knowledge, fresh(knowledge, acceptance)


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
    knowledge, policy = taught(0.4)
    for _ in range(60):
        knowledge.costs.outlook.add(2 * PLAIN_MS)
    assert policy.plan(Options(room=60, drafts=True, fan_out=4)).fan_out == 0


def test_a_cached_proposal_is_cut_where_its_rows_stop_paying() -> None:
    _, policy = taught(0.5)
    weak = Proposal(1, (7,) * 16, (0.5,) * 16, drafter="model")
    plan = policy.plan(Options(room=60, cached=weak, drafts=True))
    assert plan.source is Source.CACHED
    assert 2 <= plan.nodes <= 8


def test_many_sessions_make_rows_dear() -> None:
    knowledge, alone = taught(0.6)
    crowded = fresh(knowledge, sessions=40)
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
    knowledge, _ = taught(0.02)
    other = RequestPolicy(knowledge, "auto", Acceptance.COUPLED, greedy=False)
    other.learn(Plan(), record(), None, ())
    assert settled(fresh(knowledge), Options(room=60, drafts=True)).source is Source.NONE
    assert other.plan(Options(room=60, drafts=True)).source is Source.WAIT


def test_a_model_that_was_dropped_is_probed_again() -> None:
    _, policy = taught(0.02)
    sources = set()
    for _ in range(200):
        sources.add(policy.plan(Options(room=60, drafts=True)).source)
        policy.learn(Plan(), record(), None, ())
    assert sources == {Source.NONE, Source.WAIT}


def test_drafting_that_turned_out_slow_is_stopped_whatever_it_promises() -> None:
    knowledge, policy = taught(0.9)
    knowledge.costs.plain.add(PLAIN_MS)
    cached = Proposal(1, (7,) * 4, (0.9,) * 4, drafter="model")
    options = Options(room=60, cached=cached, drafts=True, fan_out=4)
    assert policy.plan(options).source is Source.CACHED
    for _ in range(GUARD_ROUNDS):
        policy.learn(Plan(Source.CACHED, 4), record(5, 0, 4, round_ms=3 * PLAIN_MS), cached, ())
    assert policy.plan(options) == Plan()
