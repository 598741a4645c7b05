"""Handshake and status messages."""

from __future__ import annotations

from paceline.protocol.codec.copying import copier
from paceline.protocol.errors import require
from paceline.protocol.handshake import PROTOCOL_VERSION, Hello, ServiceStatus, Welcome
from paceline.v1 import types_pb2 as pb

# Versions are compared by the link, not here: an old hello must still be readable.
HELLO = copier(Hello, pb.Hello)


def _check_welcome(message: pb.Welcome) -> None:
    """A welcome of our own protocol version must state its limits."""
    if message.protocol_version == PROTOCOL_VERSION:
        for field in ("max_length", "max_sessions", "max_proposal_nodes", "max_frame_bytes"):
            require(getattr(message, field) >= 1, f"welcome.{field}", getattr(message, field), "at least 1")


WELCOME = copier(Welcome, pb.Welcome, _check_welcome)
SERVICE_STATUS = copier(ServiceStatus, pb.ServiceStatus)
