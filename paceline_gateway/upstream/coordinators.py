"""The coordinators behind the gateway: which of them serve, what they serve, and which one a request goes to."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.client import AsyncClient
from paceline.protocol.errors import (
    DeadlineExceeded,
    Overloaded,
    PacelineError,
    PeerUnavailable,
    Unauthenticated,
    UntrustedPeer,
    VocabularyMismatch,
)
from paceline.protocol.generation import ModelDescription
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import NOISE_VERSION
from paceline.rpc.endpoints import Endpoint, EndpointSource, EndpointWatch
from paceline.rpc.retries import Backoff, RetryBudget
from paceline.rpc.tls import channel_credentials
from paceline.runtime.background import BackgroundTasks
from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.hang_watch import HangWatch

logger = logging.getLogger(__name__)

KNOWN_FOR_S = 1.0
"""How long a description counts as new: a target of other weights is noticed that late; and how long a coordinator
that failed is asked last, or one that had no room and did not say for how long."""
MAX_STRANGERS = 32
"""Questions at once for keys that have not been let in: strangers wait for each other, and nobody for them."""
MAX_KNOWN = 1024
"""Keys that a coordinator's answers are kept for: nothing is read for a caller that it has not let in."""
DESCRIBE_TIMEOUT_S = 2.0
"""Longest wait for a description, which takes a coordinator under 1 ms; chosen, not tuned."""
VANISHED_FOR_S = 60.0
"""How long the channels of a coordinator whose address has gone stay open at least: far longer than a request takes
from the choice of its coordinator to the call."""


@dataclass(frozen=True)
class Serving:
    """A coordinator that can take a request, and what it serves."""

    coordinator: Coordinator
    description: ModelDescription

    def fingerprint(self, acceptance: Acceptance) -> str:
        """Changes with whatever a seed's text depends on, beside the request: `system_fingerprint`.

        Under coupled acceptance that is target, tokenizer, noise and the model's defaults; otherwise the drafts, too.
        """
        target, draft = self.description.target, self.description.draft
        facts: list[object] = [NOISE_VERSION, target.model, target.tokenizer, target.vocab_size, target.numeric]
        facts += [self.description.defaults] if self.description.defaults else []
        if acceptance is not Acceptance.COUPLED:
            facts += [acceptance.value, draft.model, draft.numeric, self.description.drafters]
        return f"fp_{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


