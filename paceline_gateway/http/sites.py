"""The sites that a browser may send requests from, and the names under which a gateway is reached.

A foreign site can have its own name point at this machine (DNS rebinding), and its page then reads the answers. Such
requests carry that name in `Host`. Other foreign pages say where they come from in `Origin`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

ANY_HOST = "*"
LOCALHOST = "localhost"
_ORIGIN = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*://)?(?P<name>\[[0-9A-Fa-f:.]+\]|[^][:/?#@\s]+)(?::[0-9]{0,5})?")


class Sites:
    """The names of a gateway.

    IP addresses and names of this machine are always allowed: no foreign site can own them, and probes send them.

    Args:
        names: further names; `*.NAME`: any below one; `*`: all; empty: all, unless `host` is a loopback address.
        host: the host that the gateway listens at.
    """

    def __init__(self, names: Sequence[str], host: str) -> None:
        self._names = frozenset(_normal_form(name) for name in names)
        self._allows_all = ANY_HOST in self._names or not (self._names or is_loopback(host))

    def is_own(self, host: str) -> bool:
        """Whether a `Host` header, with or without a port, may be this gateway's; empty: no browser sent it."""
        name = _host_name(host)
        return self._allows_all or not host or (name is not None and (_is_safe(name) or self._is_listed(name)))

    def is_foreign(self, origin: str, host: str) -> bool:
        """Whether an `Origin` header names another site than the one that the request went to.

        Another port of the same name is no other site. Neither is another name of this machine, or a listed one.
        """
        origin_name, host_name = _host_name(origin), _host_name(host)
        if origin_name is None:
            return True
        if origin_name == host_name or ANY_HOST in self._names or self._is_listed(origin_name):
            return False
        return host_name is None or not (is_loopback(origin_name) and is_loopback(host_name))

    def _is_listed(self, name: str) -> bool:
        parts = name.split(".")
        return name in self._names or any(
            f"*.{'.'.join(parts[start:])}" in self._names for start in range(1, len(parts))
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    name = _normal_form(host)
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == LOCALHOST or name.endswith(f".{LOCALHOST}")


def _is_safe(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return is_loopback(name)
    return True


def _host_name(origin: str) -> str | None:
    """Return the host of an origin or of HOST:PORT, without brackets; None: it is neither."""
    match = _ORIGIN.fullmatch(origin)
    return None if match is None else _normal_form(match["name"].strip("[]"))


def _normal_form(name: str) -> str:
    return name.strip().lower().rstrip(".")
