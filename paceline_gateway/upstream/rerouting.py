"""Generations that outlive their coordinator.

A lost one goes on at the first coordinator that can go on with its text. One that is refused for want of room asks
the other coordinators.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

from paceline.client import Patience, Progress
from paceline.protocol.errors import Overloaded, PacelineError, PeerUnavailable
from paceline.protocol.generation import GenerateEvent, GenerateRequest
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.coordinators import Coordinator, Coordinators, Upstream


class Rerouting:
    """Runs one caller's generations; `first` is the coordinator that their request was read for."""

    def __init__(self, coordinators: Coordinators, first: Upstream, caller: HttpCaller) -> None:
        self._coordinators = coordinators
        self._first = first
        self._caller = caller

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Yield one generation's events; closing the generator cancels the generation.

        A lost generation goes on behind its last token at a coordinator of the same fingerprint, so its text is the
        same. One that finds no room asks each of those once, at once and within the budget.

        Raises:
            Overloaded: none of them has room; with the smallest hint.
            PacelineError: it failed, or no coordinator went on with it within the time to wait for one.
        """
        progress = Progress(request, self._coordinators.budget)
        upstream: Upstream | None = self._first
        failures = _Failures()
        while True:
            try:
                upstream = upstream or await self._next_upstream(request, failures)
                async with aclosing(self._events(upstream, progress)) as events:
                    async for event in events:
                        yield event
                return
            except (Overloaded, PeerUnavailable) as error:
                if not progress.fruitless:
                    failures = _Failures()
                failures.add(error, upstream)
                upstream = await self._upstream_with_room(progress, failures)
                if upstream is not None:
                    continue
                pauses = progress.retry_pauses(
                    failures.smallest_refusal or error, Patience(self._coordinators.wait_s)
                )
                if pauses is None:
                    return
            failures = _Failures()
            for pause_s in pauses:
                await asyncio.sleep(pause_s)

    async def _events(self, upstream: Upstream, progress: Progress) -> AsyncGenerator[GenerateEvent, None]:
        """Yield the events that one coordinator adds."""
        with upstream.coordinator.client(self._caller) as client:
            async with aclosing(client.stream(progress.rest)) as events:
                async for client_event in events:
                    upstream.coordinator.note_answer()
                    if (event := progress.take(client_event)) is not None:
                        yield event

    async def _upstream_with_room(self, progress: Progress, failures: _Failures) -> Upstream | None:
        """Return a coordinator that may have room where others had none; None: there is none, or no try is left."""
        if failures.smallest_refusal is None or failures.is_of_the_key or progress.end_event is not None:
            return None
        try:
            upstream = await self._next_upstream(progress.request, failures)
        except PacelineError:
            return None  # the refusal is the news, not why the others don't serve
        return upstream if progress.retry_elsewhere() else None

    async def _next_upstream(self, request: GenerateRequest, failures: _Failures) -> Upstream:
        fingerprint = self._first.fingerprint(request.acceptance)

        def fits(upstream: Upstream) -> bool:
            is_same = upstream.fingerprint(request.acceptance) == fingerprint
            return is_same and upstream.coordinator not in failures.coordinators

        return await self._coordinators.choose_now(self._caller, fits)


class _Failures:
    """The failures of one generation since its last token or pause."""

    def __init__(self) -> None:
        self.coordinators: set[Coordinator] = set()
        self.smallest_refusal: Overloaded | None = None
        """The refusal with the smallest hint; None: no coordinator has refused."""
        self.is_of_the_key = False

    def add(self, error: Overloaded | PeerUnavailable, upstream: Upstream | None) -> None:
        """Count the failure of one coordinator; `upstream` None: there was none to ask."""
        if upstream is not None:
            self.coordinators.add(upstream.coordinator)
        if isinstance(error, Overloaded):
            self.is_of_the_key = error.is_of_the_key
            self.smallest_refusal = min(self.smallest_refusal or error, error, key=_hint_ms)


def _hint_ms(error: Overloaded) -> float:
    return math.inf if error.retry_after_ms is None else error.retry_after_ms
