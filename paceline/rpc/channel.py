"""Client channels to our services: message limits, keepalive, TLS. A channel connects at its first call.

gRPC isn't fork-safe once a channel exists: start worker processes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from paceline.protocol.handshake import MAX_FRAME_BYTES
from paceline.rpc.tls import channel_credentials
from paceline.runtime.config import PeerSettings

MAX_MESSAGE_BYTES = 4 * MAX_FRAME_BYTES
"""gRPC's own limit; links check `MAX_FRAME_BYTES` themselves so that the error is typed."""

Options = list[tuple[str, int | str]]


@dataclass(frozen=True)
class Keepalive:
    """Pings on a silent connection after `time_ms`; it ends if no answer comes within `timeout_ms`."""

    time_ms: int = 5_000
    timeout_ms: int = 2_000


KEEPALIVE = Keepalive()


def message_options() -> Options:
    """Message limits, the same on both sides.

    Only the receiver has a limit: its refusal has a status, the sender's would be an internal error without a name.
    """
    return [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]


def keepalive_options(keepalive: Keepalive = KEEPALIVE) -> Options:
    """Keepalive, the same on both sides, and also while no call is open."""
    return [
        ("grpc.keepalive_time_ms", keepalive.time_ms),
        ("grpc.keepalive_timeout_ms", keepalive.timeout_ms),
        # gRPC's default for every ping, keepalive's too, is a minute.
        ("grpc.http2.ping_timeout_ms", keepalive.timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_channel(settings: PeerSettings, keepalive: Keepalive = KEEPALIVE, *, section: str = "") -> grpc.aio.Channel:
    """An asyncio channel; use and close it in one event loop.

    Args:
        settings: the address, and the TLS files.
        keepalive: of the connection.
        section: prefix of the settings' names in the configuration, `target.` for example.

    Raises:
        InvalidInput: a TLS file is missing or wrong.
    """
    channel: grpc.aio.Channel = _open(grpc.aio, settings, keepalive, section)
    return channel


def open_sync_channel(settings: PeerSettings) -> grpc.Channel:
    """A channel for threads. Raises as `open_channel`."""
    channel: grpc.Channel = _open(grpc, settings, KEEPALIVE, "")
    return channel


def _open(api: Any, settings: PeerSettings, keepalive: Keepalive, section: str) -> Any:
    options = _client_options(keepalive, settings.server_name)
    credentials = channel_credentials(settings, section)
    if credentials is None:
        return api.insecure_channel(settings.address, options=options)
    return api.secure_channel(settings.address, credentials, options=options)


def _client_options(keepalive: Keepalive, server_name: str | None) -> Options:
    name_options: Options = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return [
        *name_options,
        *message_options(),
        *keepalive_options(keepalive),
        # Each channel has a connection of its own, so that links fail independently,
        # and a new channel starts without the back-off of a dead one.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_http_proxy", 0),
    ]
