"""One request's session on a target: rounds in, verdicts out. A lost session is opened again, there or elsewhere.

A round may carry a lease: the target starts the rounds after it by itself, so their verdicts have come or are coming
when they are asked for. A leased round that is sent nevertheless extends the lease; in time, there is no pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from coordinator.sessions.answers import AnswerWatch, LossPatience, PromptReport, ReaderTooSlow, check_verdict
from coordinator.sessions.target_pool import TargetPeer, TargetPool
from coordinator.sessions.verified_round import TargetNext, VerifiedRound
from coordinator.text.sequence import GenerationTask
from paceline.costs.service_costs import TargetCosts
from paceline.drafting.feature_feed import FeatureFeed
from paceline.drafting.speculation_cache import PrefetchedProposals
from paceline.protocol.codec import error_of
from paceline.protocol.errors import (
    InvalidInput,
    Overloaded,
    PacelineError,
    PeerUnavailable,
    PrefixMismatch,
    ProtocolMismatch,
    UnknownSession,
)
from paceline.protocol.features import Features
from paceline.protocol.handshake import Welcome
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.session import Failure
from paceline.protocol.target import Prefetch, PromptPiece, Round, TargetEvent, TargetOpen, TargetOpened, Verdict
from paceline.rpc.retries import Retries
from paceline.runtime import clock, metrics

logger = logging.getLogger(__name__)

MAX_REFUSALS = 3
"""Most consecutive re-opens that a live target may answer with PREFIX_MISMATCH or UNKNOWN_SESSION."""
MAX_DEATHS = 2
"""Most targets that may die while a session waits for its grammar. If more die, the grammar is the cause."""
OnDispatch = Callable[[Round], Awaitable[None]]
"""Called with each round that was queued for the target; the verdict may come during the call."""


class TargetSession:
    """Verifies one request's rounds, one at a time.

    `_answers` has the verdicts to come by their rounds' base lengths: those of the round in flight, and of the rounds
    that the target may start after it. `_prefetched_proposals` are those for outcomes of the round in flight.
    `_refusal` is the last answer that refused a command and left the session as it was. Nothing is prefetched for the
    round at `_no_prefetch_at`, which is sent again after a refused prefetch. `_peer` is the target on which the
    session was placed last. `_numeric` is its numeric fingerprint, set by the first verdict: only targets that have
    the same may go on. `_awaits_grammar` says that the target may be compiling the grammar.
    """

    def __init__(self, pool: TargetPool, task: GenerationTask, features: FeatureFeed | None = None) -> None:
        self._pool = pool
        self._peer: TargetPeer | None = None
        self._numeric: str | None = None
        self._task = task
        self._committed: Sequence[int] = ()
        self._id: int | None = None
        self._answers: dict[int, asyncio.Future[Verdict]] = {}
        self._prefetched_proposals = PrefetchedProposals()
        self._lease_round: Round | None = None
        """The round that was sent last: the lease is its own."""
        self._refusal: InvalidInput | None = None
        self._no_prefetch_at = -1
        self.on_refused: Callable[[PacelineError], None] = lambda error: None
        """Called when the target refused a round's proposal or a prefetched one, so that the round goes without."""
        self._awaits_grammar = False
        self.verdict_at = 0.0
        """When the last verdict came, by `perf_counter`. Under load that is long before its request goes on."""
        self._retries = Retries(pool.budget)
        self._watch = AnswerWatch(pool.round_timeout_s, self._on_unanswered)
        self.prompt = PromptReport(task.prompt, task.prompt_logprobs)
        self.features = features or FeatureFeed()
        self.features.check_targets(pool.welcomes)
        self.cached_prompt_tokens: int | None = None
        """As `GenerationStats.cached_prompt_tokens`."""

    @property
    def costs(self) -> TargetCosts:
        """The costs stated by the target on which the session was placed last; unknown before that."""
        return TargetCosts() if self._peer is None else self._peer.costs

    @property
    def leased_rounds(self) -> int:
        """The number of rounds that the target may have started by itself: those whose verdicts are to come."""
        return len(self._answers)

    @property
    def max_prefetched(self) -> int:
        """Most proposals that may be prefetched for one round."""
        return self._welcome.max_prefetched if self._welcome else 0

    def prefetch(self, round_: Round, proposals: Mapping[Outcome, Proposal]) -> None:
        """Send proposals for outcomes of the round in flight; it does nothing once that round is answered.

        A proposal that changes an earlier one for the same outcome, instead of extending it, is not sent.
        """
        answer = self._answers.get(round_.base_length)
        if self._id is None or answer is None or answer.done() or round_.base_length == self._no_prefetch_at:
            return
        assert self._peer is not None
        new_proposals = self._prefetched_proposals.grow(proposals)
        if len(new_proposals) < len(proposals):
            logger.warning("prefetched proposals changed, left out: session=%s base=%d", self._id, round_.base_length)
        if new_proposals:
            self._peer.link.send(Prefetch(self._id, round_.base_length, tuple(new_proposals.items())), urgent=True)

    def next_after(self, round_: Round, outcome: Outcome, verdict: Verdict) -> TargetNext:
        """What the target does after a round whose outcome is known.

        Raises:
            ProtocolMismatch: the verdict names a round for which nothing was prefetched.
        """
        if verdict.self_started is None:
            return TargetNext(self.leased_rounds, can_prefetch=self.max_prefetched > 0, peer=self._peer)
        proposal = self._prefetched_proposals.find_started(round_, outcome, verdict.self_started)
        leased_rounds = 0 if proposal else self.leased_rounds
        return TargetNext(leased_rounds, self_started=proposal, can_prefetch=True, peer=self._peer)

    async def verify(
        self,
        committed: Sequence[int],
        accepted_node: int,
        proposal: Proposal | None,
        lease: int,
        traceparent: str,
        on_dispatch: OnDispatch,
        *,
        drafting: bool = False,
    ) -> VerifiedRound:
        """Send one round, unless the target has started it, and wait for its verdict.

        A lost session is opened anew and the round sent again, with the same
        proposal, so the verdict is the one that was lost (`exactness` §3: once
        drawn, nothing is redrawn). Where the target refuses a proposal, the round's own or a prefetched one, nothing
        was drawn, and the round is sent again without proposals.

        Args:
            committed: every committed token.
            accepted_node: of the previous round's proposal.
            proposal: what to verify; None for a leased round, and the prefetched proposal for a
                round that the target started with one.
            lease: how many rounds after this one the target may start by itself.
            traceparent: parent of the target's spans.
            on_dispatch: called with the round once it is queued.
            drafting: whether a draft works for the session during the round.

        Raises:
            PeerUnavailable: no target was available in time.
            PacelineError: the target refused the session, or the round.
        """
        self._committed = committed
        patience, refusals, deaths, session_lost = LossPatience(self._pool.wait_s), 0, 0, False
        while True:
            try:
                self_started = len(committed) - 1 in self._answers
                round_ = self._dispatch(committed, accepted_node, proposal, lease, traceparent, drafting=drafting)
                answer = self._answers[round_.base_length]
                await on_dispatch(round_)
                return VerifiedRound(round_, await self._verdict(round_, answer), self_started)
            except InvalidInput as error:
                if not self._may_go_without(proposal, error, session_lost=session_lost):
                    raise
                proposal = None
                self._leave_out(len(committed) - 1, error)
            except ReaderTooSlow:
                session_lost = True
                self.close()
                await self.prompt.read()
                patience = LossPatience(self._pool.wait_s)
            except (PeerUnavailable, Overloaded, PrefixMismatch, UnknownSession) as error:
                session_lost = True
                patience.note_loss(self._watch.take_worked_s())
                refusals += isinstance(error, PrefixMismatch | UnknownSession)
                deaths += isinstance(error, PeerUnavailable) and self._awaits_grammar
                self._awaits_grammar = False
                hopeless = self._is_final(error) or refusals > MAX_REFUSALS or deaths > MAX_DEATHS
                if hopeless or patience.left_s <= 0:
                    raise
                metrics.fell_back("target_lost")
                logger.warning(
                    "target session lost, opening it anew: address=%s session=%s base_length=%d error=%s",
                    self._peer and self._peer.link.address, self._id, len(committed) - 1, error.for_log,
                )  # fmt: skip
                self.close()
                await self._pool.wait_to_retry(error, self._retries, patience.left_s, self._fits)

    def close(self) -> None:
        """End the session on its target, and its lease; the next round opens it anew."""
        if self._peer is not None and self._id is not None:
            self._pool.remember(self._peer, self._committed, self._task.tenant)
        self._answers.clear()
        self._detach()

    def on_event(self, event: TargetEvent) -> None:
        """Handle an event that the target sent for this session; any event shows that the session isn't lost."""
        self._watch.note_sign()
        if isinstance(event, TargetOpened):
            self._on_opened(event)
        elif isinstance(event, Failure):
            error = error_of(event)
            if self._peer is not None and isinstance(error, Overloaded | PeerUnavailable):
                self._pool.note_refusal(self._peer, error)
            if event.session_closed:
                self._detach()
            elif isinstance(error, InvalidInput):
                self._refusal = error
            self._fail(error)
        elif isinstance(event, PromptPiece):
            self._note_numeric()
            try:
                self.prompt.take(event, self._vocab_size)
            except (ProtocolMismatch, ReaderTooSlow) as error:
                self._fail(error)
        elif isinstance(event, Features):
            self.features.take(event)
        elif isinstance(event, Verdict) and event.base_length in self._answers:
            self._note_numeric()
            self._on_verdict(event, self._answers[event.base_length])

    def _on_unanswered(self, error: PacelineError) -> None:
        """Leave a target that no longer works for the session; others are asked before it."""
        assert self._peer is not None
        self._pool.note_refusal(self._peer, error)
        self._detach()
        self._fail(error)

    def on_lost(self, error: PacelineError) -> None:
        """Handle the loss of the link, with which the session ended."""
        self._id = None
        self._fail(error)

    def _on_opened(self, event: TargetOpened) -> None:
        self._awaits_grammar = False
        self._retries.note_success()
        if self.cached_prompt_tokens is None:
            self.cached_prompt_tokens = min(event.reused_tokens, len(self._task.prompt))

    def _on_verdict(self, verdict: Verdict, answer: asyncio.Future[Verdict]) -> None:
        if answer.done():
            return  # a repeated round gets its verdict again
        try:
            self.prompt.check_whole(verdict.session_id)
            check_verdict(verdict, self._vocab_size, self._task.sampling.logprobs)
        except ProtocolMismatch as error:
            self._fail(error)
            return
        self.verdict_at = clock.now()
        if verdict.self_started is not None:
            # Verdicts that have come may still be unread: the target doesn't wait for that.
            self._answers = {base: each for base, each in self._answers.items() if base <= verdict.base_length}
            self._answers[verdict.self_started.base_length] = asyncio.get_running_loop().create_future()
        answer.set_result(verdict)

    def _dispatch(
        self,
        committed: Sequence[int],
        accepted_node: int,
        proposal: Proposal | None,
        lease: int,
        traceparent: str,
        *,
        drafting: bool,
    ) -> Round:
        """Send the round, after an opening if there is no session; it does not wait.

        A round that the target may have started already is sent only to extend a lease that ends soon.
        """
        self._prefetched_proposals.clear()
        base_length = len(committed) - 1
        self_started = base_length in self._answers
        fresh = self._id is None and not self_started
        if fresh:
            self._open(committed, traceparent)
        round_ = Round(
            session_id=self._id or 0,
            base_length=base_length,
            accepted_node=ROOT if fresh else accepted_node,
            committed=(committed[-1],),
            proposal=proposal,
            traceparent=traceparent,
            lease=min(lease, self._longest_lease(drafting=drafting)),
            drafting=drafting,
        )
        if not self_started or self._extends(round_):
            self._lease_round = round_
            self._expect(round_)
            assert self._peer is not None
            # A session's first round must not overtake its open.
            self._peer.link.send(round_, urgent=not fresh)
        return round_

    def _extends(self, round_: Round) -> bool:
        """Whether a leased round extends a lease that ends soon; a mixed one ends before another kind begins."""
        latest = self._lease_round
        if self._id is None or latest is None or latest.has_mixed_lease > round_.has_mixed_lease:
            return False
        positions_ahead = latest.first_position + latest.lease - round_.first_position
        return positions_ahead <= round_.lease // 2 < round_.lease

    def _longest_lease(self, *, drafting: bool) -> int:
        """The longest lease that the target takes; a mixed one if a draft works."""
        welcome = self._welcome
        return welcome.max_lease if welcome and (welcome.mixed_leases or not drafting) else 0

    @property
    def _welcome(self) -> Welcome | None:
        return self._peer.link.welcome if self._peer else None

    @property
    def _vocab_size(self) -> int:
        """The number of token ids that the target can draw: it may have fewer logits than the tokenizer has ids."""
        logits_size = self._welcome.fingerprint.vocab_size if self._welcome else 0
        return min(logits_size or self._pool.vocab_size, self._pool.vocab_size)

    def _fits(self, peer: TargetPeer) -> bool:
        """Whether a target's logits are bit-identical to those of earlier verdicts, and it can report the prompt."""
        welcome = peer.link.welcome
        same = self._numeric is None or (welcome is not None and welcome.fingerprint.numeric == self._numeric)
        return same and self.prompt.fits(welcome)

    def _note_numeric(self) -> None:
        if self._numeric is None and self._welcome is not None:
            self._numeric = self._welcome.fingerprint.numeric

    def _expect(self, round_: Round) -> None:
        """Expect verdicts for the round and for those that it leases, which verdicts name under a mixed lease."""
        loop = asyncio.get_running_loop()
        lease = 0 if round_.has_mixed_lease else round_.lease
        for base_length in range(round_.base_length, round_.base_length + lease + 1):
            if base_length not in self._answers:
                self._answers[base_length] = loop.create_future()

    def _open(self, committed: Sequence[int], traceparent: str) -> None:
        """Place and open the session; `close` detaches it even if the opening can't be sent."""
        peer = self._pool.place(committed, self._fits, self._task.tenant)
        if peer is None:
            raise self._pool.why_none(self._fits)
        self._peer = peer
        self._id = peer.attach(self)
        features = self.features.request(peer.link.welcome, len(committed))
        opening = TargetOpen(self._id, self._task.spec(committed, traceparent), features=features)
        peer.link.send(self.prompt.extend(opening), urgent=False)
        self._awaits_grammar = self._task.sampling.grammar is not None

    async def _verdict(self, round_: Round, answer: asyncio.Future[Verdict]) -> Verdict:
        """Wait for the answer as long as the target works on it."""
        assert self._peer is not None
        self._watch.begin(self._peer.link, round_)
        try:
            return await answer
        finally:
            self._answers.pop(round_.base_length, None)
            self._watch.end()

    def _may_go_without(self, proposal: Proposal | None, error: InvalidInput, *, session_lost: bool) -> bool:
        """Whether the round may be sent again without its proposal and prefetched ones.

        Except under coupled acceptance this changes draws, so no verdict may have been drawn for the round. After the
        loss of a session one may have been.
        """
        coupled = self._task.acceptance is Acceptance.COUPLED
        has_proposals = proposal is not None or bool(self._prefetched_proposals)
        return error is self._refusal and has_proposals and (coupled or not session_lost)

    def _leave_out(self, base_length: int, error: InvalidInput) -> None:
        """End the session, since the target may still verify the round for which something was prefetched."""
        metrics.fell_back("proposal_refused")
        logger.warning(
            "target refused a proposal, the round goes without: session=%s base_length=%d error=%s",
            self._id, base_length, error.for_log,
        )  # fmt: skip
        self.close()
        self._no_prefetch_at = base_length
        self.on_refused(error)

    def _is_final(self, error: PacelineError) -> bool:
        """Whether a request without tokens is refused for good, since no target has room."""
        return isinstance(error, Overloaded) and self._numeric is None and not self._pool.is_willing(self._fits)

    def _detach(self) -> None:
        if self._id is not None and self._peer is not None:
            self._peer.detach(self._id)
            self._id = None

    def _fail(self, error: PacelineError) -> None:
        """Fail the round in flight and end the lease. Verdicts that have come stay, so nothing is redrawn."""
        for base_length, answer in [*self._answers.items()]:
            if not answer.done():
                answer.set_exception(error)
                # Retrieved here so that a session closed before its answer is read stays quiet.
                answer.exception()
                del self._answers[base_length]