class Coordinator:
    """One coordinator: its channel, and what it said last."""

    def __init__(self, config: GatewayConfig, endpoint: Endpoint, tokenizer: str) -> None:
        peer = config.reach(endpoint.address, endpoint.server_name)
        self.address = endpoint.address
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.failed_at = 0.0
        self._tokenizer = tokenizer
        # Not resumed by the client: a lost generation may go on at another coordinator.
        self._generating = AsyncClient(peer, timeout_s=config.generation_timeout_s, resume_wait_s=0)
        self._asking = AsyncClient(peer, timeout_s=DESCRIBE_TIMEOUT_S)
        self._hanging = HangWatch()
        self._strangers = asyncio.Semaphore(MAX_STRANGERS)
        self._known: dict[str | None, tuple[ModelDescription, float]] = {}
        """What callers of each key have been told that had a target then, and when."""
        self._full_until: dict[str | None, float] = {}
        """When it may have room for callers of each key that it had none for, as it said."""
        self._questions: dict[str | None, asyncio.Task[ModelDescription]] = {}
        """Under way, by the key of those who wait for the answer."""

    @contextmanager
    def client(self, caller: HttpCaller) -> Iterator[AsyncClient]:
        """What one of a caller's generations runs on, counted meanwhile.

        One that is lost here is news: whatever is known of this coordinator is forgotten. One that finds no room
        is news for its key alone, which may have taken its share of the places.
        """
        self.running += 1
        self._idle.clear()
        try:
            yield self._generating.calling(api_key=caller.api_key, request_id=caller.request_id)
        except (PeerUnavailable, UntrustedPeer):
            self.failed_at = time.monotonic()
            self._known.clear()
            raise
        except Overloaded as error:
            if not error.is_of_the_key:
                self._note_full(caller, error)
            raise
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    def heard(self) -> None:
        """It has said something of a generation."""
        self._hanging.heard()

    def is_full(self, caller: HttpCaller) -> bool:
        """Whether it has lately had no room for this caller's key, and said that it is so still."""
        return time.monotonic() < self._full_until.get(caller.api_key, 0.0)

    def _note_full(self, caller: HttpCaller, error: Overloaded) -> None:
        if len(self._full_until) >= MAX_KNOWN:
            self._full_until.clear()
        hint_s = KNOWN_FOR_S if error.retry_after_ms is None else error.retry_after_ms / 1e3
        self._full_until[caller.api_key] = time.monotonic() + hint_s

    async def close_when_idle(self) -> None:
        """Close the channels once what runs on them has ended."""
        await asyncio.sleep(VANISHED_FOR_S)
        await self._idle.wait()
        await self.close()

    async def ask(self, caller: HttpCaller) -> ModelDescription:
        """What it serves, from itself and now.

        Raises:
            PacelineError: it doesn't answer, or refuses the caller.
            VocabularyMismatch: its target's tokenizer is not this gateway's.
        """
        asking = self._asking.calling(api_key=caller.api_key)
        try:
            with self._hanging.asking():
                described = (await asking.describe_models())[0]
            self._check_tokenizer(described)
        except Unauthenticated:
            raise  # which says nothing of the coordinator
        except PacelineError as error:
            self.failed_at = time.monotonic()
            if isinstance(error, PeerUnavailable | DeadlineExceeded):
                raise PeerUnavailable(f"coordinator at {self.address}: {error.message}") from error
            raise
        self.failed_at = 0.0
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known.pop(caller.api_key, None)
        if described.target_ready:
            self._known[caller.api_key] = (described, time.monotonic())
        return described

    async def described(self, caller: HttpCaller) -> ModelDescription:
        """What it serves, as it told this key a moment ago if it had a target then. Raises as `ask`.

        It is asked again while its answer is still new, so that of requests that follow each other none waits.
        """
        known, at = self._known.get(caller.api_key, (None, 0.0))
        age_s = time.monotonic() - at
        if known is None or age_s >= KNOWN_FOR_S / 2:
            question = self._questions.get(caller.api_key) or self._question(caller)
            if known is None or age_s >= KNOWN_FOR_S:
                return await asyncio.shield(question)
        return known

    def _question(self, caller: HttpCaller) -> asyncio.Task[ModelDescription]:
        """One for all requests that come meanwhile; it outlives those that leave."""
        key = caller.api_key
        question = self._questions[key] = asyncio.create_task(self._asked(caller))

        def answered(task: asyncio.Task[ModelDescription]) -> None:
            del self._questions[key]
            if not task.cancelled():
                task.exception()  # those who wait raise it

        question.add_done_callback(answered)
        return question

    async def _asked(self, caller: HttpCaller) -> ModelDescription:
        if caller.api_key in self._known:
            return await self.ask(caller)
        async with self._strangers:
            return await self.ask(caller)

    async def close(self) -> None:
        """Close the channels; what runs is cancelled."""
        await self._generating.close()
        await self._asking.close()

    def _check_tokenizer(self, described: ModelDescription) -> None:
        theirs = described.target.tokenizer
        if theirs and theirs != self._tokenizer:
            raise VocabularyMismatch(
                f"coordinator at {self.address}: its target's tokenizer {theirs[:12]} is not the gateway's "
                f"{self._tokenizer[:12]}; set the gateway's model to the target's, {described.target.model}"
            )


def _any(serving: Serving) -> bool:
    """No demand on a coordinator's target."""
    return True


