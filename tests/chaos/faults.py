"""Faults, and the plan of them that a seed makes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from tests.chaos.blows import Blow, Moment
from tests.chaos.states import State

PEERS = ("target", "draft", "coordinator", "gateway")
LINK_STATES: dict[str, tuple[State, ...]] = {
    "target": (State.PREFILL, State.SEND, State.RUN, State.PREFETCH, State.VERDICT, State.FEATURES, State.STOP),
    "draft": (State.PREFILL, State.DRAFTING, State.PROPOSAL, State.COMMIT, State.FEATURES, State.STOP),
    "coordinator": (State.REQUEST, State.TEXT, State.STOP),
    "gateway": (State.REQUEST, State.TEXT, State.STOP),
}
"""What frames before a peer show, by its role."""


class Kind(Enum):
    """What is done; blows fall on a connection, the others on a process or a client."""

    CUT = "cut"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    HOLD = "hold"
    SLOW = "slow"
    LYING_DRAFT = "lying draft"
    LYING_COSTS = "lying costs"
    WITHHELD = "withheld verdicts"
    KILL = "kill -9"
    FREEZE = "SIGSTOP, SIGCONT"
    RESTART = "SIGTERM, restart"
    FULL_DISK = "full disk for logs"
    MEMORY = "no more memory"
    CLOCK = "clock jumps"
    EXPIRY = "certificates have expired"
    DNS = "names don't resolve"
    LEAVE = "client leaves"
    SLOW_READER = "slow reader"
    KILL_CLIENT = "client killed"


BLOWS = {kind: Blow(kind.value) for kind in Kind if kind.value in {blow.value for blow in Blow}}
LIARS: dict[Kind, tuple[str, ...]] = {
    Kind.LYING_DRAFT: ("draft",),
    Kind.LYING_COSTS: ("target", "draft"),
    Kind.WITHHELD: ("target",),
}
BLOWS |= dict.fromkeys(LIARS, Blow.LIE)
LIMITED = (Kind.FULL_DISK, Kind.MEMORY)
CLIENT_KINDS = (Kind.LEAVE, Kind.SLOW_READER, Kind.KILL_CLIENT)
ENDING = (Kind.KILL, Kind.RESTART, Kind.MEMORY)
"""Behind these a process is another one; so it is behind all that falls while one drains."""
OF_ALL_MOMENTS = (Kind.CUT, Kind.DELAY, Kind.HOLD, Kind.KILL, Kind.FREEZE, Kind.RESTART)
OPAQUE = (Kind.CUT, Kind.TRUNCATE, Kind.CORRUPT, Kind.DUPLICATE, Kind.DELAY, Kind.HOLD)
"""What a proxy can do to bytes that it can't read."""
NEEDS_LINK = (Kind.DUPLICATE, Kind.CORRUPT)
"""A client can't tell tokens that come twice: neither TCP nor HTTP/2 lets that happen, and only links name rounds."""
SECONDS: dict[Kind, tuple[float, ...]] = {
    Kind.DELAY: (0.03, 0.3, 0.9),
    Kind.HOLD: (0.1, 1.2),
    Kind.SLOW: (0.4,),
    Kind.LYING_DRAFT: (0.5,),
    Kind.LYING_COSTS: (0.5,),
    Kind.WITHHELD: (0.05, 0.5, 1.2),
    Kind.FULL_DISK: (0.5,),
    Kind.MEMORY: (0.5,),
    Kind.FREEZE: (0.05, 0.4, 1.2),
    Kind.SLOW_READER: (0.02,),
    Kind.CLOCK: (0.5,),
    Kind.EXPIRY: (0.6, 1.5),
    Kind.DNS: (1.0, 6.0),
}
"""Below and beyond the patience of coordinators with drafts (0.3 s) and targets (0.7 s)."""


@dataclass(frozen=True)
class Fault:
    """One fault, decided by its seed. `peer`: the role that suffers; `link`: before which role its frame passes."""

    seed: int
    kind: Kind
    peer: str
    link: str
    state: State
    moment: Moment
    skip: int
    seconds: float
    byte: int
    shape: str = "plain"


