"""The choices of one HTTP request: each is a generation of its own, and all run at once.

At most `READ_AHEAD` events are read ahead of the client: a coordinator whose events are not read pauses the rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.protocol.generation import Finished, GenerateEvent, GenerateRequest, Started

READ_AHEAD = 16
"""Events of all choices that wait for a slow reader. Each is bounded by what a coordinator has unread at once."""


class GenerationClient(Protocol):
    """Runs generations, as `paceline.client.AsyncClient` does."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Yield the events of one generation; closing the generator cancels it."""


@dataclass(frozen=True)
class ChoiceEvent:
    """One event of a choice; `index` counts over prompts, then samples."""

    index: int
    event: GenerateEvent


async def run_choices(
    client: GenerationClient, requests: Sequence[GenerateRequest], samples: int
) -> AsyncGenerator[ChoiceEvent, None]:
    """Yield the events of `samples` choices for each request, as they come; closing the generator cancels all.

    Raises:
        PacelineError: the failure of the first choice that fails; the others are cancelled.
    """
    if len(requests) * samples > 1:
        async with aclosing(_Choices(client, samples).events(requests)) as choices:
            async for choice in choices:
                yield choice
        return
    async with aclosing(client.stream(requests[0])) as events:
        async for event in events:
            yield ChoiceEvent(0, event)


class _Choices:
    """Runs generations side by side; further samples wait for the seed of the first, so that all have the same."""

    def __init__(self, client: GenerationClient, samples: int) -> None:
        self._client = client
        self._samples = samples
        self._events: asyncio.Queue[ChoiceEvent | Exception] = asyncio.Queue(READ_AHEAD)
        self._tasks: set[asyncio.Task[None]] = set()

    async def events(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[ChoiceEvent, None]:
        open_count = len(requests) * self._samples
        try:
            for place, request in enumerate(requests):
                self._start(place * self._samples, request)
            while open_count:
                choice = await self._events.get()
                if isinstance(choice, Exception):
                    raise choice
                open_count -= isinstance(choice.event, Finished)
                yield choice
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, index: int, request: GenerateRequest) -> None:
        task = asyncio.create_task(self._run(index, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(self._client.stream(request)) as events:
                async for event in events:
                    if isinstance(event, Started) and request.sample_index == 0:
                        for sample_index in range(1, self._samples):
                            sample = replace(request, seed=event.seed, sample_index=sample_index)
                            self._start(index + sample_index, sample)
                    await self._events.put(ChoiceEvent(index, event))
        except Exception as error:  # noqa: BLE001 - it is raised where the events are read
            await self._events.put(error)