class Coordinators:
    """All of them, in front of targets of one model; belongs to the running event loop.

    Raises:
        InvalidInput: an address is none of the forms of `EndpointSource`, or a TLS file is not what it should be.
    """

    def __init__(self, config: GatewayConfig, tokenizer: str) -> None:
        self.wait_s = config.coordinator_wait_ms / 1e3
        """Longest wait for one that serves."""
        self.budget = RetryBudget()
        """Of generations that are lost, or refused, and go on elsewhere."""
        self._config = config
        self._tokenizer = tokenizer
        self.all: Sequence[Coordinator] = ()
        self._tasks = BackgroundTasks(self._broken)
        self._vanished: set[Coordinator] = set()
        channel_credentials(config.reach("checked:1"), "coordinator.")
        sources = [EndpointSource.parse("coordinator.address", text) for text in config.coordinator.address]
        self._missing = f"no coordinator is found: coordinator.address = {', '.join(config.coordinator.address)}"
        self._tasks.spawn(EndpointWatch(sources, self._update).run())

    async def serving(self, caller: HttpCaller) -> Serving:
        """The coordinator for a request: the one that has fewest of this gateway's, of those that have a target.

        One that is full is asked where all are.

        Raises:
            PeerUnavailable: none has one, for as long as the configuration allows.
            Unauthenticated: none serves, and one at least refuses the caller.
            PacelineError: none serves, for reasons that waiting doesn't mend: the last one's.
        """
        deadline = time.monotonic() + self.wait_s
        backoff = Backoff()
        while True:
            try:
                return await self.first_serving(caller)
            except PeerUnavailable as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
                pause_s = backoff.next_s(error.retry_after_ms)
            await asyncio.sleep(min(left_s, pause_s))

    async def first_serving(self, caller: HttpCaller, fits: Callable[[Serving], bool] = _any) -> Serving:
        """As `serving`, of those that fit, and without waiting. Raises as `serving`."""
        return await self._first(caller, lambda coordinator: coordinator.described(caller), fits)

    async def tenant(self, caller: HttpCaller) -> str:
        """Whose a caller's requests are; empty: no key is asked for, or nobody is there who knows.

        Raises:
            Unauthenticated: its key is none.
        """
        try:
            return (await self.first_serving(caller)).description.tenant
        except Unauthenticated:
            raise
        except PacelineError:
            return ""

    async def models(self, caller: HttpCaller) -> ModelDescription:
        """What is served, as one of them says now, one that has a target if any has. Raises as `serving`."""
        heard: list[ModelDescription] = []

        async def ask(coordinator: Coordinator) -> ModelDescription:
            heard.append(await coordinator.ask(caller))
            return heard[-1]

        try:
            return (await self._first(caller, ask, _any)).description
        except PacelineError:
            if not heard:
                raise
            return heard[-1]

    async def check(self) -> None:
        """Return if a request would find a target, as far as anybody may know.

        Raises:
            PacelineError: it would not.
        """
        try:
            described = await self.models(HttpCaller(""))
        except Unauthenticated:
            return  # it answers, and tells the rest to callers with a key alone
        if not described.target_ready:
            raise PeerUnavailable("no coordinator has a link to its target")

    async def close(self) -> None:
        """Close all channels."""
        await self._tasks.close()
        await asyncio.gather(*(coordinator.close() for coordinator in (*self.all, *self._vanished)))

    def _update(self, endpoints: Sequence[Endpoint]) -> None:
        """New addresses get channels; what runs at a vanished one goes on."""
        known = {coordinator.address: coordinator for coordinator in self.all}
        self.all = [
            known.get(endpoint.address) or Coordinator(self._config, endpoint, self._tokenizer)
            for endpoint in endpoints
        ]
        for coordinator in set(known.values()).difference(self.all):
            logger.info("endpoint vanished: address=%s requests=%d", coordinator.address, coordinator.running)
            self._vanished.add(coordinator)
            self._tasks.spawn(self._let_go(coordinator))

    async def _let_go(self, coordinator: Coordinator) -> None:
        await coordinator.close_when_idle()
        self._vanished.discard(coordinator)

    @staticmethod
    def _broken(error: BaseException) -> None:
        logger.error("endpoints are followed no longer", exc_info=error)

    async def _first(
        self,
        caller: HttpCaller,
        ask: Callable[[Coordinator], Awaitable[ModelDescription]],
        fits: Callable[[Serving], bool],
    ) -> Serving:
        """The first, in the order of preference, that answers, has a target and fits; without waiting.

        One that fails in whatever way takes nothing from the others: while keys are changed, some know a new one
        and some don't. Raises as `serving`: that a key is refused, for which waiting is no remedy, else the last
        reason, of those that may pass if there are any.
        """
        failures: list[PacelineError] = []
        for coordinator in self._in_order(caller):
            try:
                serving = Serving(coordinator, await ask(coordinator))
            except PacelineError as error:
                failures.append(error)
                continue
            ready = serving.description.target_ready
            if ready and fits(serving):
                return serving
            lacks = "its target is another one" if ready else "no link to its target yet"
            failures.append(PeerUnavailable(f"coordinator at {coordinator.address}: {lacks}"))
        refused = [failure for failure in failures if isinstance(failure, Unauthenticated)]
        passing = [failure for failure in failures if isinstance(failure, PeerUnavailable)]
        raise (refused or passing or failures or [PeerUnavailable(self._missing)])[-1]

    def _in_order(self, caller: HttpCaller) -> list[Coordinator]:
        now = time.monotonic()

        def least(each: Coordinator) -> tuple[bool, bool, int]:
            return now - each.failed_at < KNOWN_FOR_S, each.is_full(caller), each.running

        return sorted(self.all, key=least)
