"""The target's side of the model: sessions, rounds, leases and prefetched proposals, without engines or gRPC.

Tokens are 0 and 1, and the target's next one is a function of all tokens before it. A text is a tuple of tokens, a
proposal a chain. Everything is immutable, so that states can be told apart.
"""

from __future__ import annotations

from typing import NamedTuple

Text = tuple[int, ...]
ROOT = -1


class End(NamedTuple):
    """How a round ended: its base length, the last accepted node, the token after it."""

    base: int
    node: int
    token: int


class Asked(NamedTuple):
    """A round: what is kept, the new token, what is verified, and how many rounds may follow it."""

    base: int
    node: int
    last: int
    proposal: Text = ()
    lease: int = 0

    @property
    def first(self) -> int:
        """The position that its root draws."""
        return self.base + 1


class DrawnVerdict(NamedTuple):
    """A verdict; `started`: base length of the round that follows it with a prefetched proposal, or -1."""

    base: int
    tokens: Text
    started: int = -1


class Refused(AssertionError):
    """An honest peer's message was refused."""


def require_equal(name: str, expected: object, got: object) -> None:
    """Refuse a message that does not fit."""
    if expected != got:
        raise Refused(f"{name}: expected {expected}, got {got}")


def truth(before: Text) -> int:
    """The target's own token."""
    return (7 * sum(token << place for place, token in enumerate(before)) + len(before)) % 5 % 2


def end_of(asked: Asked, drawn: Text) -> End:
    """The outcome of a round."""
    node = 0
    while node < len(asked.proposal) and asked.proposal[node] == drawn[node]:
        node += 1
    return End(asked.base, node - 1, drawn[node])


class AtTarget(NamedTuple):
    """A session: the tokens of its rows, the round that waits, those that are answered, and what may follow."""

    prefix: Text
    rows: Text = ()
    pending: Asked | None = None
    last: Asked | None = None
    drawn: Text = ()
    run: tuple[tuple[Asked, DrawnVerdict], ...] = ()
    until: int = 0
    prefetched: tuple[tuple[End, Text], ...] = ()


class TargetModel:
    """What a target does with a message, and in a step."""

    def __init__(self, length: int) -> None:
        self.length = length

    def take_round(self, held: AtTarget, asked: Asked) -> tuple[AtTarget, tuple[DrawnVerdict, ...]]:
        """A round comes; the verdict of one that is repeated leaves again."""
        for place, (before, drawn) in enumerate(held.run):
            if before.base == asked.base:
                require_equal("repeated round", before[:4], asked[:4])
                return self.go_on(self.extended(held, asked, place)), (drawn,)
        if held.pending is not None:
            require_equal("pending round", held.pending[:4], asked[:4])
            return self.extended(held, asked, len(held.run)), ()
        self.check(held, asked)
        return held._replace(pending=asked, run=(), prefetched=(), until=asked.first + asked.lease), ()

    def take_prefetched(self, held: AtTarget, base: int, proposals: tuple[tuple[End, Text], ...]) -> AtTarget:
        """Proposals come for outcomes of a round; for another one than the pending they are too late."""
        if held.pending is None or held.pending.base != base:
            return held
        return held._replace(prefetched=tuple(sorted({**dict(held.prefetched), **dict(proposals)}.items())), run=())

    def step(self, held: AtTarget) -> tuple[AtTarget, DrawnVerdict]:
        """The pending round is computed."""
        asked = held.pending
        assert asked is not None, "only such a session steps"
        rows = (*(held.rows or held.prefix)[: asked.base], asked.last, *asked.proposal)
        tokens = tuple(truth(rows[: asked.first + node]) for node in range(len(asked.proposal) + 1))
        following = self.prefetched_for(held, end_of(asked, tokens))
        drawn = DrawnVerdict(asked.base, tokens, following.base if following else -1)
        held = held._replace(rows=rows, pending=None, last=asked, drawn=tokens, prefetched=())
        held = held._replace(run=(*held.run, (asked, drawn)))
        if following is not None:
            return held._replace(pending=following, until=0), drawn
        return self.go_on(held), drawn

    # Seams.

    def prefetched_for(self, held: AtTarget, end: End) -> Asked | None:
        """The round that was prefetched for an outcome, unless the text ends there."""
        proposal = dict(held.prefetched).get(end)
        base = end.base + end.node + 2
        if proposal is None or base + 1 > self.length - 1:
            return None
        return Asked(base, end.node, end.token, proposal)

    def go_on(self, held: AtTarget) -> AtTarget:
        """Start the next round of a lease."""
        last = held.last
        if last is None or held.pending is not None or last.proposal:
            return held
        position = last.first + 1
        if position > held.until or position >= self.length:
            return held
        return held._replace(pending=Asked(last.first, ROOT, held.drawn[-1]))

    def extended(self, held: AtTarget, asked: Asked, seen: int) -> AtTarget:
        """A round that is sent again renews its lease; the verdicts before it have come."""
        return held._replace(run=held.run[seen:], until=max(held.until, asked.first + asked.lease))

    def check(self, held: AtTarget, asked: Asked) -> None:
        """Whether a round continues what the session holds."""
        if held.last is None:
            expected = (len(held.prefix) - 1, ROOT, held.prefix[-1])
            require_equal("first round", expected, asked[:3])
            return
        if asked.node >= len(held.last.proposal):
            raise Refused(f"accepted node {asked.node}: expected at most {len(held.last.proposal) - 1}")
        end = end_of(held.last, held.drawn)
        require_equal("next round", (end.base + end.node + 2, end.node, end.token), asked[:3])
