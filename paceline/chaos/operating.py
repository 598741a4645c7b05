"""Faults on somebody's own deployment, one after the other, under this program's own requests."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from paceline.chaos.asking import LEFT, Ended, Manner, ask, recovered_s
from paceline.chaos.blows import Aim, Blow
from paceline.chaos.lies import DRAFT_LIES
from paceline.chaos.operation import CLIENT, Act, Operation, OperatorFault
from paceline.chaos.trigger import Armed, Trigger, proxy_before
from paceline.client import AsyncClient
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest
from paceline.runtime.config import PeerSettings

COMMAND_TIMEOUT_S = 120.0
SLOW_READER_PAUSE_S = 0.05
WHOLE_POLL_S = 0.1


@dataclass(frozen=True)
class OperatorLoad:
    """The requests that run while a fault falls, all at once.

    Attributes:
        peer: the coordinator.
        requests: each with a seed; their undisturbed texts are found out first.
        patience_s: how long a request may take, faults included, and a coordinator have no link to a peer.
    """

    peer: PeerSettings
    requests: tuple[GenerateRequest, ...]
    api_key: str | None = None
    patience_s: float = 120.0


@dataclass(frozen=True)
class OperatorOutcome:
    """What came of a fault.

    Attributes:
        struck: whether its message came; otherwise nothing was done.
        lost, changed: requests that ended without a text, or with another one, each in words.
        recover_s: from the fault until the last request under way had a token again; None: none had to wait.
        whole_s: from the fault until the coordinator had a link to every peer; None: not within the patience.
    """

    fault: OperatorFault
    struck: bool
    lost: tuple[str, ...]
    changed: tuple[str, ...]
    recover_s: float | None
    whole_s: float | None


@contextmanager
def proxies(operation: Operation, peer: PeerSettings, trigger: Trigger) -> Iterator[PeerSettings]:
    """The proxies while the context is open; yields how the coordinator is reached through its own."""
    host, _, port = peer.address.rpartition(":")
    with ExitStack() as stack:
        for each in operation.proxies:
            made = proxy_before(each.role, each.label, each.upstream, trigger, each.listen, tls=operation.tls)
            stack.enter_context(made)
        own = stack.enter_context(proxy_before(CLIENT, CLIENT, (host, int(port)), trigger, tls=operation.tls))
        name = peer.server_name or (host if operation.tls else None)
        yield peer.model_copy(update={"address": own.address, "server_name": name})


async def operate(
    operation: Operation, load: OperatorLoad, faults: Sequence[OperatorFault]
) -> AsyncIterator[OperatorOutcome]:
    """Inject the faults; yields each one's outcome as soon as all is well again, or is not in time.

    Raises:
        PacelineError: the requests fail, or have other texts each time, without any fault.
    """
    trigger = Trigger()
    with proxies(operation, load.peer, trigger) as through:
        expected = await _undisturbed(load, through)
        for fault in faults:
            yield await _inject(fault, trigger, load, through, expected)


async def _undisturbed(load: OperatorLoad, through: PeerSettings) -> list[Ended]:
    first = await _run(load, through)
    for place, (one, other) in enumerate(zip(first, await _run(load, through), strict=True), 1):
        for each in (one, other):
            if each.error:
                raise PacelineError(f"request {place} fails without any fault: {each.error} {each.message}")
        if one.result != other.result:
            why = "floating point parts them: serve with --reproducible"
            raise PacelineError(f"request {place} has two texts without any fault ({why})")
    return first


async def _inject(
    fault: OperatorFault, trigger: Trigger, load: OperatorLoad, through: PeerSettings, expected: Sequence[Ended]
) -> OperatorOutcome:
    armed = Armed(frozenset({fault.label}), fault.state, fault.skip, lambda label: _aim(fault))
    client_acts = fault.kind in (Act.LEAVE, Act.SLOW_READER)
    begun = time.monotonic()
    if not client_acts:
        trigger.arm(armed)
    got = await _run(load, through, fault)
    trigger.disarm()
    if armed.has_fallen:
        await asyncio.to_thread(armed.over.wait)
    if armed.failure is not None:
        raise PacelineError(f"the fault could not be injected: {armed.failure}") from armed.failure
    at = armed.at if armed.has_fallen else begun
    struck = client_acts or armed.has_fallen
    pairs = list(enumerate(zip(got, expected, strict=True), 1))
    lost = [f"request {n}: {one.error} {one.message}" for n, (one, _) in pairs if one.error not in ("", LEFT)]
    changed = [f"request {n}" for n, (one, other) in pairs if not one.error and one.result != other.result]
    whole_s = await _whole(load, at)
    return OperatorOutcome(
        fault, struck, tuple(lost), tuple(changed), recovered_s(at, got) if armed.has_fallen else None, whole_s
    )


def _aim(fault: OperatorFault) -> Aim:
    if not isinstance(fault.kind, Blow):
        return Aim(Blow.CALL, fault.moment, call=lambda: _run_command(fault.command))
    source = random.Random(fault.seed)  # noqa: S311 - no secret
    lie = DRAFT_LIES[sorted(DRAFT_LIES)[fault.byte % len(DRAFT_LIES)]]
    told: Callable[[bytes], bytes] = lambda message: lie(message, source)  # noqa: E731 - a value of Aim
    return Aim(fault.kind, fault.moment, fault.seconds, fault.byte, lie=told)


def _run_command(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, timeout=COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL)  # noqa: S603 - the operator's


async def _run(load: OperatorLoad, through: PeerSettings, fault: OperatorFault | None = None) -> list[Ended]:
    stays = Manner(patience_s=load.patience_s)
    first = stays
    if fault is not None and fault.kind is Act.LEAVE:
        first = Manner(leave_after=fault.skip, patience_s=load.patience_s)
    elif fault is not None and fault.kind is Act.SLOW_READER:
        first = Manner(SLOW_READER_PAUSE_S, patience_s=load.patience_s)
    async with AsyncClient(through, resume_wait_s=load.patience_s, api_key=load.api_key) as client:
        asked = (ask(client, each, stays if place else first) for place, each in enumerate(load.requests))
        return list(await asyncio.gather(*asked))


async def _whole(load: OperatorLoad, at: float) -> float | None:
    """Asked beside the proxy, which may be what is broken."""
    deadline = time.monotonic() + load.patience_s
    async with AsyncClient(load.peer, timeout_s=5, api_key=load.api_key) as client:
        while time.monotonic() < deadline:
            try:
                models = await client.describe_models()
            except PacelineError:
                models = ()
            if models and all(peer.up for model in models for peer in model.peers):
                return time.monotonic() - at
            await asyncio.sleep(WHOLE_POLL_S)
    return None
