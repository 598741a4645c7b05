"""One request's session on the draft service. It never raises: a failing draft costs speed only."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from coordinator.sessions.draft_pool import DraftPeer, DraftPool
from coordinator.sessions.drafted import NOTHING, Drafted, PendingCommit
from coordinator.sessions.feature_feed import FeatureFeed
from coordinator.sessions.redrawing import MAX_MISTAKES, Redrawn, as_sent, base_behind, redrawn
from coordinator.sessions.speculation_cache import SpeculationCache
from coordinator.text.sequence import GenerationTask
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
from paceline.protocol.errors import InvalidInput, Overloaded, PacelineError, PeerUnavailable, require
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline.protocol.proposal import COPYING, MAX_PROPOSAL_NODES, Acceptance, Outcome, Proposal
from paceline.protocol.session import Failure
from paceline.protocol.target import Round
from paceline.rpc.retries import Backoff
from paceline.runtime import metrics
from paceline.sampling.drafted import draft_key

logger = logging.getLogger(__name__)

RETRY_MIN_S = 0.25
RETRY_MAX_S = 8.0


class DraftSession:
    """Asks for proposals and takes them; target-only whenever none is to be had.

    States of the session: none (`_id` is None) → open → none again when the
    draft fails, on `_peer`; then on another one, if there is one, and on one that
    failed after a growing pause (`_retry_at`). After a wait in vain
    (`is_late`) no round waits until something comes: the service has caught up then.
    """

    def __init__(
        self, pool: DraftPool | None, task: GenerationTask, drafter: str, features: FeatureFeed | None = None
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
        """Whether something has come since it was opened: then it has computed the text before."""
        self._mistakes = 0
        self._cache = SpeculationCache[Redrawn]()
        self.on_prepared: Callable[[], None] = lambda: None
        """Called when a proposal for an outcome that is not known yet has come, or has grown."""
        self.on_shadow: Callable[[Shadow], None] = lambda shadow: None
        """Called with the shadow of committed tokens, each position at most once in a session, in order."""
        self._shadowed = self._told = 0
        """Tokens whose shadow can't come any more, and tokens that the draft service knows."""
        self._features = features or FeatureFeed()
        self._features.on_rows = self._send_features
        self._reads, self._fed = NO_FEATURES, 0
        """What the session's drafter reads of the target, and the position up to which it has been sent."""
        self._arrived = asyncio.Event()
        self._budget = self._ahead = DraftBudget()
        self._wanted = False
        self._fresh = True
        self.is_late = False
        """Whether a round waited in vain, and nothing of use has come since."""
        self._retry_at: dict[DraftPeer, float] = {}
        self._backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S)

    @property
    def peer(self) -> DraftPeer | None:
        """The draft service that the session was placed on last; before that, one that it might be placed on."""
        return self._pool.first(self._fits) if self._peer is None and self._pool is not None else self._peer

    @property
    def need(self) -> FeatureNeed:
        """What the drafter reads of the target, on the service that the session would be placed on now."""
        peer = None if self._pool is None else self._pool.first(lambda peer: peer.has(self._drafter))
        return NO_FEATURES if peer is None else peer.need_of(self._drafter)

    @property
    def model(self) -> str:
        """What drafts; empty where that is not known."""
        welcome = None if self.peer is None else self.peer.link.welcome
        return "" if welcome is None else welcome.fingerprint.model

    @property
    def is_open(self) -> bool:
        """Whether the draft service holds the session."""
        return self._id is not None

    @property
    def lag(self) -> int:
        """Tokens that the draft service may still be computing: those that the session was opened with."""
        return 0 if self._id is None or self._has_spoken else self._opened_at + 1

    @property
    def open_ms(self) -> float:
        """For how long it has been open."""
        return 0.0 if self._id is None else (time.monotonic() - self._opened_s) * 1e3

    @property
    def is_ready(self) -> bool:
        """Whether a draft can be asked for, and would not have to catch up first."""
        if self.is_late:
            return False
        return self._id is not None or (self._pool is not None and self._pool.is_willing(self._fits))

    @property
    def drafter(self) -> str:
        """The drafter that it asks for; empty: the service's default."""
        return self._drafter

    def change(self, drafter: str) -> None:
        """Have another drafter from the next commit on; the session with this one ends."""
        self.close()
        self._cache.clear()
        self._drafter = drafter
        self._peer = None
        self.is_late = False

    def open(self, committed: Sequence[int], budget: DraftBudget, traceparent: str) -> None:
        """Begin with a prefix, which is computed at once, and, if the budget has tokens, ask for its proposal."""
        self.settle(None)
        self._fresh = True
        self._expect(budget)
        peer = self._peer = None if self._pool is None else self._pool.place(committed, self._fits, self._task.tenant)
        if peer is None:
            self._wanted = False
            return
        try:
            self._id, self._opened_at = peer.attach(self), len(committed) - 1
            self._opened_s, self._has_spoken = time.monotonic(), False
            self._shadowed = self._told = len(committed)
            spec = replace(self._task.spec(committed, traceparent), noise=self._noise)
            computed = replace(budget, shadow=True)
            peer.send(DraftOpen(self._id, spec, self._drafter, computed, takes_shadows=True))
            self._reads, self._fed = peer.need_of(self._drafter), 0
            self._send_features()
        except (PeerUnavailable, InvalidInput) as error:
            # What is too large for a frame only grows.
            self._give_up(error.for_log, for_good=isinstance(error, InvalidInput))

    def settle(self, outcome: Outcome | None) -> Drafted | None:
        """Record the round's outcome; returns the proposal that was prepared for it, if there is one."""
        self._cache.expect(outcome)
        self._arrived.clear()
        self._wanted = False
        entry = self._cache.take()
        return None if entry is None else self._checked(entry, MAX_PROPOSAL_NODES, hit=True)

    def prepared(self, round_: Round) -> Iterator[tuple[Outcome, Proposal]]:
        """The proposals prepared for outcomes of a round, the likeliest first, up to one that is faulty."""
        for outcome, entry in self._cache.prepared(round_.base_length):
            if fault := self._fault_in_outcome(outcome, round_):
                self._give_up(fault)
                return
            checked = self._checked(entry, MAX_PROPOSAL_NODES, hit=True)
            if checked is not None and checked.proposal is not None:
                yield outcome, checked.proposal

    def commit(self, pending: PendingCommit) -> None:
        """Tell the draft service what was committed, after `settle`; a budget with tokens asks for a proposal now.

        A session that was lost is opened anew with the whole sequence.
        """
        if self._id is not None and not self._features.meets(self._reads):
            self._give_up("the target that its drafter reads from is lost, and this one can't send what it reads")
        if self._id is None or self._peer is None:
            self.open(pending.committed, pending.budget, pending.traceparent)
            return
        self._expect(pending.budget)
        self._told = len(pending.committed)
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

    async def take(self, patience_s: float = math.inf) -> Drafted:
        """The proposal that was asked for; waits for it so long at most, and no longer than the pool allows."""
        if self._pool is None or self._id is None or not self._wanted:
            return NOTHING
        entry = self._cache.take()
        if entry is None and not self.is_late:
            entry = await self._wait(min(patience_s, self._pool.timeout_s))
        self._wanted = False
        if entry is None:
            return NOTHING
        first, self._fresh = self._fresh, False
        checked = self._checked(entry, max(self._budget.max_tokens, self._ahead.max_tokens), hit=False)
        if checked is None or checked.proposal is None:
            return NOTHING
        # Prepared for this outcome before the draft service knew that less is wanted now: its beginning is as good.
        return replace(checked, proposal=checked.proposal.within(self._budget.max_tokens), first=first)

    def verifying(self, round_: Round, budget: DraftBudget) -> None:
        """Tell the draft service which round left for the target, and what each outcome's proposal may cost."""
        if self._id is None or self._peer is None:
            return
        self._ahead = budget
        proposal = round_.proposal
        if proposal is not None and (proposal.drafter in COPYING or self._began_behind(round_)):
            inline = replace(proposal, supports=())
            self._send(self._peer, Verifying(self._id, round_.base_length, proposal=inline, budget=budget))
        else:
            known = (proposal.proposal_id, len(proposal)) if proposal is not None else (0, 0)
            self._send(self._peer, Verifying(self._id, round_.base_length, *known, budget=budget))

    def _began_behind(self, round_: Round) -> bool:
        """Whether a round's proposal is older than the session: it came from one that was lost."""
        return self._fresh and round_.base_length == self._opened_at

    def dispatching(self, drafted: Drafted) -> None:
        """A round is about to leave with this: a mistake among its tokens ends the session.

        Not before: to go without a draft for what it drew in a round that is never sent would be a choice by a
        token that is then dropped (`exactness` §7).
        """
        mistake, proposal = drafted.mistake, drafted.proposal
        if mistake is None or proposal is None or mistake.node >= len(proposal):
            return
        self._mistakes += 1
        last = self._mistakes == MAX_MISTAKES
        self._give_up(f"mistake {self._mistakes} of at most {MAX_MISTAKES}: {mistake}", for_good=last)

    def refused(self, error: PacelineError) -> None:
        """The target refused what was proposed."""
        if self._id is not None:
            self._give_up(f"the target refused what it proposed: {error.for_log}")

    def close(self) -> None:
        """End the session on the draft service."""
        if self._id is not None and self._peer is not None:
            self._peer.detach(self._id)
            self._id = None

    def on_event(self, event: DraftEvent) -> None:
        """Handle what the draft service sent for this session."""
        if isinstance(event, Failure):
            error = error_of(event)
            if isinstance(error, Overloaded | PeerUnavailable) and self._pool and self._peer:
                self._pool.refused(self._peer, error)
            self._give_up(error.for_log)
        elif isinstance(event, DraftedProposal):
            self._put(event)
        elif isinstance(event, Shadow):
            self._report(event)

    def on_lost(self, error: PacelineError) -> None:
        """The link broke, and this session with it."""
        self._id = None
        self.is_late = False
        self._arrived.set()
        metrics.fell_back("draft_lost")
        logger.warning("draft lost, going on target-only: error=%s", error.for_log)

    def _put(self, drafted: DraftedProposal) -> None:
        self._has_spoken = True
        try:
            entry = self._redrawn(drafted)
        except InvalidInput as error:
            self._give_up(f"it sent a malformed proposal: {error.message}")
            return
        if self._cache.put(drafted.outcome, entry):
            self.is_late = False
            self._arrived.set()
        else:
            self.on_prepared()

    def _report(self, shadow: Shadow) -> None:
        if not self._shadowed <= shadow.first_position < shadow.end <= self._told:
            known = f"among [{self._shadowed}, {self._told}), committed and not reported before"
            positions = f"[{shadow.first_position}, {shadow.end})"
            self._give_up(f"it sent a malformed shadow: positions = {positions}: must be {known}")
            return
        self._shadowed = shadow.end
        self.is_late, self._has_spoken = False, True
        self.on_shadow(shadow)

    def _redrawn(self, drafted: DraftedProposal) -> Redrawn:
        """Now, when it arrives: what is prepared costs nothing between a verdict and the next round."""
        if self._task.acceptance is Acceptance.COUPLED:
            return as_sent(drafted)
        outcome = drafted.outcome
        base_length = self._opened_at if outcome is None else base_behind(outcome)
        return redrawn(drafted, base_length, self._noise, self._cache.get(outcome))

    def _send(self, peer: DraftPeer, command: DraftCommand) -> None:
        try:
            peer.send(command)
        except (PeerUnavailable, InvalidInput) as error:
            self._give_up(error.for_log)

    def _send_features(self) -> None:
        """Pass on what has come of the tokens that the draft service knows."""
        if not self._reads.any:
            return
        for features in self._features.between(self._fed, self._told):
            if self._id is not None and self._peer is not None:
                self._send(self._peer, replace(features, session_id=self._id))
        self._fed = max(self._fed, min(self._features.end, self._told))

    def _fits(self, peer: DraftPeer) -> bool:
        """Whether a draft service has the drafter, which gets what it reads, and its pause is over if it failed."""
        fits = peer.has(self._drafter) and self._features.meets(peer.need_of(self._drafter))
        return fits and time.monotonic() >= self._retry_at.get(peer, 0.0)

    def _expect(self, budget: DraftBudget) -> None:
        self._budget = budget
        self._wanted = budget.max_tokens > 0

    def _checked(self, entry: Redrawn, longest: int, *, hit: bool) -> Drafted | None:
        """What a round may use of what the draft service sent; a fault in it ends the session."""
        assert self._pool is not None
        try:
            proposal = entry.proposal
            proposal.check_for(self._task.acceptance, self._pool.vocab_size)
            depth = max(proposal.depths, default=0)
            require(depth <= longest, "proposal depth", depth, f"at most {longest} tokens, as was wanted")
        except InvalidInput as error:
            self._give_up(f"it sent a malformed proposal: {error.for_log}")
            return None
        if not len(proposal):
            return None
        self._backoff.reset()
        return Drafted(proposal, hit, mistake=entry.mistake, timings=entry.timings)

    async def _wait(self, timeout_s: float) -> Redrawn | None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            self.is_late = True
            metrics.fell_back("draft_late")
            logger.info("draft is late, going on target-only: session=%s timeout_s=%g", self._id, timeout_s)
        return self._cache.take()

    def _give_up(self, reason: str, *, for_good: bool = False) -> None:
        """Drop the session and what it sent; the next commit after a pause opens it anew, unless it is for good."""
        pause_s = math.inf if for_good else self._backoff.next_s()
        metrics.fell_back("draft_failed")
        logger.warning(
            "draft failed, going on without it: address=%s session=%s retry_in_s=%g error=%s",
            self._peer and self._peer.link.address, self._id, pause_s, reason,
        )  # fmt: skip
        self.close()
        self._cache.clear()
        if self._peer is not None:
            self._retry_at[self._peer] = time.monotonic() + pause_s
        self._arrived.set()

    def _fault_in_outcome(self, outcome: Outcome, round_: Round) -> str:
        """Why a round can't have an outcome that was drafted for; empty if it can."""
        assert self._pool is not None
        vocab_size = self._pool.vocab_size
        nodes = len(round_.proposal) if round_.proposal else 0
        if outcome.node >= nodes:
            return f"it drafted for node {outcome.node} of a round that has {nodes}"
        if outcome.next_token >= vocab_size:
            return f"it drafted for a next token of {outcome.next_token}, outside [0, {vocab_size})"
        return ""
