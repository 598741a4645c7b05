"""What is unsafe to expose says so at start, each time in the same words."""

from __future__ import annotations

import ipaddress
import logging

from paceline.runtime.config import ServerSettings

logger = logging.getLogger(__name__)


def warn_if_exposed(settings: ServerSettings, what: str, remedy: str) -> None:
    """Log what others than this machine can reach, and the setting that ends it.

    Args:
        settings: where the server listens.
        what: is unsafe there, as "plaintext" or "requests without a key".
        remedy: names the settings, as "set server.tls_certificate and server.tls_key".
    """
    if not is_loopback(settings.host):
        logger.warning(
            "unsafe to expose: %s on server.host = %s, port %d; %s, or server.host = 127.0.0.1",
            what, settings.host, settings.port, remedy,
        )  # fmt: skip


def warn_of_callers(settings: ServerSettings) -> None:
    """Log that anybody who reaches this server may use it, where nothing but TLS could tell who calls."""
    if settings.tls_client_ca is None:
        warn_if_exposed(settings, "any caller may open sessions", "set server.tls_client_ca")
    elif settings.tls_roles == "off":
        what = "any certificate of server.tls_client_ca may open sessions"
        warn_if_exposed(settings, what, 'set server.tls_roles = "required"')


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is this machine's alone; a name other than localhost is not taken to be."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
