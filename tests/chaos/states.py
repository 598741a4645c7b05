"""What a frame says of the round that it belongs to, told from its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from google.protobuf.message import DecodeError

from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import target_service_pb2 as target_pb
from tests.chaos.framing import Direction


class State(Enum):
    """A state of a round: that in which the frame is, on its way, which names it."""

    REQUEST = "request"
    PREFILL = "prefill"
    SEND = "send"
    RUN = "target-only run"
    PREFETCH = "prefetched proposal in flight"
    VERDICT = "verdict in flight"
    FEATURES = "features in flight"
    DRAFTING = "drafting for outcomes"
    PROPOSAL = "proposal in flight"
    COMMIT = "commit in flight"
    TEXT = "text in flight"
    STOP = "stop"
    DRAIN = "drain"
    """Never a frame's: that of a service which has been told to stop while its sessions run."""
    ANY = "any"
    """Of every frame: under TLS nobody tells them apart."""


Recognise = Callable[[Direction, bytes], set[State]]
_OF_TARGET_EVENT = {"verdict": State.VERDICT, "opened": State.PREFILL, "features": State.FEATURES}
_OF_DRAFT_COMMAND = {
    "verifying": State.DRAFTING,
    "commit": State.COMMIT,
    "features": State.FEATURES,
    "open": State.PREFILL,
    "close": State.STOP,
}
_OF_RESPONSE = {"started": State.REQUEST, "tokens": State.TEXT, "finished": State.STOP}


@dataclass
class TargetLinkStates:
    """States on one link to a target; remembers which sessions have a lease."""

    _leased: set[int] = field(default_factory=set)

    def __call__(self, way: Direction, message: bytes) -> set[State]:
        """Those that a frame's message shows; none of a message that is not a link's."""
        try:
            if way is Direction.UP:
                return {self._of_command(each) for each in target_pb.VerifyRequest.FromString(message).commands}
            events = target_pb.VerifyResponse.FromString(message).events
        except DecodeError:
            return set()
        return {state for each in events for state in self._of_event(each)}

    def _of_command(self, command: target_pb.TargetCommand) -> State:
        kind = command.WhichOneof("command")
        if kind == "round":
            session = command.round.session_id
            (self._leased.add if command.round.lease else self._leased.discard)(session)
            return State.SEND
        if kind == "open":
            return State.PREFILL
        return State.PREFETCH if kind == "prefetch" else State.STOP

    def _of_event(self, event: target_pb.TargetEvent) -> Iterable[State]:
        kind = event.WhichOneof("event") or ""
        if kind == "verdict" and event.verdict.session_id in self._leased:
            yield State.RUN
        if kind in _OF_TARGET_EVENT:
            yield _OF_TARGET_EVENT[kind]


def draft_link_states(way: Direction, message: bytes) -> set[State]:
    try:
        if way is Direction.UP:
            kinds = [each.WhichOneof("command") for each in draft_pb.DraftRequest.FromString(message).commands]
            return {_OF_DRAFT_COMMAND[kind] for kind in kinds if kind in _OF_DRAFT_COMMAND}
        events = draft_pb.DraftResponse.FromString(message).events
    except DecodeError:
        return set()
    return {State.PROPOSAL for each in events if each.WhichOneof("event") == "proposal"}


def generation_states(way: Direction, message: bytes) -> set[State]:
    if way is Direction.UP:
        return {State.REQUEST} if message else set()
    try:
        kind = generation_pb.GenerateResponse.FromString(message).WhichOneof("event")
    except DecodeError:
        return set()
    return {_OF_RESPONSE[kind]} if kind in _OF_RESPONSE else set()


def http_states(way: Direction, data: bytes) -> set[State]:
    """The same of HTTP/1.1 with event streams: by what its bytes begin or end with."""
    if way is Direction.UP:
        return {State.REQUEST} if data.startswith(b"POST ") else set()
    if b"data: [DONE]" in data:
        return {State.STOP}
    return {State.TEXT} if b"data: " in data else set()
