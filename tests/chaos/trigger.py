"""One blow at a time, armed for a state of a round, taken by the first connection that has it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.blows import Aim, Blow, Lasting, strike
from tests.chaos.framing import ChunkSplitter, Direction, Frame, GrpcSplitter
from tests.chaos.proxy import Address, Proxy, Wire
from tests.chaos.states import (
    Recognise,
    State,
    TargetLinkStates,
    draft_link_states,
    generation_states,
    http_states,
)

RECOGNISERS: dict[str, Callable[[], Recognise]] = {
    "target": TargetLinkStates,
    "draft": lambda: draft_link_states,
    "coordinator": lambda: generation_states,
    "gateway": lambda: http_states,
}
"""By the role of whom a proxy stands before."""


@dataclass
class Armed:
    """A blow that waits for a frame of a state, behind `skip` others, at the proxies of these labels; `aim` is given
    the label. Then `label` says where it fell and `at` when; `failure`: what went wrong with the blow itself."""

    labels: frozenset[str]
    state: State
    skip: int
    aim: Callable[[str], Aim]
    label: str = ""
    at: float = 0.0
    failure: Exception | None = None
    struck: threading.Event = field(default_factory=threading.Event)
    """It has fallen; also set by whoever waits for it no longer."""
    over: threading.Event = field(default_factory=threading.Event)
    """What it takes has passed, too."""

    @property
    def has_fallen(self) -> bool:
        return bool(self.label)


class Trigger:
    """Shared by all proxies; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: Armed | None = None

    def arm(self, armed: Armed) -> None:
        """Wait for its frame; what was armed before is forgotten."""
        with self._lock:
            self._armed = armed

    def disarm(self) -> None:
        with self._lock:
            self._armed = None

    def claim(self, label: str, states: set[State], frame: Frame) -> tuple[Armed, Aim] | None:
        with self._lock:
            armed = self._armed
            if armed is None or label not in armed.labels or not frame.messages:
                return None
            if armed.state is not State.ANY and armed.state not in states:
                return None
            aim = armed.aim(label)
            if aim.blow is Blow.DUPLICATE and not frame.whole:
                return None
            armed.skip -= 1
            if armed.skip >= 0:
                return None
            self._armed = None
            armed.label, armed.at = label, time.monotonic()
            return armed, aim


class StruckConnection:
    def __init__(self, label: str, recognise: Recognise, trigger: Trigger) -> None:
        self._label, self._recognise, self._trigger = label, recognise, trigger
        self._connection = Lasting()

    async def pass_on(self, way: Direction, frame: Frame, wire: Wire) -> None:
        """Write the frame, or let fall what is armed for it."""
        await self._connection.admit()
        states = {state for message in frame.messages for state in self._recognise(way, message)}
        claimed = self._trigger.claim(self._label, states, frame)
        if claimed is None:
            await wire.write(self._connection.told(way, frame).raw)
            return
        armed, aim = claimed
        armed.struck.set()
        try:
            await strike(aim, frame, wire, self._connection)
        except ConnectionError:
            raise
        except Exception as error:
            armed.failure = error
            raise
        finally:
            armed.over.set()


def proxy_before(
    role: str,
    label: str,
    upstream: Address,
    trigger: Trigger,
    listen: Address = ("127.0.0.1", 0),
    *,
    tls: bool = False,
) -> Proxy:
    """A proxy before a service of a role, whose blows come from a trigger; under TLS no frame is read."""
    recognise = (lambda: lambda way, message: set[State]()) if tls else RECOGNISERS[role]
    plain = tls or role == "gateway"
    return Proxy(
        upstream,
        lambda: StruckConnection(label, recognise(), trigger),
        (lambda way: ChunkSplitter()) if plain else (lambda way: GrpcSplitter(client=way is Direction.UP)),
        listen,
    )
