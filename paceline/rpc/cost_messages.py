"""Costs on a link: how they are written and read, and what has been said of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic

from paceline.costs.cost_line import MAX_POINTS, CostLine
from paceline.costs.service_costs import Costs, DraftCosts, DrafterLine, TargetCosts, changed_lines, merge_costs
from paceline.protocol.codec.bounds import Most, bound, check_bounds
from paceline.protocol.codec.copying import Copier, copier, register
from paceline.protocol.errors import PacelineError, require
from paceline.protocol.handshake import MAX_DRAFTERS, MAX_FRAME_BYTES
from paceline.protocol.proposal import MAX_DRAFTER_BYTES
from paceline.rpc.frames import Message
from paceline.v1 import draft_service_pb2, target_service_pb2
from paceline.v1 import types_pb2 as pb

logger = logging.getLogger(__name__)

LINE_BYTES = 2 * 4 * MAX_POINTS + 8
"""A full line takes no more: two floats for each point, lengths and tags."""
COUNTS_BYTES = 32
"""Of the three integers, their tags and the whole message's."""
MAX_STEP_MS = 3_600_000.0
"""A step of an hour: no service runs one, and a sum of times stays finite."""


def _encode_line(line: CostLine) -> pb.CostLine | None:
    if not line.is_known:
        return None
    rows, ms = zip(*line.points, strict=True)
    return pb.CostLine(rows=rows, ms=ms)


def _decode_line(message: pb.CostLine) -> CostLine:
    check_bounds(message)
    points = len(message.rows)
    require(len(message.ms) == points, "cost line ms", len(message.ms), f"{points}, one for each number of rows")
    for ms in message.ms:
        require(0 <= ms <= MAX_STEP_MS, "cost line ms", ms, f"in [0, {MAX_STEP_MS:g}]")
    return CostLine(tuple(zip(message.rows, message.ms, strict=True)))


bound(pb.CostLine, "cost line", rows=Most(MAX_POINTS, "cost line points"), ms=MAX_POINTS)
bound(draft_service_pb2.DrafterLine, "cost line", drafter=MAX_DRAFTER_BYTES)
bound(draft_service_pb2.DraftCosts, "costs", others=MAX_DRAFTERS - 1)
register(pb.CostLine, Copier(CostLine, _encode_line, _decode_line))
copier(DrafterLine, draft_service_pb2.DrafterLine)
TARGET_COSTS = copier(TargetCosts, target_service_pb2.TargetCosts)
DRAFT_COSTS = copier(DraftCosts, draft_service_pb2.DraftCosts)


def most_bytes(costs: TargetCosts | DraftCosts) -> int:
    """Costs with these lines take no more of a frame."""
    return COUNTS_BYTES + sum(LINE_BYTES + len(name.encode()) + 8 for name in costs.lines)


class CostsTeller(Generic[Costs]):
    """Says a service's costs on one link: with each frame the counts, and the lines that have moved.

    Args:
        copier: of the service's costs.
        current: what they are now.
    """

    def __init__(self, copier: Copier[Costs, Message], current: Callable[[], Costs]) -> None:
        self._copier = copier
        self._current = current
        self._told = copier.domain()

    def add_to(self, frame: Message) -> Message:
        """The frame with the costs, if it has room for them: they are no reason to delay what it carries."""
        costs = self._current()
        said = changed_lines(costs, self._told)
        if frame.ByteSize() <= MAX_FRAME_BYTES - most_bytes(said):
            frame.costs.CopyFrom(self._copier.encode(said))
            self._told = merge_costs(said, self._told)
        return frame


class CostsHeard(Generic[Costs]):
    """What a peer has said of its costs; malformed ones are named in the log, once, and change nothing.

    Args:
        copier: of the peer's costs.
        peer: its role and address, for the log.
    """

    def __init__(self, copier: Copier[Costs, Message], peer: str) -> None:
        self.costs: Costs = copier.domain()
        self._copier = copier
        self._peer = peer
        self._refused = ""

    def begin(self, frame: Message) -> None:
        """A link begins with this frame: what was said on the one before it is forgotten."""
        self.costs, self._refused = self._copier.domain(), ""
        self.hear(frame)

    def hear(self, frame: Message) -> None:
        """Take in what a frame says of them."""
        if not frame.HasField("costs"):
            return
        try:
            self.costs = merge_costs(self._copier.decode(frame.costs), self.costs)
        except PacelineError as error:
            if error.message != self._refused:
                self._refused = error.message
                logger.warning("malformed costs, left out: peer=%s error=%s", self._peer, error.for_log)
