"""Where a request's proposals come from: its prediction, its n-gram matches, the draft service, or nowhere.

Once a round's outcome is known the next one is planned: what is there already
(an n-gram match, a proposal drafted for this very outcome) is verified at once;
a proposal that is drafted just in time is waited for. Requests that name a number
of tokens get that many whenever a drafter has them; the others follow the planner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from coordinator.policy.choosing import Choosing, OfferedDrafter, stats_key
from coordinator.policy.fixed import fixed_plan
from coordinator.policy.matches import Matches
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.planner import Planner, RequestPlanner
from coordinator.policy.settings import DraftingSettings
from coordinator.recorder import RequestRecorder
from coordinator.sessions.draft import DraftSession
from coordinator.sessions.draft_pool import DraftPool
from coordinator.sessions.feature_feed import FeatureFeed, is_available
from coordinator.sessions.round_draft import NOTHING, PendingCommit, RoundDraft
from coordinator.sessions.verified_round import TargetNext
from coordinator.text.library import Library
from coordinator.text.sequence import GenerationTask, Sequence
from paceline.costs.cost_line import CostLine
from paceline.protocol.draft import DraftBudget, Shadow
from paceline.protocol.errors import PacelineError
from paceline.protocol.explanation import PlanExplanation
from paceline.protocol.features import FeatureNeed
from paceline.protocol.handshake import Welcome
from paceline.protocol.proposal import (
    AUTO,
    COPYING,
    MAX_PROPOSAL_NODES,
    NGRAM,
    NONE,
    Acceptance,
    Outcome,
    Proposal,
)
from paceline.protocol.records import RoundRecord
from paceline.protocol.target import Round
from paceline.runtime import clock
from paceline.sampling.match import Match

TARGET_ONLY = Plan()


@dataclass(frozen=True)
class PrefetchCandidate:
    """A proposal that may be prefetched for an outcome of the round in flight; `grows`: it may become longer."""

    outcome: Outcome
    proposal: Proposal
    grows: bool


class Drafting:
    """One request's drafters and the plan of its next round."""

    def __init__(
        self,
        task: GenerationTask,
        pool: DraftPool | None,
        planner: Planner,
        settings: DraftingSettings,
        library: Library | None = None,
        targets: Seq[Welcome] = (),
    ) -> None:
        speculation = task.speculation
        name = speculation.drafter or settings.drafter
        self.features = FeatureFeed(len(task.prompt), settings.feature_dtype, settings.max_feature_bytes)
        """The target's features for the drafter; its `need` is asked for when the target's session is opened."""
        self._session = DraftSession(pool, task, "" if name == AUTO else name, self.features)
        self._fixed_tokens = (
            speculation.num_draft_tokens if speculation.num_draft_tokens is not None else settings.num_draft_tokens
        )
        self._widths = speculation.tree_widths
        self._is_off = speculation.off or name == NONE
        self._uses_model = pool is not None and name != NGRAM and self._fixed_tokens != 0 and not self._is_off
        self._coupled = task.acceptance is Acceptance.COUPLED
        self._fan_out = settings.fan_out if self._uses_model else 0
        self._max_lease = settings.lease
        self._max_prefetched = settings.max_prefetched
        # A predicted text repeats much more than another one, so the two kinds have statistics of their own.
        text = "predicted" if task.prediction else ""
        own = stats_key(name, self._session.model, text)
        self._planner = RequestPlanner(planner, own, task.acceptance, greedy=task.sampling.temperature == 0)
        self._choosing: Choosing | None = None
        self._rounds = 0
        if name == AUTO and self._uses_model and pool is not None:
            offers = partial(pool.offers, partial(self._may_read, targets))
            self._choosing = Choosing(planner, self._planner, offers, text, can_ahead=self._fan_out > 0)
            self._draft_with(self._choosing.first())
        if self._uses_model:
            self.features.need = self._session.need
        self._planner.stats.reads_features = self.features.need.any
        self._session.on_shadow = self._planner.stats.take_shadow
        searches = name in (NGRAM, AUTO) and not self._is_off
        volumes = partial(library.volumes, task.tenant) if library is not None and searches else None
        self._matches = Matches(
            len(task.prompt), () if self._is_off else task.prediction, ngrams=searches, volumes=volumes
        )
        self._cached_draft: RoundDraft | None = None
        self._is_miss = False
        self._first_draft = False
        self._pending: PendingCommit | None = None
        self._leased_rounds = 0
        self._self_started: Proposal | None = None
        self._target_can_prefetch = False
        self._room = self._rows_left = 0
        self._plan = TARGET_ONLY

    def open(self, sequence: Sequence, traceparent: str) -> None:
        """Plan the first round; the draft service begins with the prefix meanwhile."""
        self._matches.extend(sequence.ids)
        self._cached_draft = None
        self._plan = self._next_plan(sequence)
        if self._needs_session():
            self._session.open(sequence.ids, self._budget_now(), traceparent)

    def observe(self, recorder: RequestRecorder) -> None:
        """Pass shadows on to a recorder, too."""
        to_planner = self._session.on_shadow

        def report(shadow: Shadow) -> None:
            to_planner(shadow)
            recorder.take_shadow(shadow)

        self._session.on_shadow = report

    @property
    def draft_line(self) -> CostLine:
        """The cost line of the drafter at work; unknown without a draft service."""
        peer = self._session.peer
        return CostLine() if peer is None else peer.costs.line_of(self._session.drafter)

    @property
    def lease(self) -> int:
        """Rounds after the planned one that the target may start by itself."""
        return self._plan.lease

    async def take(self, on_request: Callable[[], None]) -> RoundDraft:
        """The planned proposal; an n-gram match stands in for a draft that doesn't come.

        If the round waits for the draft service, `on_request` is called once the request for a proposal has left.
        """
        drafted = await self._planned_draft(on_request)
        self._first_draft = drafted.first
        if drafted.proposal is not None:
            drafted = replace(drafted, proposal=drafted.proposal.first(self._rows_left))
        self._session.dispatching(drafted)
        return replace(drafted, miss=self._is_miss) if self._is_miss else drafted

    async def _planned_draft(self, on_request: Callable[[], None]) -> RoundDraft:
        plan = self._plan
        if self._self_started is not None:
            timings = self._cached_draft.timings if self._cached_draft is not None else NOTHING.timings
            return RoundDraft(self._self_started, hit=self._self_started.drafter not in COPYING, timings=timings)
        if plan.source is Source.WAIT:
            self._send_pending()
            await asyncio.sleep(0)  # the link's writer runs
            on_request()
        if plan.source is Source.CACHED and self._cached_draft is not None:
            draft = self._cached_draft
            return replace(draft, proposal=draft.proposal and draft.proposal.first(plan.nodes))
        if plan.source is Source.WAIT:
            waiting = clock.now()
            drafted = await self._session.take(plan.patience_ms / 1e3)
            if drafted.proposal is not None:
                return drafted
            if self._session.is_late:
                self._planner.take_late((clock.now() - waiting) * 1e3, plan.depth)
        if plan.source is not Source.NONE and self._matches.best is not None:
            width = self._widths[0] if self._widths else 1
            proposal = self._matches.proposal(1 + self._rounds, plan.depth, width, coupled=self._coupled)
            return RoundDraft(proposal)
        return NOTHING

    def verifying(self, round_: Round) -> None:
        """Send pending commits to the draft service, and announce a round if it is to draft for its outcomes.

        The commits of a lease's rounds are sent together.
        """
        plan = self._plan
        in_lease = self._leased_rounds > 1 or plan.lease > 0
        if not in_lease or self._session.is_late or self._pending is None or self._pending.must_leave:
            self._send_pending()
        if plan.fan_out:
            budget = DraftBudget(plan.branch_depth, self._widths, plan.branch_nodes, plan.fan_out)
            self._session.verifying(round_, budget)

    def max_prefetched(self, round_: Round) -> int:
        """Most proposals to prefetch for a round's outcomes; 0 unless acceptance is coupled."""
        return self._max_prefetched if self._may_prefetch and (self.copies(round_) or self.drafts_outcomes) else 0

    @property
    def drafts_outcomes(self) -> bool:
        """Whether the draft service prepares proposals that may be prefetched for the round in flight."""
        return self._plan.fan_out > 0

    def copies(self, round_: Round) -> bool:
        """Whether the round copies a match, or the next one may: then there is something to prefetch at once."""
        return self._matches.best is not None and (round_.proposal is None or round_.proposal.drafter in COPYING)

    @property
    def _may_prefetch(self) -> bool:
        return self._coupled and not self._is_off and self._max_prefetched > 0

    def on_prepared(self, call: Callable[[], None]) -> None:
        """Set the function that is called when a proposal for an open outcome has come, or has grown."""
        self._session.on_prepared = call

    def verdict_due_ms(self, round_: Round, since_verdict_ms: float) -> float:
        """Milliseconds until a message to the target is expected to miss the verdict of the round in flight.

        Called when the round has left, or `since_verdict_ms` after the verdict with which the target started it.
        """
        was_sent = self._self_started is None and not self._leased_rounds
        due_ms = self._planner.verdict_due_ms(len(round_.proposal) if round_.proposal else 0, was_sent=was_sent)
        return due_ms if was_sent else due_ms - since_verdict_ms

    def prefetch_candidates(self, round_: Round) -> Iterator[PrefetchCandidate]:
        """Proposals for outcomes of the round in flight that are worth verifying, the likeliest first."""
        match_candidate = self._prefetch_match(round_)
        if match_candidate is not None:
            yield match_candidate
        plan = self._plan
        longest = max(plan.branch_depth, plan.branch_nodes)
        for outcome, outcome_proposal in islice(self._session.prepared_proposals(round_), self._max_prefetched):
            if match_candidate is None or outcome != match_candidate.outcome:
                proposal = self._fitting(outcome_proposal, round_, outcome)
                worth = proposal if self._fixed_tokens is not None else self._planner.worth_verifying(proposal)
                if worth is not None and len(worth):
                    yield PrefetchCandidate(outcome, worth, grows=len(outcome_proposal) < longest)

    def commit(
        self, outcome: Outcome, tokens: Seq[int], sequence: Sequence, target_next: TargetNext, traceparent: str
    ) -> None:
        """Note the tokens of a round and plan the next one, unless the target has started it.

        The commit is sent to the draft service by `take` if the round waits for a proposal, else by `verifying`.
        """
        self._leased_rounds = target_next.leased_rounds
        self._self_started, self._target_can_prefetch = target_next.self_started, target_next.can_prefetch
        self._planner.move(target_next.peer, self._session.peer, self._session.drafter)
        if self._matches.exist:
            self._planner.stats.take_match(self._matches.best, tokens)
        self._matches.extend(sequence.ids)
        self._cached_draft = self._session.settle(outcome)
        drafts_outcomes = self._plan.fan_out > 0
        self._is_miss = drafts_outcomes and self._cached_draft is None
        self._choose(sequence)
        self._plan = self._next_plan(sequence)
        earlier, self._pending = self._pending, None
        if self._session.is_open or earlier is not None or self._needs_session():
            budget = self._budget_now()
            pending = PendingCommit(outcome, tuple(tokens), sequence.ids, budget, traceparent, drafts_outcomes)
            self._pending = pending.join_to(earlier)

    def learn(self, record: RoundRecord, proposal: Proposal | None, path: Seq[int]) -> None:
        """Learn from the cost and the result of the plan that ran; called before `commit`."""
        self._rounds += 1
        if self._rounds > 1:
            self._planner.learn(self._plan, record, proposal, path, first_draft=self._first_draft)

    def explain(self) -> PlanExplanation:
        """Explain the plans of the request; empty where the request fixed them itself."""
        return self._planner.explain()

    def on_refused(self, error: PacelineError) -> None:
        """Handle the target's refusal of a proposal, for the round in flight or prefetched."""
        self._session.on_refused(error)

    def close(self) -> None:
        """End the session on the draft service; may be called again."""
        self._session.close()
        self._planner.close()

    def _choose(self, sequence: Sequence) -> None:
        """Change to a better drafter, unless a round was started with the present one's proposal."""
        if self._choosing is not None and self._self_started is None:
            other = self._choosing.other(self._session.drafter, len(sequence.ids), sequence.room)
            if other is not None:
                self._cached_draft = None
                self._draft_with(other)

    def _may_read(self, targets: Seq[Welcome], need: FeatureNeed) -> bool:
        """Whether a drafter's features can be had; after the first round only those that the target sends already."""
        return self.features.meets(need) if self._rounds else is_available(need, targets)

    def _draft_with(self, drafter: OfferedDrafter | None) -> None:
        if drafter is not None and drafter.name != self._session.drafter:
            self._session.change(drafter.name)
            self._planner.stats.change(drafter.stats_key)
            self._planner.stats.reads_features = self._session.need.any

    def _send_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._session.commit(pending)

    def _prefetch_match(self, round_: Round) -> PrefetchCandidate | None:
        """The match's continuation after the round, for the outcome that follows the match."""
        if not self.copies(round_):
            return None
        candidate = self._matches.prefetch_proposal(1 + self._rounds, round_, partial(self._match_nodes, round_))
        return None if candidate is None else PrefetchCandidate(*candidate, grows=False)

    def _match_nodes(self, round_: Round, match: Match, k: int, outcome: Outcome) -> int:
        """How far to follow a match after a round that has its first k tokens."""
        room = self._room_behind(round_, outcome)
        if self._fixed_tokens is not None:
            return min(room, self._fixed_tokens) if k else 0
        if not k:
            return self._planner.worth_prefetching(match, room)
        return self._planner.worth_copying(match.advance(k + 1), room)

    def _room_behind(self, round_: Round, outcome: Outcome) -> int:
        """Most tokens of a proposal for an outcome of the round in flight."""
        return max(0, min(self._room - _accepted(round_, outcome) - 2, MAX_PROPOSAL_NODES))

    def _fitting(self, proposal: Proposal, round_: Round, outcome: Outcome) -> Proposal:
        """The first nodes of a proposal for an outcome that fit into the text and the target's rows."""
        rows_left = self._rows_left - _accepted(round_, outcome) - 1
        return proposal.within(self._room_behind(round_, outcome)).first(rows_left)

    def _next_plan(self, sequence: Sequence) -> Plan:
        self._room, self._rows_left = sequence.room, sequence.rows_left
        plan = self._open_plan(sequence)
        if self._self_started is None:
            return plan
        source = Source.NGRAM if self._self_started.drafter in COPYING else Source.CACHED
        depth = max(self._self_started.depths)
        return replace(plan, source=source, nodes=len(self._self_started), depth=depth, lease=0)

    def _open_plan(self, sequence: Sequence) -> Plan:
        lease = max(0, min(sequence.room - 1, self._max_lease))
        if self._is_off or self._fixed_tokens == 0:
            return Plan(lease=lease)
        room = max(0, min(sequence.room - 1, MAX_PROPOSAL_NODES))
        if not room:
            return TARGET_ONLY
        if self._cached_draft is not None and self._cached_draft.proposal is not None:
            self._cached_draft = replace(self._cached_draft, proposal=self._cached_draft.proposal.within(room))
        if self._fixed_tokens is not None:
            k, match = min(self._fixed_tokens, room), self._matches.best
            cached_proposal = self._cached_draft.proposal if self._cached_draft else None
            return fixed_plan(k, match, cached_proposal, self._widths, fan_out=self._fan_out, model=self._may_ask)
        opens = self._session.is_open or self._pending is not None
        return self._planner.plan(
            Options(
                room=room,
                match=self._matches.best,
                cached_proposal=self._cached_draft.proposal if self._cached_draft else None,
                drafts=self._may_ask and self._session.is_ready,
                lag=self._session.lag if opens else len(sequence.ids),
                open_ms=self._session.open_ms,
                fan_out=self._fan_out,
                trees=self._coupled,
                leased_rounds=self._leased_rounds,
                lease=lease,
                self_started=self._self_started is not None,
                can_prefetch=self._may_prefetch and self._target_can_prefetch and self._matches.exist,
            )
        )

    @property
    def _may_ask(self) -> bool:
        """Whether a model may be asked. One that reads the target's features has none before the first verdict: the
        target computes the prompt in the first round's own step."""
        return self._uses_model and (self._rounds > 0 or not self.features.need.any)

    def _needs_session(self) -> bool:
        """Whether the draft service needs the text: for this round, or because drafting is expected to pay later."""
        asks_now = self._plan.source is Source.WAIT or self._plan.shadow or self._plan.fan_out > 0
        expects_drafts = self._fixed_tokens is not None or self._planner.expects_drafts
        return self._uses_model and (asks_now or (self._fan_out > 0 and expects_drafts))

    def _budget_now(self) -> DraftBudget:
        """The budget of the next commit: it asks for a proposal only if the round waits for one."""
        plan = self._plan
        if self._session.is_late:
            return DraftBudget(shadow=True)  # its shadow says when it has caught up
        if plan.source is not Source.WAIT:
            return DraftBudget(shadow=plan.shadow)
        return DraftBudget(plan.depth, self._widths, plan.nodes, least_chance=plan.least_chance)


def _accepted(round_: Round, outcome: Outcome) -> int:
    """Nodes that a round's outcome accepts."""
    return len(round_.proposal.path(outcome.node)) if round_.proposal else 0
