"""Generations that outlive their coordinator: one that is lost goes on at the first that can go on with its text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.caller import HttpCaller
from gateway.coordinators import Coordinators, Serving
from paceline.client import Patience, Progress
from paceline.protocol.errors import Overloaded, PeerUnavailable
from paceline.protocol.generation import GenerateEvent, GenerateRequest


class Rerouting:
    """One caller's generations. They begin at one coordinator, the one that their request was read for."""

    def __init__(self, coordinators: Coordinators, begins: Serving, caller: HttpCaller) -> None:
        self._coordinators = coordinators
        self._begins = begins
        self._caller = caller

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Yield one generation's events; closing it cancels the generation.

        A lost one goes on behind its last token, where the fingerprint is the same: so is its text.

        Raises:
            PacelineError: it failed, or nobody has gone on with it within the time to wait for a coordinator.
        """
        progress = Progress(request, self._coordinators.budget)
        serving: Serving | None = self._begins
        while True:
            try:
                serving = serving or await self._another(request)
                async with aclosing(self._events(serving, progress)) as events:
                    async for event in events:
                        yield event
                return
            except (Overloaded, PeerUnavailable) as error:
                pauses = progress.broke(error, Patience(self._coordinators.wait_s))
                if pauses is None:
                    return
            serving = None
            for pause_s in pauses:
                await asyncio.sleep(pause_s)

    async def _events(self, serving: Serving, progress: Progress) -> AsyncGenerator[GenerateEvent, None]:
        """What one coordinator adds."""
        with serving.coordinator.client(self._caller) as client:
            async with aclosing(client.stream(progress.rest)) as events:
                async for arrived in events:
                    if (event := progress.take(arrived)) is not None:
                        yield event

    async def _another(self, request: GenerateRequest) -> Serving:
        wanted = self._begins.fingerprint(request.acceptance)
        return await self._coordinators.first_serving(
            self._caller, lambda serving: serving.fingerprint(request.acceptance) == wanted
        )