@dataclass(frozen=True)
class Cell:
    """A kind of fault at a point; a plan goes round all of them before it comes to one again."""

    kind: Kind
    peer: str
    link: str
    state: State
    moment: Moment


def cells(shape: str = "plain") -> list[Cell]:
    return list(POINTS[shape]())


def _plain() -> Iterator[Cell]:
    for kind in Kind:
        if kind not in (Kind.CLOCK, Kind.EXPIRY, Kind.DNS):
            yield from _cells_of(kind)


def _secured() -> Iterator[Cell]:
    for kind in (*OPAQUE, Kind.KILL, Kind.EXPIRY):
        for peer, moment in itertools.product(("target", "draft", "coordinator"), Moment):
            yield Cell(kind, peer, peer, State.ANY, moment)


def _named() -> Iterator[Cell]:
    for peer in PEERS:
        for state in LINK_STATES[peer]:
            yield Cell(Kind.CLOCK, peer, peer, state, Moment.BEFORE)
    for peer, state in itertools.product(("coordinator", "target"), LINK_STATES["coordinator"]):
        yield Cell(Kind.DNS, peer, "coordinator", state, Moment.BEFORE)


def _ranked() -> Iterator[Cell]:
    for kind, state in itertools.product((Kind.KILL, Kind.FREEZE), LINK_STATES["target"]):
        yield Cell(kind, "rank", "target", state, Moment.BEFORE)


def _cells_of(kind: Kind) -> Iterator[Cell]:
    if kind in CLIENT_KINDS:
        links = ("coordinator", "gateway") if kind is Kind.KILL_CLIENT else ("coordinator",)
        for link, state in itertools.product(links, (State.TEXT, State.REQUEST)):
            yield Cell(kind, "client", link, state, Moment.AFTER)
        return
    moments = tuple(Moment) if kind in OF_ALL_MOMENTS else (Moment.BEFORE,)
    if kind in BLOWS:
        peers = LIARS.get(kind, ("target", "draft") if kind in NEEDS_LINK else PEERS)
        for peer in peers:
            for state, moment in itertools.product((*LINK_STATES[peer], State.DRAIN), moments):
                yield Cell(kind, peer, peer, state, moment)
        return
    for peer, link in (*((each, each) for each in PEERS), ("draft", "target"), ("target", "draft")):
        for state, moment in itertools.product(LINK_STATES[link], moments):
            yield Cell(kind, peer, link, state, moment)
        if kind in (Kind.KILL, Kind.FREEZE) and peer == link:
            yield Cell(kind, peer, link, State.DRAIN, Moment.BEFORE)


POINTS: Mapping[str, Callable[[], Iterator[Cell]]] = {
    "plain": _plain,
    "secured": _secured,
    "named": _named,
    "ranked": _ranked,
}
"""By the shapes that have plans."""


def plan(seed: int, faults: int, shape: str = "plain", *, staying: bool = False) -> list[Fault]:
    """So many faults: every cell in turn, in an order and with particulars that the seed decides.

    staying: none that ends a process.
    """
    order = [each for each in cells(shape) if not staying or (each.kind not in ENDING and each.state != State.DRAIN)]
    random.Random(seed).shuffle(order)
    places = zip(range(faults), itertools.cycle(order), strict=False)
    return [_fault(seed * 1_000_003 + place, cell, shape) for place, cell in places]


def _fault(seed: int, cell: Cell, shape: str) -> Fault:
    source = random.Random(seed)
    once = cell.state in (State.REQUEST, State.PREFILL, State.STOP, State.DRAIN)
    skip = 0 if once else source.randrange(60 if cell.state is State.ANY else 8)
    seconds = source.choice(SECONDS.get(cell.kind, (0.0,)))
    byte = source.randrange(1 << 16)
    return Fault(seed, cell.kind, cell.peer, cell.link, cell.state, cell.moment, skip, seconds, byte, shape)
