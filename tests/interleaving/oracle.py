"""Runs a schedule and checks what must hold: the text, no refusal between honest peers, an end, nothing left."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np

from coordinator.sessions.target import TargetSession
from paceline.drafting.session import DraftSession
from paceline.engine.table.engine import TableModel
from paceline.protocol.proposal import ROOT, Acceptance
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import Round
from target_service.session import make_processors
from target_service.verifier import verify
from tests.interleaving.deployment import PENALTIES, PLAIN, PROMPT, SPEC, SteppedDeployment, deployed
from tests.interleaving.schedules import Schedule, Setup

EXPECTED = (
    "link down:",
    "link refused: method=Verify peer=coordinator reason=DEADLINE_EXCEEDED error=no hello within",
    "link refused: method=Draft peer=coordinator reason=DEADLINE_EXCEEDED error=no hello within",
    "no link:",
    "draft lost, going on target-only:",
    "target session lost, opening it anew:",
    "draft failed, going on without it:",
)
"""What a coordinator may say of links that break."""
REFUSALS = ("malformed", "must be", "expected", "not open")
"""What an error says that names a field, its value and the limit."""


MOST_KEPT = 12
"""Verdicts, or proposals, of one session: outcomes of a round with four nodes, two behind each, and one to spare."""
OWN = ("_catalogue", "_meter")
"""Parts of a scheduler that are the service's own, whatever its sessions."""
REMEMBERED = ("_latest",)
"""What is kept of tenants, not of sessions, and bounded: whose turn was when."""


@dataclass(frozen=True)
class Ran:
    """What a run came to."""

    turns: int
    counts: Counter[str]
    """Messages that arrived, by kind."""
    moved: tuple[str, ...]
    """All that happened, in order: the interleaving."""
    texts: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def own_text(seed: int, tokens: int, sampling: SamplingParams) -> tuple[int, ...]:
    """What the target alone gives: each token a function of those before it and of the noise."""
    facts = SessionSpec(PROMPT, len(PROMPT), sampling, NoiseKey(seed), Acceptance.COUPLED)
    model, history, processors = TableModel(SPEC), [*PROMPT], make_processors(facts, None)
    if processors is not None:
        processors.advance(PROMPT)
    for _ in range(tokens):
        round_ = Round(1, len(history) - 1, ROOT, (history[-1],))
        history += verify(model.logits(history)[np.newaxis], facts, round_, processors).token_ids
        if processors is not None:
            processors.advance(history[-1:])
    return tuple(history[len(PROMPT) :])


def run(setup: Setup, schedule: Schedule, told: Callable[[str], object] | None = None) -> Ran:
    """Run a schedule; `told` is called with all that happens and arrives.

    Raises:
        AssertionError: what must hold did not.
    """
    with deployed(setup, schedule) as made, complaints(made.complained):
        made.told = told
        made.watch = partial(check_bounds, made)
        made.loop.set_exception_handler(lambda _, context: made.complained.append(f"loop: {context}"))
        return made.loop.run_until_complete(_run(made, setup))


async def _run(made: SteppedDeployment, setup: Setup) -> Ran:
    try:
        for link in made.links:
            await link.start()
        await made.reach(lambda: made.is_quiet, fair=True)
        before = (len(asyncio.all_tasks()), len(made.loop.timers))
        for seed in range(setup.requests):
            made.ask(seed)
        await made.reach(lambda: made.is_answered, fair=False)
        check_texts(made, setup)
        await made.reach(lambda: made.is_quiet, fair=True)
        check_nothing_left(made, before)
        assert not made.complained, "complaints"
        return Ran(
            made.turns,
            made.counts,
            tuple(made.moved),
            tuple(tuple(request.client.tokens) for request in made.running),
        )
    except AssertionError as error:
        raise AssertionError(f"{error}; {made.complained}") from error
    finally:
        await made.close()


def check_texts(made: SteppedDeployment, setup: Setup) -> None:
    """Every request has the text of the target alone, or so much of it as was there when it was cancelled."""
    sampling = PENALTIES if setup.penalties else PLAIN
    for request in made.running:
        if not request.cancelled:
            request.task.result()
        got, expected = tuple(request.client.tokens), own_text(request.seed, setup.tokens, sampling)
        if setup.acceptance is Acceptance.COUPLED:
            assert got == expected[: len(got)], f"text {got}: must be {expected}"
        assert request.cancelled or len(got) == len(expected), f"{len(got)} tokens: must be {len(expected)}"


def check_nothing_left(made: SteppedDeployment, before: tuple[int, int]) -> None:
    """No session, no row, no task, no timer and no message outlives its request."""
    for service in made.services.values():
        scheduler: Any = service.servicer.scheduler
        held = {"sessions": scheduler.sessions, "queue": scheduler.queue_length, "KV rows": service.kv_rows}
        assert not any(held.values()), f"{service.name} holds {held}"
        for name, kept in leftovers(service.name, scheduler):
            assert not kept, f"{name} keeps {kept}"
    for peer in made.peers:
        assert not peer.sessions, f"{peer.link.address} has {peer.sessions} sessions at the coordinator"
    after = (len(asyncio.all_tasks()), len(made.loop.timers))
    assert after == before, f"tasks and timers: {after}, {before} before; {made.loop.timers}"


def check_bounds(made: SteppedDeployment) -> None:
    """Nothing that is kept of a request grows with its text."""
    for service in made.services.values():
        for session in service.servicer.scheduler._open:
            for name in ("run", "prefetched_rounds", "proposals"):
                kept = len(getattr(session, name, ()))
                assert kept <= MOST_KEPT, f"{service.name} keeps {kept} of {name}"
    for peer in made.peers:
        for at_coordinator in peer._sessions.values():
            kept = (
                at_coordinator.leased_rounds
                if isinstance(at_coordinator, TargetSession)
                else len(cast(DraftSession, at_coordinator)._cache._entries)
            )
            assert kept <= MOST_KEPT, f"{type(at_coordinator).__name__} keeps {kept}"


def leftovers(name: str, held: Any) -> Iterator[tuple[str, Sized]]:
    """Everything that a scheduler, or a part of it, gathers: what each of its fields has."""
    for field, value in vars(held).items():
        if field in REMEMBERED:
            continue
        if isinstance(value, dict | list | set | deque):
            yield f"{name}.{field}", value
        elif type(value).__module__.startswith(("target_service", "draft_service")) and field not in OWN:
            yield from leftovers(f"{name}.{field}", value)


class _Complaints(logging.Handler):
    def __init__(self, complained: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._complained = complained

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if any(sign in message for sign in REFUSALS) or not message.startswith(EXPECTED):
            self._complained.append(message)


@contextmanager
def complaints(complained: list[str]) -> Iterator[None]:
    """Keep the warnings that honest peers never give cause for."""
    handler = _Complaints(complained)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
