"""What a run is made of: its setup, and the schedule that decides every order, every plan and every fault in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from random import Random

from hypothesis import strategies as st

from paceline.protocol.proposal import Acceptance

LETS_RUN = 160
"""Bytes below this leave a turn to what is ready, or to what has waited longest."""
TURNS = 200
"""Faults come within so many turns: about as many as a request takes."""
ORDER_BYTES, POLICY_BYTES = 160, 64


@dataclass(frozen=True)
class Setup:
    """What runs: services, requests, and how they draft.

    Attributes:
        drafter: of the requests; `auto` lets the policy change it in mid-text.
        num_draft_tokens: what requests name; None: the schedule's policy plans each round.
        capacity: frames that travel on a lane before its writer waits.
        tokens: that each request generates.
        faults: most that come.
        target_rooms, draft_rooms: sessions that a service takes.
        penalties: whether each token depends on how often each other one was committed.
        noise: share of the draft's distribution that is not the target's.
    """

    name: str
    targets: int = 1
    drafts: int = 1
    requests: int = 1
    acceptance: Acceptance = Acceptance.COUPLED
    drafter: str = "model"
    num_draft_tokens: int | None = None
    fan_out: int = 2
    lease: int = 3
    max_prefetched: int = 4
    capacity: int = 4
    tokens: int = 7
    faults: int = 2
    target_rooms: int = 8
    draft_rooms: int = 8
    noise: float = 0.3
    penalties: bool = False


@dataclass(frozen=True)
class Schedule:
    """Decides a run, byte by byte; where its bytes end, what has waited longest comes first.

    Attributes:
        order: what comes next, a byte for each turn at which there is a choice.
        policy: what each round does, a byte for each choice.
        faults: at which turn what happens, counted among what can happen then.
    """

    order: bytes = b""
    policy: bytes = b""
    faults: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        faults = ",".join(f"{turn}.{which}" for turn, which in self.faults)
        order, policy = self.order.rstrip(b"\0"), self.policy.rstrip(b"\0")  # zeros follow in any case
        return f"{order.hex()}:{policy.hex()}:{faults}"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """What `str` gave."""
        order, policy, faults = text.split(":")
        pairs = [fault.split(".") for fault in faults.split(",") if fault]
        parsed = tuple((int(turn), int(which)) for turn, which in pairs)
        return cls(bytes.fromhex(order), bytes.fromhex(policy), parsed)


@dataclass
class ByteOrder:
    """The order that a schedule's bytes say."""

    left: Iterator[int]
    held: dict[str, int] = field(default_factory=dict)
    """Moves that are held back, for so many turns."""

    @classmethod
    def of(cls, order: bytes) -> ByteOrder:
        return cls(chain(order, repeat(0)))

    def next(self, moves: Sequence[str], *, idle: bool) -> str | None:
        """One of them, the first of which has waited longest; None: what is ready runs first (not where `idle`)."""
        byte = next(self.left)
        self.held = {name: turns - 1 for name, turns in self.held.items() if turns > 1}
        if byte >= 240:
            self.held[moves[byte % len(moves)]] = 4 * next(self.left) % 128
        free = [name for name in moves if name not in self.held] or list(moves)
        if LETS_RUN <= byte < 240:
            return free[byte % len(free)]
        return free[0] if idle else None


def schedules(faults: int = 3) -> st.SearchStrategy[Schedule]:
    """Any schedule; the least one has every byte 0 and no fault."""
    at = st.tuples(st.integers(0, TURNS), st.integers(0, 15))
    return st.builds(
        Schedule,
        order=st.binary(min_size=ORDER_BYTES, max_size=ORDER_BYTES),
        policy=st.binary(min_size=POLICY_BYTES, max_size=POLICY_BYTES),
        faults=st.lists(at, max_size=faults).map(tuple),
    )


def seeded(seed: int, faults: int = 3) -> Schedule:
    """The schedule of a seed, for searches that are too long to be shrunk."""
    random = Random(seed)
    found = tuple((random.randrange(TURNS), random.randrange(16)) for _ in range(random.randrange(faults + 1)))
    return Schedule(random.randbytes(ORDER_BYTES), random.randbytes(POLICY_BYTES), found)
