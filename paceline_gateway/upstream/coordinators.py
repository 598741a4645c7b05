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

DESCRIPTION_FRESH_S = 1.0
"""How long a description counts as new: a target of other weights is noticed that late.

A coordinator that failed is asked last for as long, and so is one that had no room and did not say for how long."""
MAX_NEW_KEY_QUERIES = 32
"""Queries at once for keys that a coordinator has not let in: they wait for each other, and nobody waits for them."""
MAX_CALLER_KEYS = 1024
"""Keys whose answers are kept for each coordinator: nothing is read for a caller that it has not let in."""
DESCRIBE_TIMEOUT_S = 2.0
"""Longest wait for a description, which takes a coordinator under 1 ms; chosen, not tuned."""
DRAIN_DELAY_S = 60.0
"""How long the channels of a coordinator whose address has gone stay open at least.

A request takes far less from the choice of its coordinator to the call."""


@dataclass(frozen=True)
class Upstream:
    """A coordinator that can take a request, and what it serves."""

    coordinator: Coordinator
    description: ModelDescription

    def fingerprint(self, acceptance: Acceptance) -> str:
        """Return `system_fingerprint`, which changes with all that a seed's text depends on beside the request.

        Under coupled acceptance that is target, tokenizer, noise and the model's defaults; otherwise the drafts, too.
        """
        target, draft = self.description.target, self.description.draft
        facts: list[object] = [NOISE_VERSION, target.model, target.tokenizer, target.vocab_size, target.numeric]
        facts += [self.description.defaults] if self.description.defaults else []
        if acceptance is not Acceptance.COUPLED:
            facts += [acceptance.value, draft.model, draft.numeric, self.description.drafters]
        return f"fp_{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


