"""One request's drafting beside a link that only records: what the draft service is told, and when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import pytest

from coordinator.policy.plan import Options, Plan
from draft_service.session import DraftingSession
from paceline.costs.goodput import Mode
from paceline.drafting.round_draft import MAX_PENDING_TOKENS
from paceline.protocol.draft import Commit, DraftBudget, DraftOpen, Verifying
from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.features import FeatureNeed
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.proposal import NGRAM, ROOT, Acceptance, Outcome, Proposal, SparseDistribution
from paceline.protocol.session import Close
from paceline.sampling.match import Match
from tests.coordinator.planned import SENT_MS, STEP_MS
from tests.coordinator.requests import PROMPT, VOCAB, DraftedRequest

NGRAMS = SpeculationSettings(drafter="ngram")
TREE = Proposal(1, tuple(range(9)), (0.5,) * 9, (ROOT, ROOT, ROOT, 0, 0, 1, 1, 2, 2))
TREES = SpeculationSettings(drafter="model", num_draft_tokens=2, tree_widths=(3, 2))
TIGHT = [(60, 5), (63, 8), (124, 9)]
"""Rows of the target for a text of 60 tokens, and how many nodes fit in behind 55."""


def fixed(num_draft_tokens: int, **changes: Any) -> DraftedRequest:
    """A request that asks for so many tokens each round."""
    return DraftedRequest(SpeculationSettings(drafter="model", num_draft_tokens=num_draft_tokens), **changes)


def test_the_draft_hears_of_a_commit_behind_the_round_not_before() -> None:
    request = DraftedRequest()
    assert request.link.take_kinds() == [DraftOpen]
    request.commit((5,))
    assert request.link.take_kinds() == []
    request.dispatched()
    assert request.link.take_kinds()[0] is Commit
    request.dispatched()
    assert Commit not in request.link.take_kinds(), "told once"


@pytest.mark.parametrize(("tokens", "kinds"), [(1, []), (2, [DraftOpen])])
def test_no_draft_is_opened_for_a_text_that_ends_with_the_round(tokens: int, kinds: list[type]) -> None:
    assert DraftedRequest(max_length=len(PROMPT) + tokens).link.take_kinds() == kinds


async def test_the_draft_is_asked_before_anything_else_is_done() -> None:
    """The round waits for it; the client's text and the spans can wait beside it."""
    request = fixed(2)
    request.commit((5,))
    request.link.take()
    asked = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(request.drafting.take(lambda: asked.set_result(request.link.take_kinds())))
    assert await asked == [Commit]
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("speculation", [SpeculationSettings(off=True), SpeculationSettings(num_draft_tokens=0)])
def test_a_request_that_proposes_nothing_is_leased_and_never_past_its_length(
    speculation: SpeculationSettings,
) -> None:
    request = DraftedRequest(speculation)
    assert request.lease == 16
    while request.sequence.room > 1:
        request.commit((5,), leased=3)
        assert request.lease == min(16, request.sequence.room - 1)
    assert DraftedRequest(speculation, lease=0).lease == 0


def test_of_a_run_the_draft_hears_at_its_end_and_of_a_long_one_meanwhile() -> None:
    request = DraftedRequest()
    request.advance((5,), leased=4)
    request.link.take_kinds()
    for number in range(40):
        request.advance((number % VOCAB,), leased=4)
    request.advance((9,), leased=1)
    commits = request.link.take_only(Commit)
    lengths = [len(commit.token_ids) for commit in commits]
    assert all(each.outcome.base_length == each.committed_length + len(each.token_ids) - 2 for each in commits)
    assert lengths == [MAX_PENDING_TOKENS, MAX_PENDING_TOKENS, 42 - 2 * MAX_PENDING_TOKENS]


