"""One request's drafting beside a link that only records: what the draft service is told, and when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest

from coordinator.policy.drafting import Drafting
from coordinator.policy.plan import Options, Plan
from coordinator.policy.planner import Planner
from coordinator.policy.settings import DraftingSettings
from coordinator.sessions.draft_pool import DraftPeer, DraftPool
from coordinator.sessions.round_draft import MAX_PENDING_TOKENS
from coordinator.sessions.target_pool import TargetPeer
from coordinator.sessions.verified_round import TargetNext
from coordinator.text.sequence import GenerationTask, Sequence
from draft_service.session import DraftingSession
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.draft import Commit, DraftedProposal, DraftOpen, Verifying
from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.features import FeatureNeed
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.handshake import Fingerprint, Welcome
from paceline.protocol.proposal import NGRAM, ROOT, Acceptance, Outcome, Proposal, SparseDistribution
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import Close
from paceline.protocol.target import Round
from paceline.rpc.peer_link import DraftLink
from tests.coordinator.planned import SENT_MS, STEP_MS, SaidByDraft, SaidByTarget, record

VOCAB = 64
PROMPT = (1, 2, 3)
MODEL = SpeculationSettings(drafter="model")


class RecordingLink:
    """Stands for a link that is up."""

    is_up = True
    name = "draft"
    address = "nowhere"
    welcome = Welcome("1", Fingerprint(), 256, 8, drafters=("model",))
    costs = SaidByDraft().costs

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._last_id = 0

    def next_session_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def send(self, command: Any, urgent: bool = False) -> None:
        self.sent.append(command)

    def take(self) -> list[type]:
        """Kinds of what was sent since the last look."""
        sent, self.sent = self.sent, []
        return [type(command) for command in sent]


class Request:
    """A request that follows the planner, with the model drafter unless it says otherwise."""

    def __init__(
        self,
        speculation: SpeculationSettings = MODEL,
        lease: int = 16,
        acceptance: Acceptance = Acceptance.COUPLED,
        max_rows: int = 124,
    ) -> None:
        task = GenerationTask(
            prompt=PROMPT,
            resume_token_ids=(),
            sampling=SamplingParams(),
            noise=NoiseKey(1),
            acceptance=acceptance,
            max_length=60,
            max_rows=max_rows,
            stop=(),
            eos_token_ids=frozenset(),
            speculation=speculation,
        )
        self.link, self.target = RecordingLink(), cast(TargetPeer, SaidByTarget())
        pool = DraftPool([DraftPeer(cast(DraftLink, self.link))], timeout_s=1.0, vocab_size=VOCAB)
        self.drafting = Drafting(task, pool, Planner(), DraftingSettings(fan_out=4, lease=lease))
        self.sequence = Sequence(task, TableTokenizer(VOCAB, None))
        self.drafting.open(self.sequence, "")

    def commit(self, tokens: Seq[int], leased: int = 0) -> None:
        base = len(self.sequence.ids) - 1
        self.sequence.ids += tokens
        self.drafting.commit(
            Outcome(base, ROOT, tokens[-1]), tokens, self.sequence, TargetNext(leased, peer=self.target), ""
        )

    def drafts(self, outcome: Outcome, proposal: Proposal) -> None:
        """A proposal arrives."""
        cast(Any, self.link).on_event(DraftedProposal(1, outcome, proposal))

    def dispatched(self) -> None:
        self.drafting.verifying(Round(1, len(self.sequence.ids) - 1, ROOT, (self.sequence.ids[-1],)))


@pytest.fixture
def request_() -> Request:
    return Request()


def test_the_draft_hears_of_a_commit_behind_the_round_not_before(request_: Request) -> None:
    assert request_.link.take() == [DraftOpen]
    request_.commit((5,))
    assert request_.link.take() == []
    request_.dispatched()
    assert request_.link.take()[0] is Commit
    request_.dispatched()
    assert Commit not in request_.link.take(), "told once"


async def test_the_draft_is_asked_before_anything_else_is_done() -> None:
    """The round waits for it; the client's text and the spans can wait beside it."""
    request = Request(SpeculationSettings(drafter="model", num_draft_tokens=2))
    request.commit((5,))
    request.link.take()
    asked = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(request.drafting.take(lambda: asked.set_result(request.link.take())))
    assert await asked == [Commit]
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("speculation", [SpeculationSettings(off=True), SpeculationSettings(num_draft_tokens=0)])
def test_a_request_that_proposes_nothing_is_leased_and_never_past_its_length(
    speculation: SpeculationSettings,
) -> None:
    request = Request(speculation)
    assert request.drafting.lease == 16
    while request.sequence.room > 1:
        request.commit((5,), leased=3)
        assert request.drafting.lease == min(16, request.sequence.room - 1)
    assert Request(speculation, lease=0).drafting.lease == 0


