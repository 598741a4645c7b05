"""Proposed tokens, drawn again: under rejection and block acceptance a round carries what q and the noise give.

A token that its q does not give is a mistake of the draft (a q of another row, temperature or position, other
noise). The redrawn token takes its place. Then every token of the round was drawn from the q beside it, so the
text has the target's distribution from the first mistake on. To drop the proposal instead would be biased: the
rounds that keep theirs would be those in which two draws agreed (`exactness` §1d).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.protocol.draft import DraftedProposal
from paceline.protocol.proposal import Outcome, Proposal
from paceline.protocol.records import StepTimings
from paceline.protocol.sampling import NoiseKey
from paceline.sampling.drafted import redraw

MAX_MISTAKES = 2
"""Of a draft, before a request does without it.

Behind the first one its session is opened anew and computes everything again. So a second one comes from the
drafter itself, and all others would.
"""


@dataclass(frozen=True)
class Mistake:
    """The first token of a proposal that its q does not give; `drawn` is the one that it gives."""

    drafter: str
    base_length: int
    node: int
    token_id: int
    drawn: int

    def __str__(self) -> str:
        return (
            f"drafter={self.drafter} round={self.base_length} node={self.node} token={self.token_id}: "
            f"the q that it sent draws {self.drawn} there, and that token was verified instead"
        )


@dataclass(frozen=True)
class Redrawn:
    """A proposal as a round may carry it."""

    proposal: Proposal
    timings: StepTimings
    mistake: Mistake | None = None


def as_sent(drafted: DraftedProposal) -> Redrawn:
    """For coupled acceptance, where no rule looks at q."""
    return Redrawn(drafted.proposal, drafted.timings)


def redrawn(drafted: DraftedProposal, base_length: int, noise: NoiseKey, before: Redrawn | None = None) -> Redrawn:
    """Draw a chain's tokens again.

    Args:
        drafted: what came; a proposal without supports stays as it is, and is refused elsewhere.
        base_length: of the round that will carry it.
        noise: the draft's key.
        before: what came earlier under the same outcome; nodes that it begins with are not drawn again.

    Raises:
        InvalidInput: positions beyond 32 bits.
    """
    proposal = drafted.proposal
    tokens = [*_drawn_before(before, proposal)]
    for node in range(len(tokens), len(proposal.supports)):
        position = base_length + 1 + node
        tokens.append(redraw(proposal.supports[node], proposal.token_ids[node], noise, position, base_length))
    wrong = [node for node, token in enumerate(tokens) if token != proposal.token_ids[node]]
    if not wrong:
        return as_sent(drafted)
    q = tuple(support.probability(token) for support, token in zip(proposal.supports, tokens, strict=True))
    found = replace(proposal, token_ids=tuple(tokens), draft_probabilities=q)
    first = wrong[0]
    mistake = Mistake(proposal.drafter, base_length, first, proposal.token_ids[first], tokens[first])
    return Redrawn(found, drafted.timings, mistake)


def base_behind(outcome: Outcome) -> int:
    """Base length of the round behind an outcome, where rounds carry chains: node i accepts i + 1 tokens."""
    return outcome.base_length + outcome.node + 2


def _drawn_before(before: Redrawn | None, proposal: Proposal) -> tuple[int, ...]:
    known = before.proposal if before is not None else None
    if known is None or known.supports != proposal.supports[: len(known.supports)]:
        return ()
    return known.token_ids
