"""What a simulated round is, and what a request adds up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.policy.plan import Source
from paceline.protocol.proposal import ROOT
from paceline_lab.simulate.trees import NO_TREE, ProposedTree


@dataclass(slots=True)
class RoundAtTarget:
    """A round as the target has it, and what became of it."""

    position: int
    source: Source
    tree: ProposedTree = NO_TREE
    lease: int = 0
    sent: float = 0.0
    self_started: bool = False
    fan_out: int = 0
    accepted: int = 0
    committed: int = 0
    begun: float = 0.0
    queue_ms: float = 0.0
    step_ms: float = 0.0
    rows: int = 0
    sessions: int = 0
    life: int = 0
    """Which of the request's sessions on targets it is of."""
    next: RoundAtTarget | None = None
    """What the target has started behind it."""
    depth: int = field(init=False)
    nodes: int = field(init=False)
    """Of the tree."""

    def __post_init__(self) -> None:
        self.depth, self.nodes = self.tree.depth, len(self.tree)

    def last_accepted(self, ranks: Sequence[int], right: Sequence[int]) -> tuple[int, int]:
        """The last accepted node, `ROOT`: none; and how many are: by the ranks, or what is right of the matches."""
        if self.source is Source.NGRAM:
            accepted = min(self.depth, right[self.position])
            return accepted - 1, accepted
        node = self.tree.accepted(ranks, self.position)
        return node, 0 if node == ROOT else self.tree.depths[node]


@dataclass(slots=True)
class RequestTotals:
    """What a request did; milliseconds of the virtual clock. Rounds behind the first are those that are timed."""

    arrival_ms: float
    first_ms: float = 0.0
    first_tokens: int = 0
    end_ms: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted_rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    hits: int = 0
    self_started: int = 0
    waited_ms: float = 0.0
    group: int = 0
    reopened: int = 0
    refused: bool = False
    limited: bool = False
    queue_ms: float = 0.0
    step_ms: float = 0.0
    first_queue_ms: float = 0.0

    def count(self, round_: RoundAtTarget, now: float, decided: float) -> None:
        """A round's verdict is dealt with; `decided`: when the one before was."""
        if not self.rounds:
            self.first_ms, self.first_tokens = now, round_.committed
            self.first_queue_ms = round_.queue_ms
        else:
            self.queue_ms += round_.queue_ms
            self.step_ms += round_.step_ms
            if not round_.self_started and round_.sent > decided:
                self.waited_ms += round_.sent - decided
        self.rounds += 1
        self.tokens += round_.committed
        self.self_started += round_.self_started
        if round_.depth:
            self.drafted_rounds += 1
            self.proposed += round_.depth
            self.accepted += round_.accepted
            self.hits += round_.source is Source.CACHED

    @property
    def has_ended(self) -> bool:
        """Or was refused."""
        return self.refused or self.end_ms > 0

    @property
    def ms_per_token(self) -> float:
        """Behind the first round."""
        return (self.end_ms - self.first_ms) / max(1, self.tokens - self.first_tokens)
