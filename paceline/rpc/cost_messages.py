"""Costs on a link: their encoding, and their state on either side."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic

from paceline.costs.cost_line import MAX_POINTS, CostLine
from paceline.costs.service_costs import Costs, DraftCosts, DrafterLine, TargetCosts, changed_lines, merge_costs
from paceline.protocol.codec.copying import Copier, Most, bound, check_bounds, copier, register
from paceline.protocol.errors import PacelineError, require
from paceline.protocol.handshake import MAX_DRAFTERS, MAX_FRAME_BYTES
from paceline.protocol.proposal import MAX_DRAFTER_BYTES
from paceline.rpc.frames import Message
from paceline.v1 import draft_service_pb2, target_service_pb2
from paceline.v1 import types_pb2 as pb

logger = logging.getLogger(__name__)

LINE_BYTES = 2 * 4 * MAX_POINTS + 8
"""Most bytes of a line: two floats for each point, lengths and tags."""
COUNTS_BYTES = 32
"""Bytes of the three integers, their tags and the message's."""
MAX_STEP_MS = 3_600_000.0
"""Longest step, an hour: no service runs one, and sums of times stay finite."""


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
bound(draft_service_pb2.DraftCosts, "costs", others=MAX_DRAFTERS - 1, beside=MAX_DRAFTERS)
register(pb.CostLine, Copier(CostLine, _encode_line, _decode_line))
copier(DrafterLine, draft_service_pb2.DrafterLine)
TARGET_COSTS = copier(TargetCosts, target_service_pb2.TargetCosts)
DRAFT_COSTS = copier(DraftCosts, draft_service_pb2.DraftCosts)


def most_bytes(costs: TargetCosts | DraftCosts) -> int:
    """Most bytes in a frame of costs with these lines."""
    return COUNTS_BYTES + sum(LINE_BYTES + len(drafter.encode()) + 8 for drafter, _ in costs.lines)


class CostsSender(Generic[Costs]):
    """Sends a service's costs on one link: with each frame the counts, and the lines that have changed.

    Args:
        copier: of the service's costs.
        current: returns the current costs.
    """

    def __init__(self, copier: Copier[Costs, Message], current: Callable[[], Costs]) -> None:
        self._copier = copier
        self._current = current
        self._sent_costs = copier.domain()

    def add_to(self, frame: Message) -> Message:
        """Add the costs to a frame if it has room for them; its messages never wait for costs."""
        costs = self._current()
        changes = changed_lines(costs, self._sent_costs)
        if frame.ByteSize() <= MAX_FRAME_BYTES - most_bytes(changes):
            frame.costs.CopyFrom(self._copier.encode(changes))
            self._sent_costs = merge_costs(changes, self._sent_costs)
        return frame


class PeerCosts(Generic[Costs]):
    """A peer's costs, from its frames. Malformed ones are logged once and change nothing.

    Args:
        copier: of the peer's costs.
        peer: its role and address, for the log.
    """

    def __init__(self, copier: Copier[Costs, Message], peer: str) -> None:
        self.costs: Costs = copier.domain()
        self._copier = copier
        self._peer = peer
        self._last_error = ""

    def begin(self, frame: Message) -> None:
        """Forget the last link's costs, and take those of a new link's first frame."""
        self.costs, self._last_error = self._copier.domain(), ""
        self.update(frame)

    def update(self, frame: Message) -> None:
        """Take a frame's changes."""
        if not frame.HasField("costs"):
            return
        try:
            self.costs = merge_costs(self._copier.decode(frame.costs), self.costs)
        except PacelineError as error:
            if error.message != self._last_error:
                self._last_error = error.message
                logger.warning("malformed costs, left out: peer=%s error=%s", self._peer, error.for_log)
