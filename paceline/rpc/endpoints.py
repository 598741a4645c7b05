"""The endpoints of a pool: fixed addresses, DNS names, or a file that an orchestrator writes."""

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
from paceline.runtime.files import read_live

logger = logging.getLogger(__name__)

DNS, FILE = "dns:///", "file:"
DNS_PERIOD_S = 5.0
"""Time between two look-ups: the default lifetime of an answer in cluster DNS servers."""
FILE_PERIOD_S = 1.0
MAX_ENDPOINTS = 1024
"""Most endpoints of one source; each link costs a socket and a task."""
_HOST_PORT = re.compile(r"(?P<host>\[[^\]]+\]|[^:\s]+):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class Endpoint:
    """One service.

    Attributes:
        address: HOST:PORT to dial.
        server_name: the name in its certificate, if that is not the address's host.
    """

    address: str
    server_name: str | None = None


Resolve = Callable[[], Awaitable[Sequence[Endpoint]]]
"""Returns the current endpoints. Raises `OSError` or `InvalidInput` if they can't be found."""


@dataclass(frozen=True)
class EndpointSource:
    """A source of endpoints: its text in the configuration, and how often it is read; None: once."""

    text: str
    resolve: Resolve
    period_s: float | None = None

    @classmethod
    def parse(cls, field: str, text: str) -> EndpointSource:
        """Read HOST:PORT, dns:///NAME:PORT or file:PATH.

        Raises:
            InvalidInput: the text has another form.
        """
        if text.startswith(FILE):
            path = Path(text.removeprefix(FILE)).expanduser()
            return cls(text, lambda: asyncio.to_thread(_read, text, path), FILE_PERIOD_S)
        host, port = _host_port(field, text.removeprefix(DNS), text)
        if text.startswith(DNS):
            return cls(text, lambda: _look_up(host, port), DNS_PERIOD_S)
        return cls(text, lambda: _fixed_address(text))


class EndpointWatch:
    """Reads sources periodically, and reports every change.

    A source that can't be read keeps its last answer, so that links survive a DNS server that is down.

    Args:
        sources: their endpoints are reported in this order.
        on_change: called with all endpoints, each address once.
    """

    def __init__(self, sources: Sequence[EndpointSource], on_change: Callable[[tuple[Endpoint, ...]], None]) -> None:
        self._sources = sources
        self._on_change = on_change
        self._endpoints: dict[EndpointSource, tuple[Endpoint, ...]] = {}
        self._errors: dict[EndpointSource, str] = {}

    async def run(self) -> None:
        """Read the sources until cancelled."""
        await asyncio.gather(*(self._follow(source) for source in self._sources))

    async def _follow(self, source: EndpointSource) -> None:
        while True:
            await self._ask(source)
            if source.period_s is None:
                return
            await asyncio.sleep(source.period_s)

    async def _ask(self, source: EndpointSource) -> None:
        try:
            endpoints = tuple(await source.resolve())
            total = len(endpoints)
            require(total <= MAX_ENDPOINTS, source.text, total, f"at most {MAX_ENDPOINTS} endpoints")
        except (OSError, InvalidInput) as error:
            metrics.reload_failed("endpoints")
            if self._errors.get(source) != str(error):
                self._errors[source] = str(error)
                count = len(self._endpoints.get(source, ()))
                logger.warning("endpoints not found: source=%s kept=%d error=%s", source.text, count, error)
            return
        self._errors.pop(source, None)
        if endpoints != self._endpoints.get(source):
            self._endpoints[source] = endpoints
            addresses = ",".join(each.address for each in endpoints)
            logger.info("endpoints: source=%s addresses=%s", source.text, addresses)
            self._on_change(self._all_endpoints())

    def _all_endpoints(self) -> tuple[Endpoint, ...]:
        by_address: dict[str, Endpoint] = {}
        for source in self._sources:
            for endpoint in self._endpoints.get(source, ()):
                by_address.setdefault(endpoint.address, endpoint)
        return tuple(by_address.values())


async def _fixed_address(address: str) -> Sequence[Endpoint]:
    return (Endpoint(address),)


async def _look_up(host: str, port: int) -> Sequence[Endpoint]:
    """Every address of a name, sorted: servers rotate their answers."""
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(answer[4][0]) for answer in answers})
    return [Endpoint(f"[{each}]:{port}" if ":" in each else f"{each}:{port}", host) for each in addresses]


def _read(text: str, path: Path) -> Sequence[Endpoint]:
    """Read one HOST:PORT a line; empty lines and lines that begin with # are ignored."""
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
