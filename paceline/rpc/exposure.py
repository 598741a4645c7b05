"""Warnings at start about servers that are unsafe to expose, all in the same words."""

from __future__ import annotations

import ipaddress
import logging

from paceline.runtime.config import ServerSettings

logger = logging.getLogger(__name__)


def warn_if_exposed(settings: ServerSettings, what: str, remedy: str) -> None:
    """Warn if other machines can reach the server.

    Args:
        settings: where the server listens.
        what: what is unsafe, such as "plaintext" or "requests without a key".
        remedy: the settings that make it safe, such as "set server.tls_certificate and server.tls_key".
    """
    if not is_loopback(settings.host):
        logger.warning(
            "unsafe to expose: %s on server.host = %s, port %d; %s, or server.host = 127.0.0.1",
            what, settings.host, settings.port, remedy,
        )  # fmt: skip


def warn_of_callers(settings: ServerSettings) -> None:
    """Warn if anybody who reaches this server may use it; for servers that know callers by TLS alone."""
    if settings.tls_client_ca is None:
        warn_if_exposed(settings, "any caller may open sessions", "set server.tls_client_ca")
    elif settings.tls_roles == "off":
        what = "any certificate of server.tls_client_ca may open sessions"
        warn_if_exposed(settings, what, 'set server.tls_roles = "required"')


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of names, only `localhost` counts."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
