"""One session on the draft service, and the checks of what arrives. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from draft_service.drafters.interface import AnyDrafter, Drafting, DraftingContext
from paceline.errors import PrefixMismatch
from paceline.rpc.sessions import SessionOwner
from paceline.types import (
    ROOT,
    Commit,
    DraftBudget,
    DraftOpen,
    Outcome,
    Proposal,
    StepTimings,
    Verifying,
    require,
)


@dataclass(eq=False)
class DraftSession:
    """A session's state; changed on the event loop only. `key` is its number in its drafter.

    `verifying` is what left for the target since the last commit: the outcome
    that the next commit brings must be one of its outcomes.
    """

    key: int
    owner: SessionOwner
    facts: DraftOpen
    drafter: AnyDrafter
    vocab_size: int
    committed_length: int
    closed: bool = False
    proposals: int = 0
    verifying: Verifying | None = None

    @property
    def id(self) -> int:
        """The session's number on its link."""
        return self.facts.session_id

    @property
    def context(self) -> DraftingContext:
        """What the session's draws depend on."""
        facts = self.facts
        return DraftingContext(facts.sampling, facts.noise, facts.acceptance, facts.max_length)

    def next_proposal_id(self) -> int:
        """Unique within the session, from 1."""
        self.proposals += 1
        return self.proposals

    def accept(self, commit: Commit) -> None:
        """Take new committed tokens in; a refused commit changes nothing.

        Raises:
            PrefixMismatch: they don't follow what the session holds.
            InvalidInput: a token is outside the vocabulary.
        """
        self._expect("committed_length", self.committed_length, commit.committed_length)
        require(len(commit.token_ids) >= 1, "commit token_ids", len(commit.token_ids), "at least 1")
        check_ids("commit token_ids", commit.token_ids, self.vocab_size)
        self._expect("outcome.next_token", commit.token_ids[-1], commit.outcome.next_token)
        if self.verifying is not None:
            self._expect("outcome.base_length", self.verifying.base_length, commit.outcome.base_length)
            nodes = _nodes(self.verifying)
            if not ROOT <= commit.outcome.node < nodes:
                self._expect("outcome.node", f"in [-1, {nodes - 1}]", commit.outcome.node)
        self.committed_length += len(commit.token_ids)
        self.verifying = None

    def note(self, verifying: Verifying) -> None:
        """Record what left for the target.

        Raises:
            PrefixMismatch: the round doesn't verify what follows the committed tokens.
            InvalidInput: it names a proposal that was never made, or a token outside the vocabulary.
        """
        self._expect("base_length", self.committed_length - 1, verifying.base_length)
        made = verifying.proposal_id <= self.proposals
        require(made, "proposal_id", verifying.proposal_id, f"at most {self.proposals}, the last one made")
        if verifying.proposal is not None:
            check_ids("proposal token_ids", verifying.proposal.token_ids, self.vocab_size)
        self.verifying = verifying

    def _expect(self, name: str, expected: object, got: object) -> None:
        if expected != got:
            raise PrefixMismatch(
                f"session {self.id} {name}: expected {expected}, got {got}",
                metadata={"field": name, "expected": str(expected), "got": str(got)},
            )


@dataclass(eq=False)
class DraftTask:
    """A proposal that a session waits for; the executor's thread drafts it, the event loop sends it.

    `outcome` is what it answers (None: the open). Times are on the monotonic
    clock, seconds.
    """

    session: DraftSession
    outcome: Outcome | None
    budget: DraftBudget
    proposal_id: int
    arrived: float
    traceparent: str
    drafting: Drafting | None = None
    begun: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    rows: int = 0
    batch: int = field(default=1)

    @property
    def deadline(self) -> float | None:
        """When the proposal is of no more use."""
        if self.budget.deadline_ms is None:
            return None
        return self.arrived + self.budget.deadline_ms / 1e3

    def timings(self, now: float) -> StepTimings:
        """Where the time went; the drafter's own steps, their draws included, are `forward_ms`."""
        return StepTimings(
            queue_ms=(self.begun - self.arrived) * 1e3,
            forward_ms=self.forward_ms,
            sample_ms=self.sample_ms,
            service_ms=(now - self.arrived) * 1e3,
            rows=self.rows,
            sessions=self.batch,
        )


@dataclass(frozen=True)
class Drafted:
    """A task's proposal, done or as far as it got by its deadline."""

    task: DraftTask
    proposal: Proposal


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary; 0: any vocabulary will do."""
    for token_id in ids:
        require(token_id >= 0, name, token_id, "at least 0")
        require(not vocab_size or token_id < vocab_size, name, token_id, f"in [0, {vocab_size}), the vocabulary")


def _nodes(verifying: Verifying) -> int:
    return len(verifying.proposal) if verifying.proposal is not None else verifying.node_count