def test_what_the_draft_prepares_outcomes_for_is_told_before_a_run() -> None:
    """The commit of an announced round names its outcome, so it can't be told with the next ones."""
    request = DraftedRequest()
    request.advance((5,))
    assert request.link.take_kinds()[-1] is Verifying
    for leased in (3, 2, 1):
        request.advance((6,), leased)
    assert [len(commit.token_ids) for commit in request.link.take_only(Commit)] == [1, 2]


def test_a_verdict_is_due_from_when_its_round_left_or_from_when_the_target_started_it() -> None:
    request = DraftedRequest()
    planner = request.drafting._planner
    for leased, due_ms in ((0, STEP_MS), (1, STEP_MS - 7.0 - SENT_MS)):
        request.commit((5,), leased)
        # As if the others of the step proposed nothing: what leaves too late is lost where the target goes on.
        planner.rates = replace(planner.rates, rows=100.0)
        assert request.drafting.outcomes(request.round()).due_ms(since_verdict_ms=7.0) == due_ms


def session_of(opened: DraftOpen) -> DraftingSession:
    """What the draft service makes of an open."""
    ids = opened.spec.token_ids
    return DraftingSession(opened.session_id, 1, mock.Mock(), opened.spec, mock.Mock(), VOCAB, len(ids))


def chain(*tokens: int) -> Proposal:
    return Proposal(1, tokens, (1.0,) * len(tokens), drafter=NGRAM)


class RandomPlanner:
    """Goes into runs and drafts for outcomes as it likes, within what a planner may do."""

    mode = Mode.DRAFTS

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def move(self, target: object, draft: object, drafter: str) -> None:
        """Wherever the sessions are."""

    def learn(self, *_: object, **__: object) -> None:
        """Whatever comes of a round."""

    def plan(self, options: Options) -> Plan:
        if options.leased_rounds <= 1 and self._random.random() < 0.3:
            return Plan(ahead=DraftBudget(2, max_nodes=2, fan_out=4))
        return Plan(lease=min(options.lease, self._random.choice((0, 0, 1, 3, 20))))


Made = TypeVar("Made", bound=RandomPlanner)


def planned(planner: Made) -> tuple[DraftedRequest, Made]:
    """A request that follows another planner."""
    request = DraftedRequest()
    drafting: Any = request.drafting
    drafting._planner = planner
    return request, planner


@pytest.mark.parametrize("seed", range(30))
def test_the_draft_can_follow_whatever_is_leased(seed: int) -> None:
    """Every message fits what the draft service holds, and at the end it holds all that was told."""
    request, _ = planned(RandomPlanner(seed))
    leased = 0
    for number in range(50):
        request.advance((number % VOCAB,), leased)
        leased = max(leased - 1, request.lease, 0)
    opened, *commands = request.link.sent
    session = session_of(opened)
    for command in commands:
        (session.accept if isinstance(command, Commit) else session.note)(command)
    assert len(request.sequence.ids) - session.committed_length < MAX_PENDING_TOKENS


async def test_who_follows_a_lost_draft_is_given_its_proposal_in_the_round_and_not_by_a_number() -> None:
    request = fixed(4)
    request.advance((5,))
    last = Outcome(len(request.sequence.ids) - 1, ROOT, 7)
    prepared = Proposal(34, (8, 9), (0.5, 0.5), drafter="model")
    request.drafts(last, prepared)
    request.drafting._session.on_lost(PeerUnavailable("killed"))
    request.link.take()
    request.commit((7,))
    drafted = await request.drafting.take(lambda: None)
    assert drafted.proposal == prepared
    request.drafting.verifying(request.round(prepared))
    opened, verifying = request.link.sent
    session_of(opened).note(verifying)
    assert verifying.proposal == prepared


class OnceLookingPlanner(RandomPlanner):
    """Pays once for a session that is only to look on."""

    expects_drafts = False

    def __init__(self) -> None:
        self.options: list[Options] = []

    def plan(self, options: Options) -> Plan:
        self.options.append(options)
        return Plan(lease=options.lease, shadow=len(self.options) == 1)


