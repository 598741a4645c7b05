"""One request's session on the draft service. It never raises: a failing draft costs speed only."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from paceline.drafting.draft_pool import DraftPeer, DraftPool
from paceline.drafting.feature_feed import FeatureFeed
from paceline.drafting.redrawing import MAX_MISTAKES, RedrawnProposal, as_sent, base_behind, redraw_proposal
from paceline.drafting.round_draft import NOTHING, DraftedRequest, PendingCommit, RoundDraft
from paceline.drafting.speculation_cache import SpeculationCache
from paceline.protocol.codec import error_of
from paceline.protocol.draft import (
    Commit,
    DraftBudget,
    DraftCommand,
    DraftedProposal,
    DraftEvent,
    DraftOpen,
    Shadow,
    Verifying,
)
from paceline.protocol.errors import InvalidInput, Overloaded, PacelineError, PeerUnavailable
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline.protocol.proposal import COPYING, Acceptance, Outcome, Proposal
from paceline.protocol.session import Failure
from paceline.protocol.target import Round
from paceline.rpc.retries import Backoff
from paceline.runtime import clock, metrics
from paceline.sampling.drafted import draft_key

logger = logging.getLogger(__name__)

RETRY_MIN_S = 0.25
RETRY_MAX_S = 8.0


class DraftSession:
    """Asks the draft service for proposals and takes them. Rounds go target-only whenever there is none.

    The session is closed (`_id` is None) or open on `_peer`. It closes when the draft fails. It is then opened on
    another peer if there is one, and on a peer that failed after a growing pause (`_retry_at`). After a wait in vain
    (`is_late`) no round waits until the service sends something: by then it has caught up.
    """

    def __init__(
        self, pool: DraftPool | None, task: DraftedRequest, drafter: str, features: FeatureFeed | None = None
    ) -> None:
        self._pool = pool
        self._peer: DraftPeer | None = None
        self._task = task
        self._drafter = drafter
        self._noise = draft_key(task.noise, task.acceptance)
        self._id: int | None = None
        self._opened_at = 0
        self._opened_s = 0.0
        self._has_spoken = False
        """Whether the service has sent something since the opening: then it has computed the prefix."""
        self._mistakes = 0
        self._cache = SpeculationCache[RedrawnProposal]()
        self.on_prepared: Callable[[], None] = lambda: None
        """Called when a proposal for an outcome that is still open has come, or has grown."""
        self.on_shadow: Callable[[Shadow], None] = lambda shadow: None
        """Called with the shadow of committed tokens, in order, with each position at most once in a session."""
        self._shadow_end = self._sent_length = 0
        """The number of leading tokens whose shadow has come or can't come, and of those that the service has got."""
        self.features = features or FeatureFeed()
        self.features.on_rows = self._send_features
        self._open_need, self._features_end = NO_FEATURES, 0
        """The features that the open session's drafter reads, and the position up to which they have been sent."""
        self._arrival = asyncio.Event()
        self._budget = self._outcome_budget = DraftBudget()
        self._awaits_proposal = False
        self._is_first = True
        self.is_late = False
        """Whether a round waited in vain and nothing useful has come since."""
        self._retry_at: dict[DraftPeer, float] = {}
        self._backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S)

    @property
    def peer(self) -> DraftPeer | None:
        """The draft service on which the session was placed last; before that, one on which it might be placed."""
        return self._pool.first(self._fits) if self._peer is None and self._pool is not None else self._peer

    @property
    def need(self) -> FeatureNeed:
        """The features that the drafter reads, on the service on which the session would be placed now."""
        peer = None if self._pool is None else self._pool.first(lambda peer: peer.has(self._drafter))
        return NO_FEATURES if peer is None else peer.need_of(self._drafter)

    @property
    def model(self) -> str:
        """The name of the drafting model; empty where it is not known."""
        welcome = None if self.peer is None else self.peer.link.welcome
        return "" if welcome is None else welcome.fingerprint.model

    @property
    def is_open(self) -> bool:
        """Whether the draft service holds the session."""
        return self._id is not None

    @property
    def lag(self) -> int:
        """The number of tokens that the draft service may still be computing: those of the opening."""
        return 0 if self._id is None or self._has_spoken else self._opened_at + 1

    @property
    def open_ms(self) -> float:
        """Milliseconds since it was opened; 0 while it is closed."""
        return 0.0 if self._id is None else (clock.now() - self._opened_s) * 1e3

    @property
    def is_ready(self) -> bool:
        """Whether a proposal can be asked for, and the draft service would not have to catch up first."""
        if self.is_late:
            return False
        return self._id is not None or (self._pool is not None and self._pool.is_willing(self._fits))

    @property
    def drafter(self) -> str:
        """The drafter's name; empty: the service's default."""
        return self._drafter

    def change(self, drafter: str) -> None:
        """Use another drafter from the next commit on, and end the session with the present one."""
        self.close()
        self._cache.clear()
        self._drafter = drafter
        self._peer = None
        self.is_late = False

    def open(self, committed: Sequence[int], budget: DraftBudget, traceparent: str) -> None:
        """Open a session with a prefix, and ask for a proposal if the budget has tokens."""
        self.settle(None)
        self._is_first = True
        self._expect(budget)
        peer = self._peer = None if self._pool is None else self._pool.place(committed, self._fits, self._task.tenant)
        if peer is None:
            self._awaits_proposal = False
            return
        try:
            self._id, self._opened_at = peer.attach(self), len(committed) - 1
            self._opened_s, self._has_spoken = clock.now(), False
            self._shadow_end = self._sent_length = len(committed)
            spec = replace(self._task.spec(committed, traceparent), noise=self._noise)
            shadow_budget = replace(budget, shadow=True)
            peer.send(DraftOpen(self._id, spec, self._drafter, shadow_budget, takes_shadows=True))
            self._open_need, self._features_end = peer.need_of(self._drafter), 0
            self._send_features()
        except (PeerUnavailable, InvalidInput) as error:
            # A prefix that is too large for a frame only grows.
            self._give_up(error.for_log, for_good=isinstance(error, InvalidInput))

    def settle(self, outcome: Outcome | None) -> RoundDraft | None:
        """Note the round's outcome, and return the proposal that was prepared for it, if there is one."""
        self._cache.expect(outcome)
        self._arrival.clear()
        self._awaits_proposal = False
        entry = self._cache.take()
        return None if entry is None else self._draft_of(entry, hit=True)

    def prepared_proposals(self, round_: Round) -> Iterator[tuple[Outcome, Proposal]]:
        """The proposals for outcomes of a round, the likeliest first; a faulty one ends session and iteration."""
        for outcome, entry in self._cache.entries_of(round_.base_length):
            if fault := self._fault_in_outcome(outcome, round_):
                self._give_up(fault)
                return
            if len(entry.proposal):
                yield outcome, entry.proposal

    def peek(self, outcome: Outcome) -> Proposal | None:
        """The proposal for an outcome, if it has come; it changes nothing, so any thread may ask."""
        entry = self._cache.get(outcome)
        return None if entry is None else entry.proposal

    def has_prepared(self, base_length: int) -> bool:
        """Whether a proposal for any outcome of a round has come; any thread may ask."""
        return next(self._cache.entries_of(base_length), None) is not None

    def commit(self, pending: PendingCommit) -> None:
        """Send committed tokens to the draft service, after `settle`; a budget with tokens asks for a proposal.

        A lost session is opened anew with the whole sequence.
        """
        if self._id is not None and not self.features.meets(self._open_need):
            self._give_up("the target that its drafter reads from is lost, and this one can't send what it reads")
        if self._id is None or self._peer is None:
            self.open(pending.committed, pending.budget, pending.traceparent)
            return
        self._expect(pending.budget)
        self._sent_length = len(pending.committed)
        command = Commit(
            session_id=self._id,
            outcome=pending.outcome,
            token_ids=pending.token_ids,
            committed_length=len(pending.committed) - len(pending.token_ids),
            budget=pending.budget,
            traceparent=pending.traceparent,
        )
        self._send(self._peer, command)
        self._send_features()

    async def take(self, patience_s: float = math.inf) -> RoundDraft:
        """The proposal that was asked for. It waits at most `patience_s`, and no longer than the pool allows."""
        if self._pool is None or self._id is None or not self._awaits_proposal:
            return NOTHING
        entry = self._cache.take()
        if entry is None and not self.is_late:
            entry = await self._wait(min(patience_s, self._pool.timeout_s))
        self._awaits_proposal = False
        if entry is None:
            return NOTHING
        self._is_first = False
        longest = max(self._budget.max_tokens, self._outcome_budget.max_tokens)
        if (depth := max(entry.proposal.depths, default=0)) > longest:
            limit = f"at most {longest} tokens, the budget"
            self._give_up(f"it sent a malformed proposal: proposal depth = {depth}: must be {limit}")
            return NOTHING
        draft = self._draft_of(entry, hit=False)
        if draft is None or draft.proposal is None:
            return NOTHING
        # It may have been prepared for this outcome with a larger budget: its beginning is as good.
        return replace(draft, proposal=draft.proposal.within(self._budget.max_tokens))

    def verifying(self, round_: Round, budget: DraftBudget) -> None:
        """Announce a round that has left for the target, with the budget of each outcome's proposal."""
        if self._id is None or self._peer is None:
            return
        self._outcome_budget = budget
        proposal = round_.proposal
        if proposal is not None and (proposal.drafter in COPYING or self._began_behind(round_)):
            inline = replace(proposal, supports=())
            self._send(self._peer, Verifying(self._id, round_.base_length, proposal=inline, budget=budget))
        else:
            reference = (proposal.proposal_id, len(proposal)) if proposal is not None else (0, 0)
            self._send(self._peer, Verifying(self._id, round_.base_length, *reference, budget=budget))

    def _began_behind(self, round_: Round) -> bool:
        """Whether a round's proposal is older than the session, so that it came from a lost one."""
        return self._is_first and round_.base_length == self._opened_at

    def dispatching(self, drafted: RoundDraft) -> None:
        """End the session if the proposal of a round that is about to leave has a mistake.

        It does not end earlier: a round that is never sent must not decide by its tokens whether the request goes on
        without a draft (`exactness` §7).
        """
        mistake, proposal = drafted.mistake, drafted.proposal
        if mistake is None or proposal is None or mistake.node >= len(proposal):
            return
        self._mistakes += 1
        last = self._mistakes == MAX_MISTAKES
        self._give_up(f"mistake {self._mistakes} of at most {MAX_MISTAKES}: {mistake}", for_good=last)

    def on_refused(self, error: PacelineError) -> None:
        """End the session, whose proposal the target has refused."""
        if self._id is not None:
            self._give_up(f"the target refused what it proposed: {error.for_log}")

    def close(self) -> None:
        """End the session on the draft service."""
        if self._id is not None and self._peer is not None:
            self._peer.detach(self._id)
            self._id = None

    def on_event(self, event: DraftEvent) -> None:
        """Handle an event that the draft service sent for this session."""
        if isinstance(event, Failure):
            error = error_of(event)
            if isinstance(error, Overloaded | PeerUnavailable) and self._pool and self._peer:
                self._pool.note_refusal(self._peer, error)
            self._give_up(error.for_log)
        elif isinstance(event, DraftedProposal):
            self._put(event)
        elif isinstance(event, Shadow):
            self._report(event)

    def on_lost(self, error: PacelineError) -> None:
        """Handle the loss of the link, with which the session ended."""
        self._id = None
        self.is_late = False
        self._arrival.set()
        metrics.fell_back("draft_lost")
        logger.warning("draft lost, going on target-only: error=%s", error.for_log)

    def _put(self, drafted: DraftedProposal) -> None:
        assert self._pool is not None
        self._has_spoken = True
        try:
            drafted.proposal.check_for(self._task.acceptance, self._pool.vocab_size)
            entry = self._redrawn(drafted)
        except InvalidInput as error:
            self._give_up(f"it sent a malformed proposal: {error.for_log}")
            return
        if self._cache.put(drafted.outcome, entry):
            self.is_late = False
            self._arrival.set()
        else:
            self.on_prepared()

    def _report(self, shadow: Shadow) -> None:
        if not self._shadow_end <= shadow.first_position < shadow.end <= self._sent_length:
            limit = f"among [{self._shadow_end}, {self._sent_length}), committed and not reported before"
            positions = f"[{shadow.first_position}, {shadow.end})"
            self._give_up(f"it sent a malformed shadow: positions = {positions}: must be {limit}")
            return
        self._shadow_end = shadow.end
        self.is_late, self._has_spoken = False, True
        self.on_shadow(shadow)

    def _redrawn(self, drafted: DraftedProposal) -> RedrawnProposal:
        """Redraw a proposal when it arrives, so that it costs no time between a verdict and the next round."""
        if self._task.acceptance is Acceptance.COUPLED:
            return as_sent(drafted)
        outcome = drafted.outcome
        base_length = self._opened_at if outcome is None else base_behind(outcome)
        return redraw_proposal(drafted, base_length, self._noise, self._cache.get(outcome))

    def _send(self, peer: DraftPeer, command: DraftCommand) -> None:
        try:
            peer.send(command)
        except (PeerUnavailable, InvalidInput) as error:
            self._give_up(error.for_log)

    def _send_features(self) -> None:
        """Send the features that have come of tokens that the draft service has got."""
        if not self._open_need.any:
            return
        for features in self.features.slice(self._features_end, self._sent_length):
            if self._id is not None and self._peer is not None:
                self._send(self._peer, replace(features, session_id=self._id))
        self._features_end = max(self._features_end, min(self.features.end, self._sent_length))

    def _fits(self, peer: DraftPeer) -> bool:
        """Whether a draft service has the drafter, its features can be had, and its pause after a failure is over."""
        fits = peer.has(self._drafter) and self.features.meets(peer.need_of(self._drafter))
        return fits and clock.now() >= self._retry_at.get(peer, 0.0)

    def _expect(self, budget: DraftBudget) -> None:
        self._budget = budget
        self._awaits_proposal = budget.max_tokens > 0

    def _draft_of(self, entry: RedrawnProposal, *, hit: bool) -> RoundDraft | None:
        """The draft of a round by a proposal that has come; None: it is empty."""
        if not len(entry.proposal):
            return None
        self._backoff.reset()
        return RoundDraft(entry.proposal, hit, mistake=entry.mistake, timings=entry.timings)

    async def _wait(self, timeout_s: float) -> RedrawnProposal | None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrival.wait()
        except TimeoutError:
            self.is_late = True
            metrics.fell_back("draft_late")
            logger.info("draft is late, going on target-only: session=%s timeout_s=%g", self._id, timeout_s)
        return self._cache.take()

    def _give_up(self, reason: str, *, for_good: bool = False) -> None:
        """Drop the session and its proposals. A commit after a pause opens it anew, unless it ends for good."""
        pause_s = math.inf if for_good else self._backoff.next_s()
        metrics.fell_back("draft_failed")
        logger.warning(
            "draft failed, going on without it: address=%s session=%s retry_in_s=%g error=%s",
            self._peer and self._peer.link.address, self._id, pause_s, reason,
        )  # fmt: skip
        self.close()
        self._cache.clear()
        if self._peer is not None:
            self._retry_at[self._peer] = clock.now() + pause_s
        self._arrival.set()

    def _fault_in_outcome(self, outcome: Outcome, round_: Round) -> str:
        """Why a round can't have an outcome that was drafted for; empty: it can."""
        assert self._pool is not None
        vocab_size = self._pool.vocab_size
        nodes = len(round_.proposal) if round_.proposal else 0
        if outcome.node >= nodes:
            return f"it drafted for node {outcome.node} of a round that has {nodes}"
        if outcome.next_token >= vocab_size:
            return f"it drafted for a next token of {outcome.next_token}, outside [0, {vocab_size})"
        return ""