def test_of_a_run_the_draft_hears_at_its_end_and_of_a_long_one_meanwhile(request_: Request) -> None:
    request_.commit((5,), leased=4)
    request_.dispatched()
    request_.link.take()
    for number in range(40):
        request_.commit((number % VOCAB,), leased=4)
        request_.dispatched()
    request_.commit((9,), leased=1)
    request_.dispatched()
    commits = [command for command in request_.link.sent if isinstance(command, Commit)]
    assert [len(commit.token_ids) for commit in commits] == [
        MAX_PENDING_TOKENS,
        MAX_PENDING_TOKENS,
        42 - 2 * MAX_PENDING_TOKENS,
    ]
    at = len(PROMPT)
    for commit in commits:
        assert commit.committed_length == at
        at += len(commit.token_ids)
        assert commit.outcome.base_length == at - 2
        assert commit.outcome.next_token == commit.token_ids[-1]
    assert at == len(request_.sequence.ids)


def test_what_the_draft_prepares_outcomes_for_is_told_before_a_run(request_: Request) -> None:
    """The commit of an announced round names its outcome, so it can't be told with the next ones."""
    request_.commit((5,))
    request_.dispatched()
    assert request_.link.take()[-1] is Verifying
    for leased in (3, 2, 1):
        request_.commit((6,), leased)
        request_.dispatched()
    commits = [command for command in request_.link.sent if isinstance(command, Commit)]
    assert [len(commit.token_ids) for commit in commits] == [1, 2]


def test_a_verdict_is_due_from_when_its_round_left_or_from_when_the_target_started_it(request_: Request) -> None:
    round_ = Round(1, len(PROMPT), ROOT, (5,))
    request_.commit((5,))
    assert request_.drafting.verdict_due_ms(round_, since_verdict_ms=7.0) == STEP_MS
    request_.commit((5,), leased=1)
    assert request_.drafting.verdict_due_ms(round_, since_verdict_ms=7.0) == STEP_MS - 7.0 - SENT_MS


def chain(*tokens: int) -> Proposal:
    return Proposal(1, tokens, (1.0,) * len(tokens), drafter=NGRAM)


