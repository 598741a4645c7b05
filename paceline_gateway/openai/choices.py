"""The choices of one HTTP request: each is a generation of its own, and all run at once.

Nothing is read ahead of the client by more than `READ_AHEAD` events: a coordinator that isn't read pauses the rounds.
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


class Generating(Protocol):
    """Runs generations, as `paceline.client.AsyncClient` does."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Events of one; closing it cancels the generation."""


@dataclass(frozen=True)
class ChoiceEvent:
    """What came of one choice; choices are counted over prompts, then samples."""

    index: int
    event: GenerateEvent


async def run_choices(
    client: Generating, requests: Sequence[GenerateRequest], samples: int
) -> AsyncGenerator[ChoiceEvent, None]:
    """Yield the events of `samples` choices for each request, as they come; closing it cancels all.

    Raises:
        PacelineError: of the first that fails; the others are cancelled.
    """
    if len(requests) * samples > 1:
        async with aclosing(_Choices(client, samples).events(requests)) as merged:
            async for choice in merged:
                yield choice
        return
    async with aclosing(client.stream(requests[0])) as events:
        async for event in events:
            yield ChoiceEvent(0, event)


class _Choices:
    """Generations side by side. A sample that follows another waits for its seed, so that all have the same."""

    def __init__(self, client: Generating, samples: int) -> None:
        self._client = client
        self._samples = samples
        self._come: asyncio.Queue[ChoiceEvent | Exception] = asyncio.Queue(READ_AHEAD)
        self._tasks: set[asyncio.Task[None]] = set()

    async def events(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[ChoiceEvent, None]:
        left = len(requests) * self._samples
        try:
            for place, request in enumerate(requests):
                self._begin(place * self._samples, request)
            while left:
                come = await self._come.get()
                if isinstance(come, Exception):
                    raise come
                left -= isinstance(come.event, Finished)
                yield come
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, index: int, request: GenerateRequest) -> None:
        task = asyncio.create_task(self._read(index, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(self._client.stream(request)) as events:
                async for event in events:
                    if isinstance(event, Started) and request.sample_index == 0:
                        for sample in range(1, self._samples):
                            self._begin(index + sample, replace(request, seed=event.seed, sample_index=sample))
                    await self._come.put(ChoiceEvent(index, event))
        except Exception as error:  # noqa: BLE001 - it is raised where the events are read
            await self._come.put(error)
