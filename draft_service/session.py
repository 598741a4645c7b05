"""One session on the draft service, and the checks of its commands. Pure."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from draft_service.drafters.interface import AnyDrafter, CatchingUp, Draft, PreparedProposal, Speculating
from paceline.grammars.sessions import BlockingFollower, GrammarSession
from paceline.protocol.draft import Commit, DraftBudget, Verifying
from paceline.protocol.errors import PacelineError, require, require_ids
from paceline.protocol.features import Features
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.records import StepTimings
from paceline.rpc.sessions import ServedSession
from paceline.runtime import clock
from paceline.sampling.processors import Follower

logger = logging.getLogger(__name__)

GRAMMAR_PATIENCE_S = 0.1
"""Longest wait of a step for the tokens that a grammar allows; other sessions' proposals wait with it."""


@dataclass(eq=False)
class DraftingSession(ServedSession):
    """A session's state, changed on the event loop only. `key` is its number in its drafter.

    `verifying` is the round that left for the target since the last commit; the
    next commit must be one of its outcomes. `offer` is the proposal sent after the
    committed tokens, the only one that a round can name. `proposals` are those sent
    for the outcomes of the round. `takes_shadows`: its coordinator knows `Shadow`.
    `grammar` follows the session's grammar; None: it has none, or grammars are not
    followed here.
    """

    drafter: AnyDrafter
    vocab_size: int
    committed_length: int
    takes_shadows: bool = False
    verifying: Verifying | None = None
    offer: Proposal | None = None
    proposals: dict[Outcome, Proposal] = field(default_factory=dict)
    last_id: int = 0
    grammar: GrammarSession | None = None
    features_end: int = 0
    """The position after the last one whose features came."""
    features_late: bool = False
    """Whether the last wait for features was in vain and none have come since."""
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Proposal ids; taken on both threads."""

    @property
    def awaits_grammar(self) -> bool:
        """Whether its grammar is still being compiled. Until it is, the drafter's session is not opened."""
        return self.grammar is not None and not self.closed and not self.grammar.compilation.done()

    def follower(self) -> Follower | None:
        """The follower of its compiled grammar; None: it has no grammar, or none that can be followed here."""
        if self.grammar is None:
            return None
        error = self.grammar.compilation.exception()
        if error is not None:
            why = error.for_log if isinstance(error, PacelineError) else type(error).__name__
            logger.info("drafting without the grammar: session=%d error=%s", self.id, why)
            return None
        return BlockingFollower(self.grammar, GRAMMAR_PATIENCE_S)

    def next_proposal_id(self) -> int:
        """A new proposal id, unique within the session, from 1."""
        return next(self.ids)

    def note_proposal(self, outcome: Outcome | None, proposal: Proposal) -> None:
        """Note a proposal that was sent, for the committed tokens or for an outcome of the round."""
        self.last_id = max(self.last_id, proposal.proposal_id)
        if self.verifying is None:
            self.offer = proposal
        elif outcome is not None:
            self.proposals[outcome] = proposal

    def accept(self, commit: Commit) -> None:
        """Append committed tokens; a refused commit changes nothing.

        Raises:
            PrefixMismatch: they don't follow the session's tokens.
            InvalidInput: a token is outside the vocabulary.
        """
        self._expect("committed_length", self.committed_length, commit.committed_length)
        require(len(commit.token_ids) >= 1, "commit token_ids", len(commit.token_ids), "at least 1")
        require_ids("commit token_ids", commit.token_ids, self.vocab_size)
        self._expect("outcome.next_token", commit.token_ids[-1], commit.outcome.next_token)
        if self.verifying is not None:
            self._expect("outcome.base_length", self.verifying.base_length, commit.outcome.base_length)
            nodes = _nodes(self.verifying)
            if not ROOT <= commit.outcome.node < nodes:
                self._expect("outcome.node", f"in [-1, {nodes - 1}]", commit.outcome.node)
        self.committed_length += len(commit.token_ids)
        self.verifying = None
        self.offer = self.proposals.get(commit.outcome)
        self.proposals = {}

    @property
    def lacks_features(self) -> bool:
        """Whether its drafter reads features that have not come; those of the last token can't have come."""
        return self.drafter.manifest.need.any and self.features_end < self.committed_length - 1

    def accept_features(self, features: Features) -> Iterator[Features]:
        """Note that features have come, and return those of committed tokens.

        Raises:
            InvalidInput: the drafter reads none, or other layers.
        """
        need, layers = self.drafter.manifest.need, features.shape[1]
        require(need.any, "features", f"of {layers} layers", f"none: {self.drafter.manifest.name} reads none")
        require(layers == len(need.layers), "features layers", layers, f"{len(need.layers)}, those of {need.layers}")
        self.features_end = max(self.features_end, min(features.end, self.committed_length))
        self.features_late = False
        return features.within(0, self.committed_length)

    def note(self, verifying: Verifying) -> None:
        """Note the round that left for the target.

        Raises:
            PrefixMismatch: the round doesn't follow the committed tokens.
            InvalidInput: it names a proposal that was never sent, more nodes than it had, or a token
                outside the vocabulary.
        """
        self._expect("base_length", self.committed_length - 1, verifying.base_length)
        was_sent = verifying.proposal_id <= self.last_id
        require(was_sent, "proposal_id", verifying.proposal_id, f"at most {self.last_id}, the last one sent")
        if verifying.proposal_id:
            offer_id, nodes = (self.offer.proposal_id, len(self.offer)) if self.offer is not None else (0, 0)
            self._expect("proposal_id", offer_id, verifying.proposal_id)
            require(
                verifying.node_count <= nodes, "node_count", verifying.node_count, f"at most {nodes}, the nodes sent"
            )
        if verifying.proposal is not None:
            require_ids("proposal token_ids", verifying.proposal.token_ids, self.vocab_size)
            fits = verifying.proposal.is_chain or self.facts.acceptance is Acceptance.COUPLED
            require(fits, "proposal parents", verifying.proposal.parents, "a chain unless acceptance is coupled")
        self.verifying = verifying
        self.proposals = {}