class RandomPlanner:
    """Goes into runs and drafts for outcomes as it likes, within what a planner may do."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def move(self, target: object, draft: object, drafter: str) -> None:
        """Wherever the sessions are."""

    def plan(self, options: Options) -> Plan:
        if options.leased_rounds <= 1 and self._random.random() < 0.3:
            return Plan(fan_out=4, branch_depth=2, branch_nodes=2)
        return Plan(lease=min(options.lease, self._random.choice((0, 0, 1, 3, 20))))


@pytest.mark.parametrize("seed", range(30))
def test_the_draft_can_follow_whatever_is_leased(seed: int) -> None:
    """Every message fits what the draft service holds, and at the end it holds all that was told."""
    request = Request()
    drafting: Any = request.drafting
    drafting._planner = RandomPlanner(seed)
    leased = 0
    for number in range(50):
        request.commit((number % VOCAB,), leased)
        request.dispatched()
        leased = max(leased - 1, request.drafting.lease, 0)
    opened, *commands = request.link.sent
    spec = opened.spec
    session = DraftingSession(1, 1, mock.Mock(), spec, mock.Mock(), VOCAB, len(spec.token_ids))
    for command in commands:
        if isinstance(command, Commit):
            session.accept(command)
        else:
            session.note(command)
    assert len(request.sequence.ids) - session.committed_length < MAX_PENDING_TOKENS


async def test_who_follows_a_lost_draft_is_given_its_proposal_in_the_round_and_not_by_a_number() -> None:
    request = Request(SpeculationSettings(drafter="model", num_draft_tokens=4))
    request.commit((5,))
    request.dispatched()
    last = Outcome(len(request.sequence.ids) - 1, ROOT, 7)
    prepared = Proposal(34, (8, 9), (0.5, 0.5), drafter="model")
    request.drafts(last, prepared)
    request.drafting._session.on_lost(PeerUnavailable("killed"))
    request.link.take()
    request.commit((7,))
    drafted = await request.drafting.take(lambda: None)
    assert drafted.proposal == prepared
    request.drafting.verifying(Round(1, len(request.sequence.ids) - 1, ROOT, (7,), prepared))
    opened, verifying = request.link.sent
    spec = opened.spec
    session = DraftingSession(2, 1, mock.Mock(), spec, mock.Mock(), VOCAB, len(spec.token_ids))
    session.note(verifying)
    assert verifying.proposal == prepared


class OnceLookingPlanner(RandomPlanner):
    """Pays once for a session that is only to look on."""

    expects_drafts = False

    def __init__(self) -> None:
        super().__init__(0)
        self.lags: list[int] = []
        self.open_ms: list[float] = []

    def plan(self, options: Options) -> Plan:
        self.lags.append(options.lag)
        self.open_ms.append(options.open_ms)
        return Plan(lease=options.lease, shadow=len(self.lags) == 1)


def test_a_session_to_look_on_that_was_paid_for_is_opened_though_the_run_goes_on() -> None:
    request = Request()
    drafting: Any = request.drafting
    drafting._session.close()
    planner = drafting._planner = OnceLookingPlanner()
    request.link.take()
    for number in range(2 * MAX_PENDING_TOKENS):
        request.commit((number,), leased=16)
        request.dispatched()
    opened = [command for command in request.link.sent if isinstance(command, DraftOpen)]
    assert [(len(each.spec.token_ids), each.budget.shadow) for each in opened] == [
        (len(PROMPT) + MAX_PENDING_TOKENS, True)
    ]
    computing = [len(PROMPT) + MAX_PENDING_TOKENS] * MAX_PENDING_TOKENS
    assert planner.lags == [len(PROMPT) + 1] + [0] * (MAX_PENDING_TOKENS - 1) + computing, "and once"
    assert planner.open_ms[MAX_PENDING_TOKENS:] == sorted(planner.open_ms[MAX_PENDING_TOKENS:])
    assert planner.open_ms[-1] > planner.open_ms[MAX_PENDING_TOKENS] > 0 == planner.open_ms[0]


NGRAMS = SpeculationSettings(drafter="ngram")


def test_a_match_is_prefetched_behind_a_round_of_a_run_for_the_outcome_that_it_expects() -> None:
    request = Request(NGRAMS)
    for token in (7, 8, 9, 10, 11, 12, 13) * 3:
        request.commit((token,), leased=3)
    round_ = Round(1, len(request.sequence.ids) - 1, ROOT, (13,))
    (prefetched,) = request.drafting.prefetch_candidates(round_)
    assert prefetched.outcome == Outcome(round_.base_length, ROOT, 7)
    assert prefetched.proposal.token_ids[:6] == (8, 9, 10, 11, 12, 13)
    assert not prefetched.grows
    room = request.sequence.room
    assert len(prefetched.proposal) <= room - 2, "a token of the round, and one behind the proposal"
    proposed = Round(1, round_.base_length, ROOT, (13,), chain(7, 8))
    (prefetched,) = request.drafting.prefetch_candidates(proposed)
    assert prefetched.outcome == Outcome(round_.base_length, 1, 9)
    assert prefetched.proposal.token_ids[:4] == (10, 11, 12, 13)
    assert not [*request.drafting.prefetch_candidates(Round(1, round_.base_length, ROOT, (13,), chain(7, 9)))], (
        "not the match's"
    )


@pytest.mark.parametrize(
    ("node", "token", "drafted"),
    [
        (ROOT, VOCAB, Proposal(1, (1,), (0.5,))),
        (2, 1, Proposal(1, (1,), (0.5,))),
        (ROOT, 2, Proposal(1, (VOCAB,), (0.5,))),
        (ROOT, 2, Proposal(1, (1,), (1.0,), supports=(SparseDistribution((1,), (1.0,)),))),
    ],
)
def test_what_was_wrongly_prepared_ends_the_draft_once_and_is_never_prefetched(
    node: int, token: int, drafted: Proposal, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request(SpeculationSettings(drafter="model", num_draft_tokens=2))
    request.commit((5,))
    base = len(request.sequence.ids) - 1
    round_ = Round(1, base, ROOT, (5,), Proposal(1, (6, 7), (0.5, 0.5)))
    request.drafting.verifying(round_)
    request.link.take()
    sound = Outcome(base, 1, 3), Proposal(1, (4,), (0.5,))
    for outcome, proposal in (sound, (Outcome(base, node, token), drafted), (Outcome(base, ROOT, 1), drafted)):
        cast(Any, request.link).on_event(DraftedProposal(1, outcome, proposal))
    assert [
        (prefetched.outcome, prefetched.proposal) for prefetched in request.drafting.prefetch_candidates(round_)
    ] == [sound]
    assert request.link.take() == [Close]
    assert [*request.drafting.prefetch_candidates(round_)] == [], "nothing of a draft that is not trusted"
    assert caplog.text.count("draft failed") == 1


@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
def test_nothing_is_prefetched_where_a_proposal_is_more_than_tokens(acceptance: Acceptance) -> None:
    request = Request(NGRAMS, acceptance=acceptance)
    for token in (7, 8, 9, 10) * 4:
        request.commit((token,))
    round_ = Round(1, len(request.sequence.ids) - 1, ROOT, (10,))
    assert request.drafting.copies(round_)
    assert request.drafting.max_prefetched(round_) == 0
    assert Request(NGRAMS).drafting.max_prefetched(round_) == 0, "no match"


def test_what_the_target_has_started_with_is_the_round_whatever_the_plan_was() -> None:
    request = Request(NGRAMS)
    self_started = chain(4, 5, 6)
    base = len(request.sequence.ids) - 1
    request.sequence.ids += (9,)
    request.drafting.commit(
        Outcome(base, ROOT, 9), (9,), request.sequence, TargetNext(self_started=self_started, can_prefetch=True), ""
    )
    drafted = asyncio.run(request.drafting.take(lambda: None))
    assert drafted.proposal == self_started
    assert not drafted.hit
    assert request.drafting.lease == 0


async def test_who_reads_the_targets_features_is_asked_from_the_second_round_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first verdict there are none: the target computes the prompt in the first round's step."""
    reads = replace(RecordingLink.welcome, drafter_needs=(FeatureNeed((0,)),))
    monkeypatch.setattr(RecordingLink, "welcome", reads)
    request = Request(SpeculationSettings(drafter="model", num_draft_tokens=3))
    assert request.drafting.features.need.any
    drafted = await request.drafting.take(lambda: pytest.fail("waited for a draft"))
    assert drafted.proposal is None
    request.drafting.learn(record(), None, ())
    request.commit((5,))
    last = Outcome(len(PROMPT) - 1, ROOT, 5)
    drafted = await request.drafting.take(lambda: request.drafts(last, chain(8, 9)))
    assert drafted.proposal == chain(8, 9)


