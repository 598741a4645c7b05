"""One request of a server that is not Paceline's, and the session that drafts for it.

The server's thread reads (`begin_round`, `propose`); everything else belongs to the client's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.drafting.draft_pool import DraftPool
from paceline.drafting.round_draft import PendingCommit
from paceline.drafting.session import DraftSession
from paceline.protocol.draft import DraftBudget
from paceline.protocol.generation import Provenance
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.records import RoundRecord
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import Round
from paceline.runtime import metrics, telemetry
from paceline.sampling.tree import child_with_token

NO_NOISE = NoiseKey(0)
"""Nothing is drawn."""
NO_DRAFT = DraftBudget()
"""Of commits: the server doesn't wait for a draft that is made just in time."""


@dataclass(frozen=True)
class GreedyRequest:
    """What the draft is told: its own most probable tokens.

    They are the best proposals for a server that accepts a drafted token with the probability that the target gives
    it, at any temperature.
    """

    prompt_length: int
    max_length: int
    noise: NoiseKey = NO_NOISE
    acceptance: Acceptance = Acceptance.COUPLED
    tenant: str = ""

    def spec(self, committed: Iterable[int], traceparent: str) -> SessionSpec:
        """The specification of a session that goes on behind the committed tokens."""
        return SessionSpec(
            token_ids=tuple(committed),
            prompt_length=self.prompt_length,
            sampling=SamplingParams(temperature=0.0),
            noise=self.noise,
            acceptance=self.acceptance,
            traceparent=traceparent,
            max_length=self.max_length,
        )


@dataclass(frozen=True)
class RoundEnd:
    """How a round of the server ended, and what it verifies next.

    Attributes:
        outcome: of the round.
        token_ids: that it committed.
        is_ours: whether it verified what was proposed. If not, the draft has to begin anew.
        proposal: for the next round; None: none.
        offers: whether the draft is to work for the next round.
        record: of the round; None: the request has had no step before.
        ended_at: on `clock.now`.
    """

    outcome: Outcome
    token_ids: tuple[int, ...]
    is_ours: bool
    proposal: Proposal | None
    offers: bool
    record: RoundRecord | None
    ended_at: float


class ServedRequest:
    """A request's tokens as the server and as the draft know them.

    Attributes:
        length: tokens that the server has committed, the prompt's included.
        proposal: what the server verifies now.
        drafts_ahead: whether the draft works for the server's present round.
    """

    def __init__(
        self, pool: DraftPool, request: GreedyRequest, drafter: str, budget: DraftBudget, tokens: Sequence[int]
    ) -> None:
        self.length = len(tokens)
        self.proposal: Proposal | None = None
        self.drafts_ahead = False
        self._max_length = request.max_length
        self.session = DraftSession(pool, request, drafter)
        self._budget = budget
        self._ids = [*tokens]
        self._pending: PendingCommit | None = None
        self._is_awaited = False
        self._trace = telemetry.start_request("text_completion", {})
        self._round_trace = self._trace.start_round()

    def begin_round(self, token_ids: Sequence[int]) -> tuple[Outcome, bool]:
        """The outcome of the round that committed these tokens, and whether it verified what was proposed."""
        node: int | None = ROOT
        for token in token_ids[:-1]:
            node = None if self.proposal is None or node is None else child_with_token(self.proposal, node, token)
        outcome = Outcome(self.length - 1, len(token_ids) - 2 if node is None else node, token_ids[-1])
        self.length += len(token_ids)
        return outcome, node is not None

    def propose(self, outcome: Outcome) -> Proposal | None:
        """What was drafted for an outcome, as far as the request has room for it; None: nothing."""
        proposal = self.session.peek(outcome) if self.drafts_ahead else None
        if proposal is None or not (proposal.is_chain or self._budget.max_nodes):
            return None
        depth = max(0, min(self._budget.max_tokens, self._max_length - self.length - 1))
        proposal = proposal.first(self._budget.max_nodes or depth).within(depth)
        return proposal if len(proposal) else None

    def is_due(self, outcome: Outcome) -> bool:
        """Whether the draft works for the round that has just ended and nothing of that has come yet."""
        return self.drafts_ahead and self.session.is_open and not self.session.has_prepared(outcome.base_length)

    def open(self) -> None:
        """Open the session with the tokens so far; the draft begins with what follows the server's present round."""
        self.session.open(self._ids, NO_DRAFT, self._round_trace.traceparent)
        self._announce(None)

    def follow(self, end: RoundEnd) -> None:
        """Tell the draft how a round ended, and what the server verifies now.

        While nothing is offered commits are sent together, and a session that would lag too far behind ends.
        """
        session, is_awaited, self._is_awaited = self.session, self._is_awaited, False
        self._ids += end.token_ids
        self._trace_round(end)
        if not end.is_ours:
            session.close()
        session.settle(end.outcome)
        pending = PendingCommit(
            end.outcome, end.token_ids, self._ids, NO_DRAFT, self._round_trace.traceparent, is_awaited
        ).join_to(self._pending)
        self._pending = None
        if end.offers or (is_awaited and session.is_open):
            session.commit(pending)
        elif pending.must_leave:
            session.close()
        else:
            self._pending = pending
        if end.offers:
            self._announce(end.proposal)

    def pause(self) -> None:
        """Leave the draft service for now; the next offer opens a session anew."""
        self.session.close()
        self._is_awaited = False

    def end(self) -> None:
        """End the session, and the request's span."""
        self.session.close()
        self._trace.end()

    def _announce(self, proposal: Proposal | None) -> None:
        self._is_awaited = True
        round_ = Round(0, len(self._ids) - 1, ROOT, (self._ids[-1],), proposal)
        self.session.verifying(round_, self._budget)

    def _trace_round(self, end: RoundEnd) -> None:
        if end.record is not None:
            accepted = end.record.accepted
            last = Provenance.TARGET if not end.record.proposed else _last_of(end.record)
            metrics.round_done(end.record, (*(Provenance.ACCEPTED,) * accepted, last))
            self._round_trace.finish(end.record, end.ended_at)
        self._round_trace = self._trace.start_round()


def _last_of(record: RoundRecord) -> Provenance:
    return Provenance.BONUS if record.accepted == record.proposed else Provenance.RECOVERED
