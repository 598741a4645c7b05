"""Where the services of a pool are: fixed addresses, names that DNS knows, or a file that an orchestrator writes."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.protocol.errors import InvalidInput, require
from paceline.runtime import metrics
from paceline.runtime.live_files import read_live

logger = logging.getLogger(__name__)

DNS, FILE = "dns:///", "file:"
DNS_PERIOD_S = 5.0
"""Between two look-ups: what cluster DNS servers let an answer live by default."""
FILE_PERIOD_S = 1.0
MAX_ENDPOINTS = 1024
"""Of one source; links cost a socket and a task each."""
_HOST_PORT = re.compile(r"(?P<host>\[[^\]]+\]|[^:\s]+):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class Endpoint:
    """One service.

    Attributes:
        address: HOST:PORT to dial.
        server_name: the name that its certificate bears, where that is not the address's host.
    """

    address: str
    server_name: str | None = None


Resolve = Callable[[], Awaitable[Sequence[Endpoint]]]
"""Finds the endpoints of now. Raises `OSError` or `InvalidInput` where that can't be told."""


@dataclass(frozen=True)
class EndpointSource:
    """Where endpoints come from: its text in the configuration, and how often it is asked; None: once."""

    text: str
    resolve: Resolve
    period_s: float | None = None

    @classmethod
    def parse(cls, field: str, text: str) -> EndpointSource:
        """Read HOST:PORT, dns:///NAME:PORT or file:PATH.

        Raises:
            InvalidInput: it is none of these.
        """
        if text.startswith(FILE):
            path = Path(text.removeprefix(FILE)).expanduser()
            return cls(text, lambda: asyncio.to_thread(_read, text, path), FILE_PERIOD_S)
        host, port = _host_port(field, text.removeprefix(DNS), text)
        if text.startswith(DNS):
            return cls(text, lambda: _look_up(host, port), DNS_PERIOD_S)
        return cls(text, lambda: _fixed(text))


class EndpointWatch:
    """Asks sources again and again, and tells of every change.

    A source that can't be asked keeps its last answer: a DNS server that is down takes nobody's links away.

    Args:
        sources: in the order in which their endpoints are told.
        on_change: called with all endpoints, each address once.
    """

    def __init__(self, sources: Sequence[EndpointSource], on_change: Callable[[tuple[Endpoint, ...]], None]) -> None:
        self._sources = sources
        self._on_change = on_change
        self._found: dict[EndpointSource, tuple[Endpoint, ...]] = {}
        self._errors: dict[EndpointSource, str] = {}

    async def run(self) -> None:
        """Ask until cancelled."""
        await asyncio.gather(*(self._follow(source) for source in self._sources))

    async def _follow(self, source: EndpointSource) -> None:
        while True:
            await self._ask(source)
            if source.period_s is None:
                return
            await asyncio.sleep(source.period_s)

    async def _ask(self, source: EndpointSource) -> None:
        try:
            found = tuple(await source.resolve())
            require(len(found) <= MAX_ENDPOINTS, source.text, len(found), f"at most {MAX_ENDPOINTS} endpoints")
        except (OSError, InvalidInput) as error:
            metrics.reload_failed("endpoints")
            if self._errors.get(source) != str(error):
                self._errors[source] = str(error)
                kept = len(self._found.get(source, ()))
                logger.warning("endpoints not found: source=%s kept=%d error=%s", source.text, kept, error)
            return
        self._errors.pop(source, None)
        if found != self._found.get(source):
            self._found[source] = found
            logger.info("endpoints: source=%s addresses=%s", source.text, ",".join(each.address for each in found))
            self._on_change(self._together())

    def _together(self) -> tuple[Endpoint, ...]:
        by_address: dict[str, Endpoint] = {}
        for source in self._sources:
            for endpoint in self._found.get(source, ()):
                by_address.setdefault(endpoint.address, endpoint)
        return tuple(by_address.values())


async def _fixed(address: str) -> Sequence[Endpoint]:
    return (Endpoint(address),)


async def _look_up(host: str, port: int) -> Sequence[Endpoint]:
    """Every address of a name, sorted: servers rotate their answers."""
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(answer[4][0]) for answer in answers})
    return [Endpoint(f"[{each}]:{port}" if ":" in each else f"{each}:{port}", host) for each in addresses]


def _read(text: str, path: Path) -> Sequence[Endpoint]:
    """One HOST:PORT a line; empty lines and those that begin with # say nothing."""
    content = read_live(text, path, "UTF-8")
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise InvalidInput.of(text, str(path), f"a readable UTF-8 file ({error})") from error
    entries = [line for line in lines if line and not line.startswith("#")]
    for entry in entries:
        _host_port(text, entry, entry)
    return [Endpoint(entry) for entry in entries]


def _host_port(field: str, entry: str, text: str) -> tuple[str, int]:
    match = _HOST_PORT.fullmatch(entry)
    if match is None or int(match["port"]) >= 1 << 16:
        raise InvalidInput.of(field, text, "HOST:PORT, dns:///NAME:PORT or file:PATH")
    return match["host"].strip("[]"), int(match["port"])
