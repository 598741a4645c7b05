"""Where a request's proposals come from: its prediction, its n-gram matches, the draft service, or nowhere.

Once a round's outcome is known the next one is planned: what is there already
(an n-gram match, a proposal drafted for this very outcome) is verified at once;
a proposal that is drafted just in time is waited for. Requests that name a number
of tokens get that many whenever a drafter has them; the others follow the planner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from coordinator.policy.choosing import Choosing, Offered, known_as
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
from paceline.sampling.match import Match

TARGET_ONLY = Plan()


@dataclass(frozen=True)
class Prefetched:
    """A proposal for the target in case the round in flight has this outcome; `grows`: it may become longer."""

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
        wanted = task.speculation
        name = wanted.drafter or settings.drafter
        self.features = FeatureFeed(len(task.prompt), settings.feature_dtype, settings.max_feature_bytes)
        """What the target sends for the drafter; whoever opens the target's session asks it for the need."""
        self._session = DraftSession(pool, task, "" if name == AUTO else name, self.features)
        self._fixed = wanted.num_draft_tokens if wanted.num_draft_tokens is not None else settings.num_draft_tokens
        self._widths = wanted.tree_widths
        self._off = wanted.off or name == NONE
        self._uses_model = pool is not None and name != NGRAM and self._fixed != 0 and not self._off
        self._coupled = task.acceptance is Acceptance.COUPLED
        self._fan_out = settings.fan_out if self._uses_model else 0
        self._max_lease = settings.lease
        self._max_prefetched = settings.max_prefetched
        # A predicted text repeats much more than another one: what is known of either says little of the other.
        text = "predicted" if task.prediction else ""
        own = known_as(name, self._session.model, text)
        self._planner = RequestPlanner(planner, own, task.acceptance, greedy=task.sampling.temperature == 0)
        self._choosing: Choosing | None = None
        self._rounds = 0
        if name == AUTO and self._uses_model and pool is not None:
            offers = partial(pool.offers, partial(self._may_read, targets))
            self._choosing = Choosing(planner, self._planner, offers, text, can_ahead=self._fan_out > 0)
            self._draft_with(self._choosing.first())
        if self._uses_model:
            self.features.need = self._session.need
        self._planner.reads_features = self.features.need.any
        self._session.on_shadow = self._planner.take_shadow
        searched = name in (NGRAM, AUTO) and not self._off
        volumes = partial(library.volumes, task.tenant) if library is not None and searched else None
        self._matches = Matches(
            len(task.prompt), () if self._off else task.prediction, ngrams=searched, volumes=volumes
        )
        self._cached: RoundDraft | None = None
        self._missed = False
        self._first_draft = False
        self._pending: PendingCommit | None = None
        self._leased = 0
        self._self_started: Proposal | None = None
        self._target_can_prefetch = False
        self._room = self._rows_left = 0
        self._plan = TARGET_ONLY

    def open(self, sequence: Sequence, traceparent: str) -> None:
        """Plan the first round; the draft service begins with the prefix meanwhile."""
        self._matches.extend(sequence.ids)
        self._cached = None
        self._plan = self._next_plan(sequence)
        if self._needs_session():
            self._session.open(sequence.ids, self._wanted_now(), traceparent)

    def observe(self, recorder: RequestRecorder) -> None:
        """Have what the planner is told of the draft kept, too."""
        planned = self._session.on_shadow

        def told(shadow: Shadow) -> None:
            planned(shadow)
            recorder.take_shadow(shadow)

        self._session.on_shadow = told

    @property
    def draft_line(self) -> CostLine:
        """What the draft service says that its steps take."""
        peer = self._session.peer
        return CostLine() if peer is None else peer.costs.line_of(self._session.drafter)

    @property
    def lease(self) -> int:
        """Rounds behind the planned one that the target may start by itself."""
        return self._plan.lease

    async def take(self, asked: Callable[[], None]) -> RoundDraft:
        """The planned proposal; an n-gram match stands in for a draft that doesn't come.

        If the round waits for the draft service, `asked` is called once the request for a proposal has left.
        """
        drafted = await self._planned(asked)
        self._first_draft = drafted.first
        if drafted.proposal is not None:
            drafted = replace(drafted, proposal=drafted.proposal.first(self._rows_left))
        self._session.dispatching(drafted)
        return replace(drafted, miss=self._missed) if self._missed else drafted

    async def _planned(self, asked: Callable[[], None]) -> RoundDraft:
        plan = self._plan
        if self._self_started is not None:
            timings = self._cached.timings if self._cached is not None else NOTHING.timings
            return RoundDraft(self._self_started, hit=self._self_started.drafter not in COPYING, timings=timings)
        if plan.source is Source.WAIT:
            self._send_pending()
            await asyncio.sleep(0)  # the link's writer runs
            asked()
        if plan.source is Source.CACHED and self._cached is not None:
            cached = self._cached
            return replace(cached, proposal=cached.proposal and cached.proposal.first(plan.nodes))
        if plan.source is Source.WAIT:
            waiting = time.perf_counter()
            drafted = await self._session.take(plan.patience_ms / 1e3)
            if drafted.proposal is not None:
                return drafted
            if self._session.is_late:
                self._planner.take_late((time.perf_counter() - waiting) * 1e3, plan.depth)
        if plan.source is not Source.NONE and self._matches.best is not None:
            width = self._widths[0] if self._widths else 1
            proposal = self._matches.proposal(1 + self._rounds, plan.depth, width, coupled=self._coupled)
            return RoundDraft(proposal)
        return NOTHING

    def verifying(self, round_: Round) -> None:
        """Tell the draft service what the last rounds committed and, if it is to draft for this one's outcomes, which
        round left for the target. Rounds of a lease are told together."""
        plan = self._plan
        in_lease = self._leased > 1 or plan.lease > 0
        if not in_lease or self._session.is_late or self._pending is None or self._pending.must_leave:
            self._send_pending()
        if plan.fan_out:
            budget = DraftBudget(plan.branch_depth, self._widths, plan.branch_nodes, plan.fan_out)
            self._session.verifying(round_, budget)

    def max_prefetched(self, round_: Round) -> int:
        """Most proposals to leave with the target for a round's outcomes; coupled acceptance only."""
        return self._max_prefetched if self._may_prefetch and (self.copies(round_) or self.drafts_outcomes) else 0

    @property
    def drafts_outcomes(self) -> bool:
        """Whether the draft service prepares proposals that may be prefetched for the round in flight."""
        return self._plan.fan_out > 0

    def copies(self, round_: Round) -> bool:
        """Whether the round follows a match, or may come to: then there is something to prefetch at once."""
        return self._matches.best is not None and (round_.proposal is None or round_.proposal.drafter in COPYING)

    @property
    def _may_prefetch(self) -> bool:
        return self._coupled and not self._off and self._max_prefetched > 0

    def on_prepared(self, call: Callable[[], None]) -> None:
        """Have `call` called when a proposal for an outcome that is not known yet has come, or has grown."""
        self._session.on_prepared = call

    def verdict_due_ms(self, round_: Round, since_verdict_ms: float) -> float:
        """How soon what leaves for the target is expected to come too late for the verdict of the round in flight.

        Asked when the round has left, or `since_verdict_ms` after the verdict with which the target started it.
        """
        sent = self._self_started is None and not self._leased
        due_ms = self._planner.verdict_due_ms(len(round_.proposal) if round_.proposal else 0, sent=sent)
        return due_ms if sent else due_ms - since_verdict_ms

    def prefetched(self, round_: Round) -> Iterator[Prefetched]:
        """Proposals for outcomes of the round in flight, the likeliest first, as far as they are worth verifying."""
        copied = self._copied_on(round_)
        if copied is not None:
            yield copied
        plan = self._plan
        longest = max(plan.branch_depth, plan.branch_nodes)
        for outcome, prepared in islice(self._session.prepared_proposals(round_), self._max_prefetched):
            if copied is None or outcome != copied.outcome:
                proposal = self._fitting(prepared, round_, outcome)
                worth = proposal if self._fixed is not None else self._planner.worth_verifying(proposal)
                if worth is not None and len(worth):
                    yield Prefetched(outcome, worth, grows=len(prepared) < longest)

    def commit(
        self, outcome: Outcome, tokens: Seq[int], sequence: Sequence, ahead: TargetNext, traceparent: str
    ) -> None:
        """Take in what a round committed and plan the next, as far as the target has not started it.

        The draft service is told by `take` if the round waits for it, else by `verifying`, after the round has left.
        """
        self._leased = ahead.leased_rounds
        self._self_started, self._target_can_prefetch = ahead.self_started, ahead.can_prefetch
        self._planner.move(ahead.peer, self._session.peer, self._session.drafter)
        if self._matches.exist:
            self._planner.take_match(self._matches.best, tokens)
        self._matches.extend(sequence.ids)
        self._cached = self._session.settle(outcome)
        drafted_for = self._plan.fan_out > 0
        self._missed = drafted_for and self._cached is None
        self._choose(sequence)
        self._plan = self._next_plan(sequence)
        before, self._pending = self._pending, None
        if self._session.is_open or before is not None or self._needs_session():
            budget = self._wanted_now()
            pending = PendingCommit(outcome, tuple(tokens), sequence.ids, budget, traceparent, drafted_for)
            self._pending = pending.join_to(before)

    def learn(self, record: RoundRecord, proposal: Proposal | None, path: Seq[int]) -> None:
        """Take in what the running plan cost and gave; call before `commit`."""
        self._rounds += 1
        if self._rounds > 1:
            self._planner.learn(self._plan, record, proposal, path, first_draft=self._first_draft)

    def explain(self) -> PlanExplanation:
        """Why the request was drafted for as it was; empty where the request fixed that itself."""
        return self._planner.explain()

    def on_refused(self, error: PacelineError) -> None:
        """The target refused what was proposed for the round in flight, or prefetched for its outcomes."""
        self._session.on_refused(error)

    def close(self) -> None:
        """End the session on the draft service; may be called again."""
        self._session.close()
        self._planner.close()

    def _choose(self, sequence: Sequence) -> None:
        """Change to a better drafter, but not below a round that was started with the present one's proposal."""
        if self._choosing is not None and self._self_started is None:
            other = self._choosing.other(self._session.drafter, len(sequence.ids), sequence.room)
            if other is not None:
                self._cached = None
                self._draft_with(other)

    def _may_read(self, targets: Seq[Welcome], need: FeatureNeed) -> bool:
        """Whether a drafter gets what it reads: later on only what the target's session was opened for."""
        return self.features.meets(need) if self._rounds else is_available(need, targets)

    def _draft_with(self, offered: Offered | None) -> None:
        if offered is not None and offered.name != self._session.drafter:
            self._session.change(offered.name)
            self._planner.draft_with(offered.known_as)
            self._planner.reads_features = self._session.need.any

    def _send_pending(self) -> None:
        sent, self._pending = self._pending, None
        if sent is not None:
            self._session.commit(sent)

    def _copied_on(self, round_: Round) -> Prefetched | None:
        """The match's continuation behind the round, in case the round and the next token are as the match says."""
        if not self.copies(round_):
            return None
        found = self._matches.prefetched(1 + self._rounds, round_, partial(self._copied_nodes, round_))
        return None if found is None else Prefetched(*found, grows=False)

    def _copied_nodes(self, round_: Round, match: Match, k: int, outcome: Outcome) -> int:
        """How far to follow a match behind a round that has its first k tokens."""
        room = self._room_behind(round_, outcome)
        if self._fixed is not None:
            return min(room, self._fixed) if k else 0
        if not k:
            return self._planner.worth_prefetching(match, room)
        return self._planner.worth_copying(match.advance(k + 1), room)

    def _room_behind(self, round_: Round, outcome: Outcome) -> int:
        """Most tokens of a proposal for an outcome of the round in flight."""
        return max(0, min(self._room - _accepted(round_, outcome) - 2, MAX_PROPOSAL_NODES))

    def _fitting(self, prepared: Proposal, round_: Round, outcome: Outcome) -> Proposal:
        """The first nodes of a proposal for an outcome, as far as text and rows of the target go."""
        rows_left = self._rows_left - _accepted(round_, outcome) - 1
        return prepared.within(self._room_behind(round_, outcome)).first(rows_left)

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
        if self._off or self._fixed == 0:
            return Plan(lease=lease)
        room = max(0, min(sequence.room - 1, MAX_PROPOSAL_NODES))
        if not room:
            return TARGET_ONLY
        if self._cached is not None and self._cached.proposal is not None:
            self._cached = replace(self._cached, proposal=self._cached.proposal.within(room))
        if self._fixed is not None:
            k, match = min(self._fixed, room), self._matches.best
            cached = self._cached.proposal if self._cached else None
            return fixed_plan(k, match, cached, self._widths, fan_out=self._fan_out, model=self._may_ask)
        opens = self._session.is_open or self._pending is not None
        return self._planner.plan(
            Options(
                room=room,
                match=self._matches.best,
                cached=self._cached.proposal if self._cached else None,
                drafts=self._may_ask and self._session.is_ready,
                lag=self._session.lag if opens else len(sequence.ids),
                open_ms=self._session.open_ms,
                fan_out=self._fan_out,
                trees=self._coupled,
                leased=self._leased,
                lease=lease,
                self_started=self._self_started is not None,
                can_prefetch=self._may_prefetch and self._target_can_prefetch and self._matches.exist,
            )
        )

    @property
    def _may_ask(self) -> bool:
        """Whether a model may be asked. One that reads the target's features finds none before the first verdict: the
        target computes the prompt in the first round's own step."""
        return self._uses_model and (self._rounds > 0 or not self.features.need.any)

    def _needs_session(self) -> bool:
        """Whether the draft service is to have the text, from the start where drafting is expected to pay."""
        asked = self._plan.source is Source.WAIT or self._plan.shadow or self._plan.fan_out > 0
        expected = self._fixed is not None or self._planner.expects_drafts
        return self._uses_model and (asked or (self._fan_out > 0 and expected))

    def _wanted_now(self) -> DraftBudget:
        """What the draft service is asked for: a proposal only if the round waits for it."""
        plan = self._plan
        if self._session.is_late:
            return DraftBudget(shadow=True)  # its shadow says when it has caught up
        if plan.source is not Source.WAIT:
            return DraftBudget(shadow=plan.shadow)
        return DraftBudget(plan.depth, self._widths, plan.nodes, least_chance=plan.least_chance)


def _accepted(round_: Round, outcome: Outcome) -> int:
    """Nodes that a round's outcome accepts."""
    return len(round_.proposal.path(outcome.node)) if round_.proposal else 0
