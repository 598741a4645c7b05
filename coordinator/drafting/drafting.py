"""Where a request's proposals come from: its prediction, its n-gram matches, the draft service, or nowhere.

Once a round's outcome is known the next one is planned: what is there already
(an n-gram match, a proposal drafted for this very outcome) is verified at once;
a proposal that is drafted just in time is waited for. Requests that name a number
of tokens get that many whenever a drafter has them; the others follow the planner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

from coordinator.drafting.explaining import explain
from coordinator.drafting.outcomes import OutcomeProposals
from coordinator.drafting.settings import DraftingSettings, RequestedDrafting, fixed_plan
from coordinator.policy.choosing import Choosing, OfferedDrafter, stats_key
from coordinator.policy.plan import Options, Plan, Source
from coordinator.policy.planner import Planner, RequestPlanner
from coordinator.recorder import RequestRecorder
from coordinator.sessions.verified_round import TargetNext
from coordinator.text.library import Library
from coordinator.text.matches import Matches
from coordinator.text.sequence import GenerationTask, Sequence
from paceline.costs.goodput import Mode
from paceline.drafting.draft_pool import DraftPool
from paceline.drafting.feature_feed import FeatureFeed, is_available
from paceline.drafting.round_draft import NOTHING, PendingCommit, RoundDraft
from paceline.drafting.session import DraftSession
from paceline.protocol.draft import DraftBudget, Shadow
from paceline.protocol.errors import PacelineError
from paceline.protocol.explanation import PlanExplanation
from paceline.protocol.features import FeatureNeed
from paceline.protocol.handshake import Welcome
from paceline.protocol.proposal import AUTO, COPYING, MAX_PROPOSAL_NODES, Outcome, Proposal
from paceline.protocol.records import RoundRecord
from paceline.protocol.target import Round

NO_PLAN = Plan()
"""The plan before the first one is made."""


class Drafting:
    """One request's drafters and the plan of its next round.

    A round visits it three times: `take`, `verifying`, `commit`.

    Args:
        task, sequence: the request and its text.
        pool: the draft services; None: there are none.
        planner: shared by all requests.
        settings: where the request leaves them open.
        recorder: of the request.
        library: other texts to search; None: none.
        targets: what the targets said; their features may be asked for.
    """

    def __init__(
        self,
        task: GenerationTask,
        sequence: Sequence,
        pool: DraftPool | None,
        planner: Planner,
        settings: DraftingSettings,
        recorder: RequestRecorder | None = None,
        library: Library | None = None,
        targets: Seq[Welcome] = (),
    ) -> None:
        self._settings = wish = RequestedDrafting.of(task, settings, has_service=pool is not None)
        features = FeatureFeed(len(task.prompt), settings.feature_dtype, settings.max_feature_bytes)
        self._session = DraftSession(pool, task, "" if wish.drafter == AUTO else wish.drafter, features)
        # A predicted text repeats much more than another one, so the two kinds have statistics of their own.
        text = "predicted" if task.prediction else ""
        own = stats_key(wish.drafter, self._session.model, text)
        self._planner = RequestPlanner(planner, own, task.acceptance, greedy=task.sampling.temperature == 0)
        self._choosing: Choosing | None = None
        self._rounds = 0
        if wish.drafter == AUTO and wish.uses_model and pool is not None:
            offers = partial(pool.offers, partial(self._may_read, targets))
            self._choosing = Choosing(self._planner, offers, text, can_ahead=wish.fan_out > 0)
            self._draft_with(self._choosing.first())
        if wish.uses_model:
            features.need = self._session.need
        self._planner.stats.reads_features = features.need.any
        self._recorder = recorder
        self._session.on_shadow = self._take_shadow
        volumes = partial(library.volumes, task.tenant) if library is not None and wish.searches else None
        prediction = () if wish.is_off else task.prediction
        self._matches = Matches(len(task.prompt), prediction, ngrams=wish.searches, volumes=volumes)
        self._sequence = sequence
        self._cached_draft = NOTHING
        """What was drafted for the last outcome before it was known, or that nothing was though outcomes were."""
        self._pending: PendingCommit | None = None
        self._next = TargetNext()
        self._plan = NO_PLAN

    @property
    def features(self) -> FeatureFeed:
        """The target's features for the drafter; its `need` is asked for when the target's session is opened."""
        return self._session.features

    async def take(self, on_request: Callable[[], None], traceparent: str = "") -> RoundDraft:
        """The planned proposal; an n-gram match stands in for a draft that doesn't come.

        If the round waits for the draft service, `on_request` is called once the request for a proposal has left.
        """
        plan = self.open(traceparent) if self._plan is NO_PLAN else self._plan
        drafted = await self._planned_draft(plan, on_request)
        if drafted.proposal is not None:
            drafted = replace(drafted, proposal=drafted.proposal.first(self._sequence.rows_left))
        self._session.dispatching(drafted)
        mode = "" if plan.mode is None else plan.mode.name.lower()
        return replace(
            drafted, miss=self._cached_draft.miss, lease=plan.lease, drafts_ahead=plan.ahead.fan_out > 0, mode=mode
        )

    def verifying(self, round_: Round) -> OutcomeProposals | None:
        """Send pending commits to the draft service, and announce a round if it is to draft for its outcomes.

        The commits of a lease's rounds are sent together. Returns what may be prefetched, if anything may be.
        """
        plan = self._plan
        self._send_due(plan)
        if plan.ahead.fan_out:
            self._session.verifying(round_, replace(plan.ahead, tree_widths=self._settings.widths))
        proposals = self.outcomes(round_)
        return proposals if proposals.most else None

    def commit(
        self,
        record: RoundRecord,
        drafted: RoundDraft,
        proposal: Proposal | None,
        outcome: Outcome,
        tokens: Seq[int],
        target_next: TargetNext | None,
        traceparent: str,
    ) -> None:
        """Learn from a round and plan the next one, unless the target has started it.

        The commit is sent to the draft service by `take` if the round waits for a proposal, else by `verifying`.

        Args:
            record: of the round.
            drafted: what `take` returned for it.
            proposal: that it had; the target may have started the round with another one.
            outcome: of the round.
            tokens: that it committed.
            target_next: what the target does next; None: the text has ended.
            traceparent: of the round.
        """
        plan, self._rounds = self._plan, self._rounds + 1
        if self._rounds > 1:  # the first one waits for the prompt
            path = proposal.path(outcome.node) if proposal else ()
            self._planner.learn(plan, record, proposal, path)
        if target_next is None:
            return
        self._next = target_next
        if self._matches.exist and plan.mode is not Mode.REST:
            self._planner.take_match(self._matches.best, tokens, is_left_out=not record.proposed)
        if self._goes_on(plan):
            self._plan, self._cached_draft = Plan(mode=plan.mode), NOTHING
            self._matches.rest()
            return
        self._planner.move(target_next.peer, self._session.peer, self._session.drafter)
        drafts_outcomes = plan.ahead.fan_out > 0
        self._cached_draft = self._session.settle(outcome) or RoundDraft(miss=drafts_outcomes)
        self._choose()
        self._plan = self._next_plan()
        earlier, self._pending = self._pending, None
        if self._session.is_open or earlier is not None or self._needs_session(self._plan):
            budget = self._budget(self._plan)
            ids = self._sequence.ids
            pending = PendingCommit(outcome, tuple(tokens), ids, budget, traceparent, drafts_outcomes)
            self._pending = pending.join_to(earlier)

    def _goes_on(self, plan: Plan) -> bool:
        """Whether a request without a draft stays as it is, so that a token costs hardly more CPU than plain."""
        if plan.mode in (None, Mode.DRAFTS) or self._pending is not None or self._session.is_open:
            return False
        return self._next.leased_rounds > 1 and self._planner.mode is plan.mode and self._planner.is_idle

    def close(self) -> None:
        """End the session on the draft service; may be called again."""
        if self._recorder is not None and self._session.peer is not None:
            line_of = partial(self._session.peer.costs.line_of, self._session.drafter)
            self._recorder.take_lines(draft=line_of(), draft_beside=line_of(beside=True))
        self._session.close()
        self._planner.close()

    def explain(self, records: Seq[RoundRecord]) -> PlanExplanation:
        """Explain the plans of the request, whose rounds were these; empty where the request fixed them itself."""
        return explain(self._planner, records)

    def on_prepared(self, call: Callable[[], None]) -> None:
        """Set the function that is called when a proposal for an open outcome has come, or has grown."""
        self._session.on_prepared = call

    def on_refused(self, error: PacelineError) -> None:
        """Handle the target's refusal of a proposal, for the round in flight or prefetched."""
        self._session.on_refused(error)

    def open(self, traceparent: str) -> Plan:
        """Plan the first round; the draft service begins with the prefix meanwhile. `take` does it otherwise."""
        self._plan = plan = self._next_plan()
        if self._needs_session(plan):
            self._session.open(self._sequence.ids, self._budget(plan), traceparent)
        return plan

    def outcomes(self, round_: Round) -> OutcomeProposals:
        """The proposals for the outcomes of a round in flight."""
        return OutcomeProposals(
            round_,
            self._plan,
            1 + self._rounds,
            self._next.self_started is None and not self._next.leased_rounds,
            self._sequence.room,
            self._sequence.rows_left,
            self._settings,
            self._planner,
            self._matches,
            self._session.prepared_proposals,
        )

    async def _planned_draft(self, plan: Plan, on_request: Callable[[], None]) -> RoundDraft:
        proposal = self._next.self_started
        if proposal is not None:
            return RoundDraft(proposal, hit=proposal.drafter not in COPYING, timings=self._cached_draft.timings)
        if plan.source is Source.WAIT:
            self._send_pending()
            await asyncio.sleep(0)  # the link's writer runs
            on_request()
            drafted = await self._session.take(plan.patience_ms / 1e3)
            if drafted.proposal is not None:
                return drafted
        if plan.source is Source.CACHED and self._cached_draft.proposal is not None:
            return replace(self._cached_draft, proposal=self._cached_draft.proposal.first(plan.nodes))
        if plan.source is not Source.NONE and self._matches.best is not None:
            width, coupled = (*self._settings.widths, 1)[0], self._settings.coupled
            return RoundDraft(self._matches.proposal(1 + self._rounds, plan.depth, width, coupled=coupled))
        return NOTHING

    def _take_shadow(self, shadow: Shadow) -> None:
        self._planner.stats.take_shadow(shadow)
        if self._recorder is not None:
            self._recorder.take_shadow(shadow)

    def _choose(self) -> None:
        """Change to a better drafter, unless a round was started with the present one's proposal."""
        if self._choosing is not None and self._next.self_started is None:
            other = self._choosing.other(self._session.drafter, len(self._sequence.ids), self._sequence.room)
            if other is not None:
                self._cached_draft = RoundDraft(miss=self._cached_draft.miss)
                self._draft_with(other)

    def _may_read(self, targets: Seq[Welcome], need: FeatureNeed) -> bool:
        """Whether a drafter's features can be had; after the first round only those that the target sends already."""
        return self.features.meets(need) if self._rounds else is_available(need, targets)

    def _draft_with(self, drafter: OfferedDrafter | None) -> None:
        if drafter is not None and drafter.name != self._session.drafter:
            self._session.change(drafter.name)
            self._planner.stats.change(drafter.stats_key)
            self._planner.stats.reads_features = self._session.need.any

    def _send_due(self, plan: Plan) -> None:
        """Send the pending commit, unless more of a lease may join it.

        Where no draft works it isn't sent, and a session that lags too far behind ends. One ends at once where drafts
        are left for a pause: it would go on to compute the text beside everybody's steps.
        """
        pending = self._pending
        if pending is None:
            return
        in_lease = self._next.leased_rounds > 1 or (plan.lease > 0 and not plan.ahead.fan_out)
        waits = plan.mode in (Mode.REST, Mode.MATCHES) and not pending.is_awaited
        if waits and (pending.must_leave or self._planner.leaves_drafts):
            self._pending = None
            self._session.close()
        elif not waits and (not in_lease or self._session.is_late or pending.must_leave):
            self._send_pending()

    def _send_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._session.commit(pending)

    def _next_plan(self) -> Plan:
        if self._settings.tokens is None and self._planner.mode is Mode.REST:
            self._matches.rest()
        else:
            self._matches.extend(self._sequence.ids)
        plan, proposal = self._open_plan(), self._next.self_started
        if proposal is None:
            return plan
        source = Source.NGRAM if proposal.drafter in COPYING else Source.CACHED
        lease = plan.lease if plan.ahead.fan_out else 0
        return replace(plan, source=source, nodes=len(proposal), depth=max(proposal.depths), lease=lease)

    def _open_plan(self) -> Plan:
        wish, session, text_room = self._settings, self._session, self._sequence.room
        lease = max(0, min(text_room - 1, wish.lease))
        if wish.is_off or wish.tokens == 0:
            return Plan(lease=lease)
        room = max(0, min(text_room - 1, MAX_PROPOSAL_NODES))
        if not room:
            return Plan()
        if self._cached_draft.proposal is not None:
            self._cached_draft = replace(self._cached_draft, proposal=self._cached_draft.proposal.within(room))
        match, cached_proposal = self._matches.best, self._cached_draft.proposal
        # A model that reads the target's features has none before the first verdict: the target computes the prompt
        # in the first round's own step.
        may_ask = wish.uses_model and (self._rounds > 0 or not self.features.need.any)
        if wish.tokens is not None:
            k = min(wish.tokens, room)
            return fixed_plan(k, match, cached_proposal, wish.widths, fan_out=wish.fan_out, model=may_ask)
        opens = session.is_open or self._pending is not None
        return self._planner.plan(
            Options(
                room=room,
                match=match,
                cached_proposal=cached_proposal,
                drafts=may_ask and session.is_ready,
                lag=session.lag if opens else len(self._sequence.ids),
                open_ms=session.open_ms,
                fan_out=wish.fan_out,
                trees=wish.coupled,
                leased_rounds=self._next.leased_rounds,
                lease=lease,
                self_started=self._next.self_started is not None,
                can_prefetch=lease > 0 and wish.max_prefetched > 0 and self._next.can_prefetch,
            )
        )

    def _needs_session(self, plan: Plan) -> bool:
        """Whether the draft service needs the text: for this round, or because drafting is expected to pay later."""
        asks_now = plan.source is Source.WAIT or plan.shadow or plan.ahead.fan_out > 0
        expects_drafts = self._settings.tokens is not None or self._planner.expects_drafts
        pays_later = self._settings.fan_out > 0 and self._sequence.room > 1 and expects_drafts
        return self._settings.uses_model and (asks_now or pays_later)

    def _budget(self, plan: Plan) -> DraftBudget:
        """The budget of the next commit: it asks for a proposal only if the round waits for one."""
        if self._session.is_late:
            return DraftBudget(shadow=True)  # its shadow says when it has caught up
        if plan.source is not Source.WAIT:
            return DraftBudget(shadow=plan.shadow)
        return DraftBudget(plan.depth, self._settings.widths, plan.nodes, least_chance=plan.least_chance)