TREE = Proposal(1, tuple(range(9)), (0.5,) * 9, (ROOT, ROOT, ROOT, 0, 0, 1, 1, 2, 2))
TREES = SpeculationSettings(drafter="model", num_draft_tokens=2, tree_widths=(3, 2))
TIGHT = [(60, 5), (61, 6), (63, 8), (64, 9), (124, 9)]
"""Rows of the target for a text of 60 tokens, and how many nodes fit in behind 55."""


@pytest.mark.parametrize(("max_rows", "nodes"), TIGHT)
@pytest.mark.parametrize("waits", [True, False], ids=["just in time", "before the outcome was known"])
async def test_a_proposal_is_cut_to_the_rows_that_the_target_has_left(max_rows: int, nodes: int, waits: bool) -> None:
    request = Request(TREES, max_rows=max_rows)
    request.commit((5,) * 51)
    request.dispatched()
    last = Outcome(len(request.sequence.ids) - 1, ROOT, 7)
    if not waits:
        request.drafts(last, TREE)
    request.commit((7,))
    drafted = await request.drafting.take(lambda: request.drafts(last, TREE))
    assert drafted.hit is not waits
    assert drafted.proposal == TREE.first(nodes)


@pytest.mark.parametrize(("length", "kept"), [(4, 3), (5, None)], ids=["as was wanted then", "deeper than wanted"])
async def test_what_was_prepared_for_more_room_than_is_left_is_cut(length: int, kept: int | None) -> None:
    request = Request(SpeculationSettings(drafter="model", num_draft_tokens=4))
    request.commit((5,) * 52)
    request.dispatched()  # what is prepared meanwhile may be 4 deep
    last = Outcome(len(request.sequence.ids) - 1, ROOT, 7)
    request.commit((7,))  # now the text has room for 3 and a last one
    prepared = chain(*range(10, 10 + length))
    drafted = await request.drafting.take(lambda: request.drafts(last, prepared))
    assert drafted.proposal == (prepared.first(kept) if kept else None)
    assert (Close in request.link.take()) == (kept is None)