class Coordinator:
    """One coordinator: its channels, and what it said last."""

    def __init__(self, config: GatewayConfig, endpoint: Endpoint, tokenizer: str) -> None:
        peer = config.reach(endpoint.address, endpoint.server_name)
        self.address = endpoint.address
        self.request_count = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.failed_at = 0.0
        self._tokenizer = tokenizer
        # Not resumed by the client: a lost generation may go on at another coordinator.
        self._generation_client = AsyncClient(peer, timeout_s=config.generation_timeout_s, resume_wait_s=0)
        self._query_client = AsyncClient(peer, timeout_s=DESCRIBE_TIMEOUT_S)
        self._hang_watch = HangWatch()
        self._new_key_queries = asyncio.Semaphore(MAX_NEW_KEY_QUERIES)
        self._descriptions: dict[str | None, tuple[ModelDescription, float]] = {}
        """By the callers' key: the last description that had a target, and when it came."""
        self._full_until: dict[str | None, float] = {}
        """By the callers' key: when there may be room again, as the coordinator said."""
        self._queries: dict[str | None, asyncio.Task[ModelDescription]] = {}
        """By the callers' key: the query that is under way."""

    @contextmanager
    def client(self, caller: HttpCaller) -> Iterator[AsyncClient]:
        """Yield the client for one generation of a caller, and count that meanwhile.

        A generation that is lost here is news: all descriptions are forgotten. One that finds no room is news for
        its key alone, which may have taken its share of the places.
        """
        self.request_count += 1
        self._idle.clear()
        try:
            yield self._generation_client.calling(api_key=caller.api_key, request_id=caller.request_id)
        except (PeerUnavailable, UntrustedPeer):
            self.failed_at = time.monotonic()
            self._descriptions.clear()
            raise
        except Overloaded as error:
            if not error.is_of_the_key:
                self._note_full(caller, error)
            raise
        finally:
            self.request_count -= 1
            if not self.request_count:
                self._idle.set()

    def note_answer(self) -> None:
        """Note that the coordinator has sent an event of a generation."""
        self._hang_watch.note_answer()

    def is_full(self, caller: HttpCaller) -> bool:
        """Whether the coordinator had no room for this caller's key, and by its own word has none yet."""
        return time.monotonic() < self._full_until.get(caller.api_key, 0.0)

    def _note_full(self, caller: HttpCaller, error: Overloaded) -> None:
        if len(self._full_until) >= MAX_CALLER_KEYS:
            self._full_until.clear()
        hint_s = DESCRIPTION_FRESH_S if error.retry_after_ms is None else error.retry_after_ms / 1e3
        self._full_until[caller.api_key] = time.monotonic() + hint_s

    async def close_when_idle(self) -> None:
        """Close the channels once all that runs on them has ended."""
        await asyncio.sleep(DRAIN_DELAY_S)
        await self._idle.wait()
        await self.close()

    async def describe(self, caller: HttpCaller) -> ModelDescription:
        """Ask the coordinator what it serves.

        Raises:
            PacelineError: it doesn't answer, or refuses the caller.
            VocabularyMismatch: its target's tokenizer is not this gateway's.
        """
        client = self._query_client.calling(api_key=caller.api_key)
        try:
            with self._hang_watch.query():
                description = (await client.describe_models())[0]
            self._check_tokenizer(description)
        except Unauthenticated:
            raise  # which says nothing of the coordinator
        except PacelineError as error:
            self.failed_at = time.monotonic()
            if isinstance(error, PeerUnavailable | DeadlineExceeded):
                raise PeerUnavailable(f"coordinator at {self.address}: {error.message}") from error
            raise
        self.failed_at = 0.0
        if len(self._descriptions) >= MAX_CALLER_KEYS:
            self._descriptions.clear()
        self._descriptions.pop(caller.api_key, None)
        if description.target_ready:
            self._descriptions[caller.api_key] = (description, time.monotonic())
        return description

    async def recent_description(self, caller: HttpCaller) -> ModelDescription:
        """Return what the coordinator told this key a moment ago if it had a target then. Raises as `describe`.

        It is asked again while its answer is still new, so that of requests that follow each other none waits.
        """
        description, described_at = self._descriptions.get(caller.api_key, (None, 0.0))
        age_s = time.monotonic() - described_at
        if description is None or age_s >= DESCRIPTION_FRESH_S / 2:
            query = self._queries.get(caller.api_key) or self._start_query(caller)
            if description is None or age_s >= DESCRIPTION_FRESH_S:
                return await asyncio.shield(query)
        return description

    def _start_query(self, caller: HttpCaller) -> asyncio.Task[ModelDescription]:
        """Start one query for all requests that come meanwhile; it outlives those that leave."""
        key = caller.api_key
        query = self._queries[key] = asyncio.create_task(self._describe_in_turn(caller))

        def forget(task: asyncio.Task[ModelDescription]) -> None:
            del self._queries[key]
            if not task.cancelled():
                task.exception()  # those who wait raise it

        query.add_done_callback(forget)
        return query

    async def _describe_in_turn(self, caller: HttpCaller) -> ModelDescription:
        if caller.api_key in self._descriptions:
            return await self.describe(caller)
        async with self._new_key_queries:
            return await self.describe(caller)

    async def close(self) -> None:
        """Close the channels and cancel what runs on them."""
        await self._generation_client.close()
        await self._query_client.close()

    def _check_tokenizer(self, description: ModelDescription) -> None:
        tokenizer = description.target.tokenizer
        if tokenizer and tokenizer != self._tokenizer:
            raise VocabularyMismatch(
                f"coordinator at {self.address}: its target's tokenizer {tokenizer[:12]} is not the gateway's "
                f"{self._tokenizer[:12]}; set the gateway's model to the target's, {description.target.model}"
            )


def _any_upstream(upstream: Upstream) -> bool:
    """Demand nothing of a coordinator's target."""
    return True