def test_a_session_to_look_on_that_was_paid_for_is_opened_though_the_run_goes_on() -> None:
    request, planner = planned(OnceLookingPlanner())
    request.drafting._session.close()
    request.link.take()
    for number in range(2 * MAX_PENDING_TOKENS):
        request.advance((number,), leased=16)
    (opened,) = request.link.take_only(DraftOpen)
    length = len(PROMPT) + MAX_PENDING_TOKENS
    assert (len(opened.spec.token_ids), opened.budget.shadow) == (length, True)
    computing = [length] * MAX_PENDING_TOKENS
    lags, open_ms = zip(*((each.lag, each.open_ms) for each in planner.options), strict=True)
    assert [*lags] == [len(PROMPT) + 1] + [0] * (MAX_PENDING_TOKENS - 1) + computing
    assert [*open_ms[MAX_PENDING_TOKENS:]] == sorted(open_ms[MAX_PENDING_TOKENS:])
    assert open_ms[-1] > open_ms[MAX_PENDING_TOKENS] > 0 == open_ms[0]


class RestingPlanner(RandomPlanner):
    """Of a group in which no draft works, for a look at the others or for a pause."""

    mode = Mode.REST
    expects_drafts = False
    is_idle = True

    def __init__(self, *, leaves_drafts: bool) -> None:
        self.leaves_drafts = leaves_drafts
        self.rounds = self.plans = 0

    def learn(self, *_: object, **__: object) -> None:
        self.rounds += 1

    def plan(self, options: Options) -> Plan:
        self.plans += 1
        return Plan(lease=options.lease, mode=Mode.REST)


@pytest.mark.parametrize("leaves_drafts", [True, False])
def test_a_session_outlives_a_look_and_ends_at_once_where_drafts_are_left_for_a_pause(leaves_drafts: bool) -> None:
    request, _ = planned(RestingPlanner(leaves_drafts=leaves_drafts))
    request.link.take()
    request.advance((5,), leased=4)
    assert request.link.take_kinds() == ([Close] if leaves_drafts else [])


def test_who_rests_plans_nothing_until_the_lease_ends_or_there_is_a_choice() -> None:
    request, planner = planned(RestingPlanner(leaves_drafts=True))
    for leased in (0, *range(15, 0, -1)):
        request.advance((5,), leased)
    assert planner.plans == 2, "behind the round that was sent, and for the last one that is leased"
    planner.mode = Mode.MATCHES
    request.advance((5,), leased=9)
    assert planner.plans == 3, "the group has left its rest"
    planner.mode, planner.is_idle = Mode.REST, False
    request.advance((5,), leased=9)
    assert planner.plans == 4


class MatchesPlanner(RestingPlanner):
    """Of a group that follows matches, for a text whose matches bring much, or too little."""

    mode = Mode.MATCHES

    def __init__(self, *, is_idle: bool) -> None:
        super().__init__(leaves_drafts=True)
        self.is_idle, self.matches = is_idle, list[Match | None]()

    def plan(self, options: Options) -> Plan:
        self.plans += 1
        return Plan(lease=options.lease, mode=self.mode)

    def take_match(self, match: Match | None, committed: Sequence[int], *, is_left_out: bool) -> None:
        assert is_left_out and (match is None or match.following[0] == committed[0])
        self.matches.append(match)


@pytest.mark.parametrize("is_idle", [True, False])
def test_within_a_lease_a_text_is_searched_where_its_matches_pay(*, is_idle: bool) -> None:
    request, planner = DraftedRequest(NGRAMS), MatchesPlanner(is_idle=is_idle)
    drafting: Any = request.drafting
    drafting._planner = planner
    for number, leased in enumerate((0, *range(9, 0, -1))):
        request.advance(((7, 8, 9)[number % 3],), leased)
    assert planner.plans == (2 if is_idle else 10), "behind the round that was sent, and for the last that is leased"
    if is_idle:
        assert not any(planner.matches)
    else:
        assert planner.matches[-3:] and all(planner.matches[-3:]), "the text repeats itself from its fourth token on"


