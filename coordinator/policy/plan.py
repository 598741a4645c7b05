"""The plan of a round, and the options that it is chosen from. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.costs.goodput import Mode
from paceline.protocol.draft import DraftBudget
from paceline.protocol.proposal import Proposal
from paceline.sampling.match import Match


class Source(StrEnum):
    """Where a round's proposal comes from."""

    NONE = "none"
    NGRAM = "ngram"
    """The coordinator's own n-gram match."""
    CACHED = "cached"
    """Drafted for this outcome before it was known."""
    WAIT = "wait"
    """Drafted just in time: the round waits for it."""


@dataclass(frozen=True)
class Plan:
    """The plan of the next round: the source and size of its proposal, and how far to draft for its outcomes.

    Attributes:
        nodes: most nodes of the proposal; of a match or a cached proposal: the first ones.
        depth: longest path of a proposal that is drafted just in time; fewer than `nodes` makes a tree.
        least_chance: a proposal drafted just in time ends before the first node that is reached more rarely.
        patience_ms: how long the round may wait for its proposal.
        ahead: what to draft for the round's outcomes meanwhile; with a fan-out of 0 nothing.
        lease: rounds after this one that the target may start by itself.
        shadow: whether the draft is asked for the shadow of committed tokens, though it proposed none of them.
        mode: what the group let it do, None: it follows none. In `REST` and `MATCHES` the draft hears of no commit.
        value: tokens that its proposal brings beyond what it costs.
        reads: whether the draft is at work for the request, but has yet to read the text.
    """

    source: Source = Source.NONE
    nodes: int = 0
    depth: int = 0
    least_chance: float = 0.0
    patience_ms: float = float("inf")
    ahead: DraftBudget = field(default_factory=DraftBudget)
    lease: int = 0
    shadow: bool = False
    mode: Mode | None = None
    value: float = -math.inf
    reads: bool = False


@dataclass(frozen=True)
class Options:
    """The options of the next round.

    Attributes:
        room: most tokens that a proposal may have.
        match: the coordinator's own n-gram match.
        cached_proposal: the proposal that was drafted for this outcome before it was known.
        drafts: whether a draft service could be asked, and would not have to catch up first.
        lag: tokens that the draft service must compute before it can draft, or may still be computing.
        open_ms: how long it has been computing them.
        fan_out: most next tokens per accepted node that outcome drafting may prepare; 0: it is off.
        trees: whether proposals may be trees.
        leased_rounds: rounds, this one included, that the target may have started: they are target-only in any case.
        lease: most rounds after this one that the target may start.
        self_started: whether the target has started the round, so that only outcome drafting is to be chosen.
        can_prefetch: whether proposals may be prefetched for the rounds of a lease, which then misses no match.
    """

    room: int
    match: Match | None = None
    cached_proposal: Proposal | None = None
    drafts: bool = False
    lag: int = 0
    open_ms: float = 0.0
    fan_out: int = 0
    trees: bool = False
    leased_rounds: int = 0
    lease: int = 0
    self_started: bool = False
    can_prefetch: bool = False
