"""The draft service's side of the model: commits, announced rounds, proposals for outcomes, and their numbers."""

from __future__ import annotations

from typing import NamedTuple

from tests.interleaving.modelled_target import ROOT, End, Refused, Text, require_equal, truth


class Announced(NamedTuple):
    """A round that left for the target: its proposal by number, or by its tokens. `ahead`: draft for its outcomes."""

    base: int
    number: int = 0
    nodes: int = 0
    proposal: Text = ()
    ahead: bool = False


class Told(NamedTuple):
    """Committed tokens, the last ones behind `known`; `wants` a proposal now."""

    end: End
    tokens: Text
    known: int
    wants: bool


class SentProposal(NamedTuple):
    """A proposal for an outcome; None: for the open."""

    end: End | None
    number: int
    proposal: Text


class AtDraft(NamedTuple):
    """A session: its text, the announced round, what was offered under which number, and what it is at work on."""

    text: Text
    wants: bool = False
    asked_by: End | None = None
    announced: Announced | None = None
    verified: Text = ()
    offer: tuple[int, Text] = (0, ())
    prepared: tuple[tuple[End, int, Text], ...] = ()
    left: tuple[End, ...] = ()
    last: int = 0


class DraftModel:
    """What a draft service does with a message, and in a step."""

    def __init__(self, length: int) -> None:
        self.length = length

    def take_commit(self, held: AtDraft, told: Told) -> AtDraft:
        """Committed tokens come."""
        require_equal("committed length", len(held.text), told.known)
        require_equal("next token", told.tokens[-1], told.end.token)
        if held.announced is not None:
            require_equal("outcome's base", held.announced.base, told.end.base)
            if told.end.node >= len(held.verified):
                raise Refused(f"outcome's node {told.end.node}: expected at most {len(held.verified) - 1}")
        offer = next(((number, text) for end, number, text in held.prepared if end == told.end), (0, ()))
        return AtDraft(
            text=(*held.text, *told.tokens),
            wants=told.wants and not offer[0],
            asked_by=told.end,
            offer=offer,
            last=held.last,
        )

    def take_announced(self, held: AtDraft, announced: Announced) -> AtDraft:
        """A round has left for the target."""
        if announced == held.announced:
            return held
        require_equal("announced base", len(held.text) - 1, announced.base)
        if announced.number > held.last:
            raise Refused(f"proposal {announced.number}: at most {held.last} was sent")
        verified = announced.proposal
        if announced.number:
            require_equal("announced proposal", held.offer[0], announced.number)
            verified = held.offer[1][: announced.nodes]
            require_equal("announced nodes", len(verified), announced.nodes)
        left = self.outcomes(held.text, verified) if announced.ahead else ()
        return held._replace(announced=announced, verified=verified, wants=False, prepared=(), left=left)

    def is_busy(self, held: AtDraft) -> bool:
        """Whether a step would change anything."""
        return held.wants or bool(held.left)

    def step(self, held: AtDraft) -> tuple[AtDraft, SentProposal]:
        """The proposal that is waited for, or one for an outcome, is drafted."""
        number = held.last + 1
        if held.wants:
            proposal = (self.guess(held.text),)
            held = held._replace(wants=False, offer=(number, proposal), last=number)
            return held, SentProposal(held.asked_by, number, proposal)
        end, *left = held.left
        proposal = (self.guess((*held.text, *held.verified[: end.node + 1], end.token)),)
        prepared = (*held.prepared, (end, number, proposal))
        return held._replace(left=tuple(left), prepared=prepared, last=number), SentProposal(end, number, proposal)

    def outcomes(self, text: Text, verified: Text) -> tuple[End, ...]:
        """Outcomes of a round that are drafted for."""
        found = []
        for node in range(ROOT, len(verified)):
            before = (*text, *verified[: node + 1])
            likely = self.guess(before) if node + 1 == len(verified) else 1 - verified[node + 1]
            if len(before) + 1 < self.length:
                found.append(End(len(text) - 1, node, likely))
        return tuple(found)

    # Seams.

    def guess(self, before: Text) -> int:
        """What the draft takes for the target's token: wrong at every third position."""
        return truth(before) if len(before) % 3 else 1 - truth(before)


class SureDraft(DraftModel):
    """A draft that is always right."""

    def guess(self, before: Text) -> int:
        return truth(before)