def test_a_match_is_prefetched_behind_a_round_of_a_run_for_the_outcome_that_it_expects() -> None:
    request = DraftedRequest(NGRAMS)
    for token in (7, 8, 9, 10, 11, 12, 13) * 3:
        request.commit((token,), leased=3)
    round_ = request.round()
    (prefetched,) = request.drafting.outcomes(round_).candidates(growing=True)
    assert prefetched.outcome == Outcome(round_.base_length, ROOT, 7)
    assert prefetched.proposal.token_ids[:6] == (8, 9, 10, 11, 12, 13)
    assert not prefetched.grows
    assert len(prefetched.proposal) <= request.sequence.room - 2, "a token of the round, and one behind the proposal"
    (prefetched,) = request.drafting.outcomes(request.round(chain(7, 8))).candidates(growing=True)
    assert prefetched.outcome == Outcome(round_.base_length, 1, 9)
    assert prefetched.proposal.token_ids[:4] == (10, 11, 12, 13)
    another = request.round(chain(7, 9))
    assert not [*request.drafting.outcomes(another).candidates(growing=True)]


WITH_SUPPORTS = Proposal(1, (1,), (1.0,), supports=(SparseDistribution((1,), (1.0,)),))


@pytest.mark.parametrize("faulty", [chain(VOCAB), WITH_SUPPORTS])
def test_a_faulty_proposal_ends_the_draft_as_it_comes(faulty: Proposal, caplog: pytest.LogCaptureFixture) -> None:
    request = fixed(2)
    request.commit((5,))
    round_ = request.round(Proposal(1, (6, 7), (0.5, 0.5)))
    request.drafting.verifying(round_)
    request.link.take()
    base = len(request.sequence.ids) - 1
    request.drafts(Outcome(base, 1, 3), Proposal(1, (4,), (0.5,)))
    request.drafts(Outcome(base, ROOT, 2), faulty)
    assert request.link.take_kinds() == [Close]
    assert [*request.drafting.outcomes(round_).candidates(growing=True)] == [], "nothing of an untrusted draft"
    assert caplog.text.count("draft failed") == 1


@pytest.mark.parametrize(("node", "token"), [(ROOT, VOCAB), (2, 1)])
def test_what_was_prepared_for_no_outcome_ends_the_draft_once_and_is_never_prefetched(
    node: int, token: int, caplog: pytest.LogCaptureFixture
) -> None:
    request = fixed(2)
    request.commit((5,))
    base = len(request.sequence.ids) - 1
    round_ = request.round(Proposal(1, (6, 7), (0.5, 0.5)))
    request.drafting.verifying(round_)
    request.link.take()
    sound = Outcome(base, 1, 3), Proposal(1, (4,), (0.5,))
    for outcome, proposal in (sound, (Outcome(base, node, token), chain(1)), (Outcome(base, ROOT, 1), chain(1))):
        request.drafts(outcome, proposal)
    (prefetched,) = request.drafting.outcomes(round_).candidates(growing=True)
    assert (prefetched.outcome, prefetched.proposal) == sound
    assert request.link.take_kinds() == [Close]
    assert [*request.drafting.outcomes(round_).candidates(growing=True)] == [], "nothing of an untrusted draft"
    assert caplog.text.count("draft failed") == 1


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
def test_nothing_is_prefetched_where_a_proposal_is_more_than_tokens(acceptance: Acceptance) -> None:
    request = DraftedRequest(NGRAMS, acceptance=acceptance)
    for token in (7, 8, 9, 10) * 4:
        request.commit((token,))
    round_ = request.round()
    assert request.drafting.outcomes(round_).copies
    assert request.drafting.outcomes(round_).most == 0
    assert DraftedRequest(NGRAMS).drafting.outcomes(round_).most == 0, "no match"


