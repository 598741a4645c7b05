"""Generations that outlive their coordinator: one that is lost goes on at the first that can go on with its text, and
one that is refused for want of room asks the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

from paceline.client import Patience, Progress
from paceline.protocol.errors import Overloaded, PacelineError, PeerUnavailable
from paceline.protocol.generation import GenerateEvent, GenerateRequest
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.coordinators import Coordinator, Coordinators, Serving


class Rerouting:
    """One caller's generations. They begin at one coordinator, the one that their request was read for."""

    def __init__(self, coordinators: Coordinators, begins: Serving, caller: HttpCaller) -> None:
        self._coordinators = coordinators
        self._begins = begins
        self._caller = caller

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Yield one generation's events; closing it cancels the generation.

        A lost one goes on behind its last token, where the fingerprint is the same: so is its text. For one
        that there is no room for, each of those is asked once, at once and within the budget.

        Raises:
            Overloaded: none of them has room; with the smallest hint.
            PacelineError: it failed, or nobody has gone on with it within the time to wait for a coordinator.
        """
        progress = Progress(request, self._coordinators.budget)
        serving: Serving | None = self._begins
        failures = _Failures()
        while True:
            try:
                serving = serving or await self._another(request, failures)
                async with aclosing(self._events(serving, progress)) as events:
                    async for event in events:
                        yield event
                return
            except (Overloaded, PeerUnavailable) as error:
                if not progress.fruitless:
                    failures = _Failures()
                failures.add(error, serving)
                serving = await self._with_room(progress, failures)
                if serving is not None:
                    continue
                pauses = progress.retry_pauses(failures.least or error, Patience(self._coordinators.wait_s))
                if pauses is None:
                    return
            failures = _Failures()
            for pause_s in pauses:
                await asyncio.sleep(pause_s)

    async def _events(self, serving: Serving, progress: Progress) -> AsyncGenerator[GenerateEvent, None]:
        """What one coordinator adds."""
        with serving.coordinator.client(self._caller) as client:
            async with aclosing(client.stream(progress.rest)) as events:
                async for arrived in events:
                    serving.coordinator.heard()
                    if (event := progress.take(arrived)) is not None:
                        yield event

    async def _with_room(self, progress: Progress, failures: _Failures) -> Serving | None:
        """Who may have room for what others had none for; None: nobody, or no try is to spare."""
        if failures.least is None or failures.is_of_the_key or progress.end_event is not None:
            return None
        try:
            another = await self._another(progress.request, failures)
        except PacelineError:
            return None  # the refusal is the news, not why the others don't serve
        return another if progress.retry_elsewhere() else None

    async def _another(self, request: GenerateRequest, failures: _Failures) -> Serving:
        wanted = self._begins.fingerprint(request.acceptance)
        return await self._coordinators.first_serving(
            self._caller,
            lambda serving: (
                serving.coordinator not in failures.of and serving.fingerprint(request.acceptance) == wanted
            ),
        )


class _Failures:
    """Of the coordinators that a generation was asked of, one behind the other, since its last token or pause."""

    def __init__(self) -> None:
        self.of: set[Coordinator] = set()
        self.least: Overloaded | None = None
        """The refusal with the smallest hint; None: nobody has refused."""
        self.is_of_the_key = False

    def add(self, error: Overloaded | PeerUnavailable, serving: Serving | None) -> None:
        """Count what the one asked last said; `serving` None: there was none to ask."""
        if serving is not None:
            self.of.add(serving.coordinator)
        if isinstance(error, Overloaded):
            self.is_of_the_key = error.is_of_the_key
            self.least = error if self.least is None else min(self.least, error, key=_hint_ms)


def _hint_ms(error: Overloaded) -> float:
    return math.inf if error.retry_after_ms is None else error.retry_after_ms