@dataclass(eq=False)
class DraftTask:
    """A proposal that a session waits for; the executor's thread drafts it, the event loop sends it.

    `outcome` is that of the commit which asked for it; None: the opening asked.
    Times are on the monotonic clock, seconds.
    """

    session: DraftingSession
    outcome: Outcome | None
    budget: DraftBudget
    proposal_id: int
    arrived_at: float
    traceparent: str
    draft: Draft | None = None
    started_at: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    rows: int = 0
    batch: int = field(default=1)

    def begin(self) -> None:
        """Start to draft."""
        self.started_at = clock.now()
        self.draft = self.session.drafter.begin(self.session.key, self.budget, self.proposal_id)

    @property
    def deadline(self) -> float | None:
        """When the proposal is of no use any more; None: never."""
        if self.budget.deadline_ms is None:
            return None
        return self.arrived_at + self.budget.deadline_ms / 1e3

    def timings(self, now: float) -> StepTimings:
        """The proposal's timings; `forward_ms` is that of the drafter's steps with their draws."""
        return StepTimings(
            queue_ms=(self.started_at - self.arrived_at) * 1e3,
            forward_ms=self.forward_ms,
            sample_ms=self.sample_ms,
            service_ms=(now - self.arrived_at) * 1e3,
            rows=self.rows,
            sessions=self.batch,
        )


@dataclass(eq=False)
class SpeculationTask:
    """A round for whose outcomes a session prepares; `timings` are those of the last step.

    `speculating` is None before the task has started, and where the drafter prepares nothing.
    """

    session: DraftingSession
    verifying: Verifying
    speculating: Speculating | None = None
    is_started: bool = False
    timings: StepTimings = field(default_factory=StepTimings)

    def begin(self) -> None:
        """Start to prepare."""
        self.is_started = True
        drafter, next_id = self.session.drafter, self.session.next_proposal_id
        self.speculating = drafter.speculate(self.session.key, self.verifying, next_id)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compute."""
        return self.is_started and (self.speculating is None or self.speculating.done)


@dataclass(eq=False)
class CatchUpTask:
    """A session whose rows are kept current for their shadow, while nobody waits for a proposal."""

    session: DraftingSession
    catching_up: CatchingUp | None = None
    is_started: bool = False

    def begin(self) -> None:
        """Start to compute."""
        self.is_started = True
        self.catching_up = self.session.drafter.catch_up(self.session.key)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compute."""
        return self.is_started and (self.catching_up is None or self.catching_up.done)


@dataclass(frozen=True)
class SpeculationGrowth:
    """The proposals of a speculation that a step has extended, and the step's timings."""

    task: SpeculationTask
    proposals: list[PreparedProposal]
    timings: StepTimings


def _nodes(verifying: Verifying) -> int:
    return len(verifying.proposal) if verifying.proposal is not None else verifying.node_count