def test_what_the_target_has_started_with_is_the_round_whatever_the_plan_was() -> None:
    request = DraftedRequest(NGRAMS)
    self_started = chain(4, 5, 6)
    request.commit((9,), self_started=self_started, can_prefetch=True)
    drafted = asyncio.run(request.drafting.take(lambda: None))
    assert drafted.proposal == self_started
    assert not drafted.hit
    assert request.lease == 0


async def test_who_reads_the_targets_features_is_asked_from_the_second_round_on() -> None:
    """Before the first verdict there are none: the target computes the prompt in the first round's step."""
    request = fixed(3, needs=(FeatureNeed((0,)),))
    assert request.drafting.features.need.any
    drafted = await request.drafting.take(lambda: pytest.fail("waited for a draft"))
    assert drafted.proposal is None
    request.commit((5,))
    last = Outcome(len(PROMPT) - 1, ROOT, 5)
    drafted = await request.drafting.take(lambda: request.drafts(last, chain(8, 9)))
    assert drafted.proposal == chain(8, 9)


@pytest.mark.parametrize(("max_rows", "nodes"), TIGHT)
@pytest.mark.parametrize("waits", [True, False], ids=["just in time", "before the outcome was known"])
async def test_a_proposal_is_cut_to_the_rows_that_the_target_has_left(max_rows: int, nodes: int, waits: bool) -> None:
    request = DraftedRequest(TREES, max_rows=max_rows)
    request.advance((5,) * 51)
    last = Outcome(len(request.sequence.ids) - 1, ROOT, 7)
    if not waits:
        request.drafts(last, TREE)
    request.commit((7,))
    drafted = await request.drafting.take(lambda: request.drafts(last, TREE))
    assert drafted.hit is not waits
    assert drafted.proposal == TREE.first(nodes)


@pytest.mark.parametrize(("length", "depth"), [(4, 3), (5, None)], ids=["as asked for then", "deeper"])
async def test_what_was_prepared_for_more_room_than_is_left_is_cut(length: int, depth: int | None) -> None:
    request = fixed(4)
    request.commit((5,) * 52)
    request.dispatched()  # what is prepared meanwhile may be 4 deep
    last = Outcome(len(request.sequence.ids) - 1, ROOT, 7)
    request.commit((7,))  # now the text has room for 3 and a last one
    prepared = chain(*range(10, 10 + length))
    drafted = await request.drafting.take(lambda: request.drafts(last, prepared))
    assert drafted.proposal == (prepared.first(depth) if depth else None)
    assert (Close in request.link.take_kinds()) == (depth is None)


@pytest.mark.parametrize(("max_rows", "nodes"), TIGHT)
@pytest.mark.parametrize("accepted", [0, 2])
def test_a_prefetched_proposal_is_cut_to_the_rows_behind_its_outcome(
    max_rows: int, nodes: int, accepted: int
) -> None:
    request = DraftedRequest(TREES, max_rows=max_rows)
    request.advance((5,) * (51 - accepted))
    round_ = request.round(chain(8, 9))
    outcome = Outcome(round_.base_length, accepted - 1, 7)
    request.drafts(outcome, TREE)
    (prefetched,) = request.drafting.outcomes(round_).candidates(growing=True)
    assert prefetched.proposal == TREE.first(nodes)
    assert round_.behind(outcome, prefetched.proposal).first_position == 55


@pytest.mark.parametrize(("max_rows", "nodes"), [(60, 5), (124, 8)])
async def test_so_is_a_tree_of_matches(max_rows: int, nodes: int) -> None:
    widths = SpeculationSettings(drafter="ngram", num_draft_tokens=4, tree_widths=(2, 1, 1, 1))
    request = DraftedRequest(widths, max_rows=max_rows)
    request.commit((*range(10, 54), 1, 2, 57, 58, 59, 60, 1, 2))
    assert len(request.sequence.ids) == 55
    drafted = await request.drafting.take(lambda: None)
    assert drafted.proposal is not None
    assert drafted.proposal.token_ids == (57, 58, 59, 60, 3, 10, 11, 12)[:nodes]
