"""Which sites a browser may send requests from, and under which names a gateway is reached.

A page of a foreign site can have its own name point at this machine (DNS rebinding), and then reads what is answered.
Its requests carry that name in `Host`. Other foreign pages say where they come from in `Origin`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

ANY = "*"
LOCALHOST = "localhost"
_PLACE = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*://)?(?P<name>\[[0-9A-Fa-f:.]+\]|[^][:/?#@\s]+)(?::[0-9]{0,5})?")


class Sites:
    """The names that a gateway goes by.

    An IP address is no name that could point elsewhere, and is what probes send; so are names of this machine alone.

    Args:
        names: allowed beside them; `*.NAME` any below one, `*` all; none: all, unless `host` is a loopback's.
        host: that the gateway listens at.
    """

    def __init__(self, names: Sequence[str], host: str) -> None:
        self._names = frozenset(_bare(name) for name in names)
        self._any = ANY in self._names or not (self._names or is_loopback(host))

    def knows(self, host: str) -> bool:
        """Whether a `Host` header, with or without its port, may be this gateway's; empty: no browser sent it."""
        name = _name_of(host)
        return self._any or not host or (name is not None and (_is_safe(name) or self._lists(name)))

    def is_foreign(self, origin: str, host: str) -> bool:
        """Whether an `Origin` header is of another site than the one that the request was sent to.

        Another port of the same name is not, nor is another name of this machine, nor one that is listed.
        """
        theirs, ours = _name_of(origin), _name_of(host)
        if theirs is None:
            return True
        both_loopback = ours is not None and is_loopback(theirs) and is_loopback(ours)
        return not (theirs == ours or both_loopback or self._lists(theirs) or ANY in self._names)

    def _lists(self, name: str) -> bool:
        parts = name.split(".")
        return name in self._names or any(
            f"*.{'.'.join(parts[start:])}" in self._names for start in range(1, len(parts))
        )


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine alone."""
    name = _bare(host)
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


def _name_of(place: str) -> str | None:
    """The host of an origin or of HOST:PORT, without brackets; None: it is neither."""
    found = _PLACE.fullmatch(place)
    return None if found is None else _bare(found["name"].strip("[]"))


def _bare(name: str) -> str:
    return name.strip().lower().rstrip(".")
