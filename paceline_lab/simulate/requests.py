"""A simulated request: asked of a coordinator, as a client does, until its answer is there; and what it came to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.protocol import codec
from paceline.protocol.generation import Finished, GenerateRequest, Tokens
from paceline.protocol.records import GenerationStats
from paceline.protocol.sampling import SamplingParams
from paceline_lab.simulate.script import MARKS, Script
from paceline_lab.simulate.services import SimulatedCell, SimulatedCoordinator
from paceline_lab.simulate.trace import TracedRequest


@dataclass
class RequestTotals:
    """What a request came to; milliseconds from the run's beginning. Only rounds behind the first are timed.

    Attributes:
        arrival_ms, first_ms, end_ms: when it came, when its first tokens were there, and its last.
        first_tokens: of the first round.
        waited_ms, queue_ms, step_ms: of its rounds: for drafts, for a step, in steps.
        refused, limited: by services without room, or by the tenant's own limits.
    """

    arrival_ms: float
    group: int = 0
    first_ms: float = 0.0
    first_tokens: int = 0
    end_ms: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted_rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    hits: int = 0
    self_started: int = 0
    waited_ms: float = 0.0
    queue_ms: float = 0.0
    step_ms: float = 0.0
    refused: bool = False
    limited: bool = False

    @property
    def has_ended(self) -> bool:
        """Or was refused."""
        return self.refused or self.end_ms > 0

    @property
    def ms_per_token(self) -> float:
        """Behind the first round."""
        return (self.end_ms - self.first_ms) / max(1, self.tokens - self.first_tokens)

    def add(self, stats: GenerationStats) -> None:
        """Count the rounds of an answer, or of what a coordinator wrote of it."""
        for record in stats.records:
            self.rounds += 1
            self.self_started += record.self_started
            self.hits += record.cache_hit
            if record.proposed:
                self.drafted_rounds += 1
                self.proposed += record.proposed
                self.accepted += record.accepted
        for record in stats.records[1:]:
            self.waited_ms += record.draft_wait_ms
            self.queue_ms += record.target.queue_ms
            self.step_ms += record.target.forward_ms + record.target.sample_ms


REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


class Refused(Exception):
    """A coordinator refuses a request, or gives it up."""


def _nobody(tokens: int) -> None:
    """Nobody counts tokens as they come."""


class ClientEnd:
    """Stands for the client's `grpc.aio.ServicerContext`, and keeps what it gets.

    `on_tokens` is told of tokens as they come, with how many they are.
    """

    def __init__(self, on_tokens: Callable[[int], None] = _nobody) -> None:
        self.tokens: list[int] = []
        self.finished: Finished | None = None
        self._on_tokens = on_tokens

    def invocation_metadata(self) -> tuple[()]:
        """Return nothing."""
        return ()

    def time_remaining(self) -> None:
        """Return no deadline."""

    def peer(self) -> str:
        """Return its name."""
        return "client"

    async def write(self, message: Any) -> None:
        """Take an event of the answer."""
        event = codec.decode_generate_event(message)
        if isinstance(event, Tokens):
            self.tokens += event.token_ids
            self._on_tokens(len(event.token_ids))
        elif isinstance(event, Finished):
            self.finished = event

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """End the call with an error; one that no load explains is a defect."""
        assert code in REFUSALS, f"a request fails: {code.name}: {details}"
        raise Refused(f"{code.name}: {details}")


class RequestRun:
    """Runs one request until its answer is there.

    Args:
        cell: where.
        number: of the request: its seed, and what tells its prompt from all others.
        on_tokens: told of tokens as they come, with how many they are.
    """

    def __init__(
        self, cell: SimulatedCell, number: int, request: TracedRequest, on_tokens: Callable[[int], None] = _nobody
    ) -> None:
        self.totals = RequestTotals(cell.now_ms, request.group)
        self._cell, self._number, self._request, self._on_tokens = cell, number, request, on_tokens
        self._prompt = (*request.prompt[:-1], MARKS + number)
        cell.scripts.add(self._prompt, Script(request.answer, request.ranks, request.chances))

    async def run(self, home: SimulatedCoordinator) -> RequestTotals:
        """Ask a coordinator, and others if it fails."""
        text: list[int] = []
        while len(text) < self._request.tokens:
            client = ClientEnd(self._on_tokens)
            try:
                await home.serve(self._message(home, text), client)
            except Refused:
                self.totals.refused = not text
                break
            except asyncio.CancelledError:
                if home.is_up:
                    raise
            text += client.tokens
            self.totals.tokens = len(text)
            self._take(client, is_first=len(text) == len(client.tokens))
            if client.finished is None:
                home = await self._cell.find_home()
        self._cell.scripts.forget(self._prompt)
        self.totals.end_ms = self._cell.now_ms
        return self.totals

    def _take(self, client: ClientEnd, *, is_first: bool) -> None:
        if client.finished is None:
            return
        stats = client.finished.stats
        self.totals.add(stats)
        if is_first and stats.records:
            self.totals.first_ms = self.totals.arrival_ms + stats.time_to_first_token_ms
            self.totals.first_tokens = stats.records[0].accepted + 1

    def _message(self, home: SimulatedCoordinator, text: list[int]) -> Any:
        request = GenerateRequest(
            token_ids=self._prompt,
            sampling=SamplingParams(temperature=0.0),
            seed=self._number,
            max_new_tokens=self._request.tokens,
            ignore_eos=True,
            resume_token_ids=tuple(text),
            speculation=home.policy.speculation,
        )
        return codec.encode_generate_request(request)