class Coordinators:
    """All coordinators of this gateway, in front of targets of one model; belongs to the running event loop.

    Raises:
        InvalidInput: an address is none of the forms of `EndpointSource`, or a TLS file is not what it should be.
    """

    def __init__(self, config: GatewayConfig, tokenizer: str) -> None:
        self.wait_s = config.coordinator_wait_ms / 1e3
        """Longest wait for a coordinator that serves."""
        self.budget = RetryBudget()
        """For generations that are lost, or refused, and go on elsewhere."""
        self._config = config
        self._tokenizer = tokenizer
        self.members: Sequence[Coordinator] = ()
        self._tasks = BackgroundTasks(self._log_watch_end)
        self._draining_coordinators: set[Coordinator] = set()
        channel_credentials(config.reach("checked:1"), "coordinator.")
        sources = [EndpointSource.parse("coordinator.address", text) for text in config.coordinator.address]
        addresses = ", ".join(config.coordinator.address)
        self._no_coordinator = f"no coordinator is found: coordinator.address = {addresses}"
        self._tasks.spawn(EndpointWatch(sources, self._update).run())

    async def choose(self, caller: HttpCaller) -> Upstream:
        """Choose the coordinator for a request: of those that have a target the one with fewest of our requests.

        A full coordinator is asked only where all are full.

        Raises:
            PeerUnavailable: none has a target, for as long as the configuration allows.
            Unauthenticated: none serves, and at least one refuses the caller.
            PacelineError: none serves, for reasons that waiting doesn't mend; the last coordinator's.
        """
        deadline = time.monotonic() + self.wait_s
        backoff = Backoff()
        while True:
            try:
                return await self.choose_now(caller)
            except PeerUnavailable as error:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise
                pause_s = backoff.next_s(error.retry_after_ms)
            await asyncio.sleep(min(remaining_s, pause_s))

    async def choose_now(self, caller: HttpCaller, fits: Callable[[Upstream], bool] = _any_upstream) -> Upstream:
        """Choose among the coordinators that fit, without waiting. Raises as `choose`."""
        return await self._first_upstream(caller, lambda coordinator: coordinator.recent_description(caller), fits)

    async def tenant(self, caller: HttpCaller) -> str:
        """Return the tenant of a caller; empty: no key is asked for, or no coordinator answers.

        Raises:
            Unauthenticated: the caller's key is not valid.
        """
        try:
            return (await self.choose_now(caller)).description.tenant
        except Unauthenticated:
            raise
        except PacelineError:
            return ""

    async def describe_models(self, caller: HttpCaller) -> ModelDescription:
        """Ask what is served: a coordinator that has a target if any has. Raises as `choose`."""
        descriptions: list[ModelDescription] = []

        async def describe(coordinator: Coordinator) -> ModelDescription:
            descriptions.append(await coordinator.describe(caller))
            return descriptions[-1]

        try:
            return (await self._first_upstream(caller, describe, _any_upstream)).description
        except PacelineError:
            if not descriptions:
                raise
            return descriptions[-1]

    async def check(self) -> None:
        """Check that a request would find a target, as far as a caller without a key may know.

        Raises:
            PacelineError: it would not.
        """
        try:
            description = await self.describe_models(HttpCaller(""))
        except Unauthenticated:
            return  # it answers, and tells the rest to callers with a key alone
        if not description.target_ready:
            raise PeerUnavailable("no coordinator has a link to its target")

    async def close(self) -> None:
        """Close all channels."""
        await self._tasks.close()
        await asyncio.gather(*(coordinator.close() for coordinator in (*self.members, *self._draining_coordinators)))

    def _update(self, endpoints: Sequence[Endpoint]) -> None:
        """Open channels to new addresses; what runs at a vanished one goes on."""
        by_address = {coordinator.address: coordinator for coordinator in self.members}
        self.members = [
            by_address.get(endpoint.address) or Coordinator(self._config, endpoint, self._tokenizer)
            for endpoint in endpoints
        ]
        for coordinator in set(by_address.values()).difference(self.members):
            logger.info("endpoint vanished: address=%s requests=%d", coordinator.address, coordinator.request_count)
            self._draining_coordinators.add(coordinator)
            self._tasks.spawn(self._drain(coordinator))

    async def _drain(self, coordinator: Coordinator) -> None:
        await coordinator.close_when_idle()
        self._draining_coordinators.discard(coordinator)

    @staticmethod
    def _log_watch_end(error: BaseException) -> None:
        logger.error("endpoints are followed no longer", exc_info=error)

    async def _first_upstream(
        self,
        caller: HttpCaller,
        describe: Callable[[Coordinator], Awaitable[ModelDescription]],
        fits: Callable[[Upstream], bool],
    ) -> Upstream:
        """Return the first coordinator, by preference, that answers, has a target and fits.

        One that fails takes nothing from the others: while keys are changed, some know a new one and some don't.
        Raises as `choose`: a refused key first, for which waiting is no remedy; else the last failure that may pass;
        else the last one.
        """
        failures: list[PacelineError] = []
        for coordinator in self._by_preference(caller):
            try:
                upstream = Upstream(coordinator, await describe(coordinator))
            except PacelineError as error:
                failures.append(error)
                continue
            has_target = upstream.description.target_ready
            if has_target and fits(upstream):
                return upstream
            reason = "its target is another one" if has_target else "no link to its target yet"
            failures.append(PeerUnavailable(f"coordinator at {coordinator.address}: {reason}"))
        refusals = [failure for failure in failures if isinstance(failure, Unauthenticated)]
        outages = [failure for failure in failures if isinstance(failure, PeerUnavailable)]
        raise (refusals or outages or failures or [PeerUnavailable(self._no_coordinator)])[-1]

    def _by_preference(self, caller: HttpCaller) -> list[Coordinator]:
        now = time.monotonic()

        def rank(coordinator: Coordinator) -> tuple[bool, bool, int]:
            has_failed = now - coordinator.failed_at < DESCRIPTION_FRESH_S
            return has_failed, coordinator.is_full(caller), coordinator.request_count

        return sorted(self.members, key=rank)
