"""Redrawing of proposed tokens: under rejection and block acceptance a round carries what q and the noise give.

A proposed token that its q does not give is a mistake of the draft: a q of another row, temperature or position, or
other noise. The redrawn token takes its place. So every token of a round was drawn from its own q, and the text has
the target's distribution from the first mistake on. To drop the proposal instead would be biased: the rounds that
keep theirs would be those in which two draws agreed (`exactness` §1d).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.protocol.draft import DraftedProposal
from paceline.protocol.proposal import Outcome, Proposal
from paceline.protocol.records import StepTimings
from paceline.protocol.sampling import NoiseKey
from paceline.sampling.drafted import redraw

MAX_MISTAKES = 2
"""Mistakes of a draft after which a request does without it.

After the first mistake the session is opened anew and computes everything again. So a second one comes from the
drafter itself, and more would follow.
"""


@dataclass(frozen=True)
class Mistake:
    """The first token of a proposal that its q does not give; `drawn_token` is the one that it gives."""

    drafter: str
    base_length: int
    node: int
    token_id: int
    drawn_token: int

    def __str__(self) -> str:
        return (
            f"drafter={self.drafter} round={self.base_length} node={self.node} token={self.token_id}: "
            f"the q that it sent draws {self.drawn_token} there, and that token was verified instead"
        )


@dataclass(frozen=True)
class RedrawnProposal:
    """A proposal whose tokens were drawn again, as a round may carry it."""

    proposal: Proposal
    timings: StepTimings
    mistake: Mistake | None = None


def as_sent(drafted: DraftedProposal) -> RedrawnProposal:
    """A proposal as it came, for coupled acceptance, where no rule looks at q."""
    return RedrawnProposal(drafted.proposal, drafted.timings)


def redraw_proposal(
    drafted: DraftedProposal, base_length: int, noise: NoiseKey, earlier: RedrawnProposal | None = None
) -> RedrawnProposal:
    """Draw a chain's tokens again.

    Args:
        drafted: the proposal that came; one without supports stays as it is, and is refused elsewhere.
        base_length: of the round that will carry it.
        noise: the draft's key.
        earlier: an earlier one for the same outcome; nodes that both begin with are not drawn again.

    Raises:
        InvalidInput: positions beyond 32 bits.
    """
    proposal = drafted.proposal
    tokens = [*_common_tokens(earlier, proposal)]
    for node in range(len(tokens), len(proposal.supports)):
        position = base_length + 1 + node
        tokens.append(redraw(proposal.supports[node], proposal.token_ids[node], noise, position, base_length))
    wrong = [node for node, token in enumerate(tokens) if token != proposal.token_ids[node]]
    if not wrong:
        return as_sent(drafted)
    q = tuple(support.probability(token) for support, token in zip(proposal.supports, tokens, strict=True))
    first = wrong[0]
    mistake = Mistake(proposal.drafter, base_length, first, proposal.token_ids[first], tokens[first])
    return RedrawnProposal(
        replace(proposal, token_ids=tuple(tokens), draft_probabilities=q), drafted.timings, mistake
    )


def base_behind(outcome: Outcome) -> int:
    """Base length of the round after an outcome, where rounds carry chains: node i accepts i + 1 tokens."""
    return outcome.base_length + outcome.node + 2


def _common_tokens(earlier: RedrawnProposal | None, proposal: Proposal) -> tuple[int, ...]:
    prefix = earlier.proposal if earlier is not None else None
    if prefix is None or prefix.supports != proposal.supports[: len(prefix.supports)]:
        return ()
    return prefix.token_ids
