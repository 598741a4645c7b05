"""Handshake and status messages."""

from __future__ import annotations

from paceline.protocol.codec.copying import MAX_TEXT_BYTES, Most, bound, copier
from paceline.protocol.errors import require
from paceline.protocol.handshake import MAX_DRAFTERS, PROTOCOL_VERSION, Hello, ServiceStatus, Welcome
from paceline.protocol.proposal import MAX_DRAFTER_BYTES
from paceline.v1 import types_pb2 as pb

bound(pb.Hello, "hello", incarnation=MAX_TEXT_BYTES)
bound(
    pb.Welcome,
    "welcome",
    incarnation=MAX_TEXT_BYTES,
    drafters=Most(MAX_DRAFTERS, each=MAX_DRAFTER_BYTES),
    drafter_needs=MAX_DRAFTERS,
    default_name=MAX_DRAFTER_BYTES,
)
bound(pb.ServiceStatus, "status", incarnation=MAX_TEXT_BYTES)

# Versions are compared by the link, not here: an old hello must still be readable.
HELLO = copier(Hello, pb.Hello)


def _check_welcome(message: pb.Welcome) -> None:
    """A welcome of our own protocol version must state its limits."""
    if message.protocol_version == PROTOCOL_VERSION:
        for field in ("max_length", "max_sessions", "max_proposal_nodes", "max_frame_bytes"):
            require(getattr(message, field) >= 1, f"welcome.{field}", getattr(message, field), "at least 1")


WELCOME = copier(Welcome, pb.Welcome, _check_welcome)
SERVICE_STATUS = copier(ServiceStatus, pb.ServiceStatus)
