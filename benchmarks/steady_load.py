"""Requests that run all the time on several coordinators, each text compared with what it is undisturbed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.reporting.figures import percentile
from benchmarks.reporting.presentation import markdown_table
from paceline.client import AsyncClient
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest, SpeculationSettings, Tokens
from paceline.runtime.config import PeerSettings

TARGET = "table:vocab=300,seed=1,eos=299,step_ms=4"
DRAFT = "table:vocab=300,seed=1,eos=299,noise=0.2,step_ms=1"
TEXTS = 16
TOKENS = 200
USERS = 3
"""Requests at once on each coordinator."""
BETWEEN_REQUESTS = 8
"""Requests that end between two events, so that every event meets running ones."""


def request(number: int, *, off: bool = False) -> GenerateRequest:
    """One of `TEXTS` requests."""
    return GenerateRequest(
        token_ids=(10, 200, 30 + number % TEXTS),
        seed=number % TEXTS,
        max_new_tokens=TOKENS,
        ignore_eos=True,
        speculation=SpeculationSettings(off=off),
    )


@dataclass(frozen=True)
class SeenByUsers:
    """What the users saw from one moment on."""

    requests: int
    lost: int
    changed: int
    longest_gap_ms: float

    def columns(self) -> dict[str, object]:
        """The last columns of an event's row."""
        return {
            "requests ended meanwhile": self.requests,
            "lost": self.lost,
            "changed": self.changed,
            "longest gap ms": self.longest_gap_ms,
        }


@dataclass
class Load:
    """What the users saw. Gaps are between two messages with tokens of a stream, in milliseconds."""

    expected: Sequence[tuple[int, ...]]
    requests: int = 0
    lost: list[str] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def user(self, coordinator: str | PeerSettings, first: int) -> None:
        """Ask one request after the other until it is over."""
        number = first
        async with AsyncClient(coordinator) as client:
            while not self.over.is_set():
                await self._ask(client, number)
                number += 1

    async def _ask(self, client: AsyncClient, number: int) -> None:
        ids: list[int] = []
        last = time.perf_counter()
        try:
            async for event in client.stream(request(number)):
                if isinstance(event, Tokens):
                    ids += event.token_ids
                    now = time.perf_counter()
                    self.gaps_ms.append((now - last) * 1e3)
                    last = now
        except PacelineError as error:
            self.lost.append(f"{error.reason}: {error.message}")
        else:
            if tuple(ids) != self.expected[number % TEXTS]:
                self.changed.append(number)
        self.requests += 1

    def mark(self) -> tuple[int, int, int, int]:
        """This moment, for `since`."""
        return self.requests, len(self.lost), len(self.changed), len(self.gaps_ms)

    def since(self, mark: tuple[int, int, int, int]) -> SeenByUsers:
        """What the users saw since then."""
        requests, lost, changed, gaps = mark
        return SeenByUsers(
            requests=self.requests - requests,
            lost=len(self.lost) - lost,
            changed=len(self.changed) - changed,
            longest_gap_ms=max(self.gaps_ms[gaps:], default=0.0),
        )

    def start(self, coordinators: Sequence[str | PeerSettings]) -> list[asyncio.Task[None]]:
        """`USERS` of each coordinator, who ask until it is over."""
        return [
            asyncio.create_task(self.user(coordinator, place * USERS + number))
            for place, coordinator in enumerate(coordinators)
            for number in range(USERS)
        ]

    async def end(self, users: Sequence[asyncio.Task[None]]) -> None:
        """Let them finish what they ask for."""
        self.over.set()
        await asyncio.gather(*users)

    @property
    def failures(self) -> list[str]:
        """What must not be, in words."""
        return [*self.lost, *(f"text {number} changed" for number in self.changed)]

    def table(self, events: Mapping[str, object]) -> str:
        """All together: what happened, then what the users saw of it."""
        totals = {
            "requests": self.requests,
            **events,
            "lost": len(self.lost),
            "changed texts": len(self.changed),
            "gap between tokens p50, ms": percentile(self.gaps_ms, 50),
            "gap between tokens p99, ms": percentile(self.gaps_ms, 99),
            "longest gap, ms": max(self.gaps_ms),
        }
        return markdown_table([{"what": name, "value": value} for name, value in totals.items()])


async def undisturbed(coordinator: str | PeerSettings) -> list[tuple[int, ...]]:
    """Every text, target-only."""
    async with AsyncClient(coordinator) as client:
        wanted = [client.generate(request(number, off=True)) for number in range(TEXTS)]
        return [generation.token_ids for generation in await asyncio.gather(*wanted)]