@pytest.mark.parametrize(("max_rows", "nodes"), TIGHT)
@pytest.mark.parametrize("accepted", [0, 2])
def test_a_prefetched_proposal_is_cut_to_the_rows_behind_its_outcome(
    max_rows: int, nodes: int, accepted: int
) -> None:
    request = Request(TREES, max_rows=max_rows)
    request.commit((5,) * (51 - accepted))
    request.dispatched()
    round_ = Round(1, len(request.sequence.ids) - 1, ROOT, (5,), chain(8, 9))
    outcome = Outcome(round_.base_length, accepted - 1, 7)
    request.drafts(outcome, TREE)
    (prefetched,) = request.drafting.prefetch_candidates(round_)
    assert prefetched.proposal == TREE.first(nodes)
    assert round_.behind(outcome, prefetched.proposal).first_position == 55


@pytest.mark.parametrize(("max_rows", "nodes"), [(60, 5), (124, 8)])
async def test_so_is_a_tree_of_matches(max_rows: int, nodes: int) -> None:
    widths = SpeculationSettings(drafter="ngram", num_draft_tokens=4, tree_widths=(2, 1, 1, 1))
    request = Request(widths, max_rows=max_rows)
    request.commit((*range(10, 54), 1, 2, 57, 58, 59, 60, 1, 2))
    assert len(request.sequence.ids) == 55
    drafted = await request.drafting.take(lambda: None)
    assert drafted.proposal is not None
    assert drafted.proposal.token_ids == (57, 58, 59, 60, 3, 10, 11, 12)[:nodes]
