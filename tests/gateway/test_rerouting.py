"""A lost text goes on where the target is the same, behind its last token, or not at all."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.caller import HttpCaller
from gateway.coordinators import Coordinators, Serving
from gateway.rerouting import Rerouting
from paceline.protocol.errors import InternalError, Overloaded, PacelineError, PeerUnavailable
from paceline.protocol.generation import (
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    ModelDescription,
    Provenance,
    Started,
    Tokens,
)
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.records import GenerationStats
from paceline.runtime.gateway_config import GatewayConfig

TEXT = (11, 12, 13, 14)
SAME = Fingerprint("m", "t", 99, "n")
OTHER = replace(SAME, model="another")
CALLER = HttpCaller("r", api_key="k-secret")


class Losing:
    """Writes `TEXT`, and fails behind its first `lasts` tokens."""

    running = 0
    failed_at = 0.0

    def __init__(self, target: Fingerprint, lasts: int, failure: PacelineError | None = None) -> None:
        self.address = "c:1"
        self.asked: list[GenerateRequest] = []
        self._target = target
        self._lasts = lasts
        self._failure = failure or PeerUnavailable("gone")

    async def described(self, caller: HttpCaller) -> ModelDescription:
        return ModelDescription("m", self._target, SAME, 99, (), True, True)

    @contextmanager
    def client(self, caller: HttpCaller) -> Iterator[Losing]:
        yield self

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        self.asked.append(request)
        yield Started(7, request.token_ids, "m")
        for token in TEXT[len(request.resume_token_ids) : self._lasts]:
            yield Tokens((token,), "x", (Provenance.TARGET,))
        if self._lasts < len(TEXT):
            raise self._failure
        yield Finished(FinishReason.LENGTH, "", GenerationStats())


async def read(*coordinators: Losing) -> list[GenerateEvent]:
    """The events of a text that the first of them begins."""
    known = Coordinators(GatewayConfig(coordinator_wait_ms=150), "t")
    several: Any = coordinators
    known.all = several
    begins = Serving(several[0], await coordinators[0].described(CALLER))
    # The lost one is asked last, as by a gateway that has noticed.
    known._in_order = lambda: [*several[1:], several[0]]  # type: ignore[method-assign]
    made = Rerouting(known, begins, CALLER).stream(GenerateRequest(token_ids=(1,)))
    async with aclosing(made) as events:
        return [event async for event in events]


@pytest.mark.parametrize("lasts", [0, 1, 3])
async def test_a_text_goes_on_behind_its_last_token(lasts: int) -> None:
    lost, other = Losing(SAME, lasts), Losing(SAME, 4)
    events = await read(lost, other)
    assert [event.token_ids[0] for event in events if isinstance(event, Tokens)] == list(TEXT)
    assert [type(event) for event in events].count(Started) == 1
    assert (other.asked[0].seed, other.asked[0].resume_token_ids) == (7, TEXT[:lasts])


async def test_a_text_that_has_begun_goes_on_where_its_coordinator_found_no_room_for_it() -> None:
    lost, other = Losing(SAME, 2, Overloaded("full", retry_after_ms=20)), Losing(SAME, 4)
    events = await read(lost, other)
    assert [event.token_ids[0] for event in events if isinstance(event, Tokens)] == list(TEXT)


async def test_a_text_never_goes_on_at_another_target() -> None:
    lost, other = Losing(SAME, 2), Losing(OTHER, 4)
    with pytest.raises(PeerUnavailable):
        await read(lost, other)
    assert other.asked == []


async def test_another_failure_than_a_loss_ends_the_text() -> None:
    lost, other = Losing(SAME, 2, InternalError("defect")), Losing(SAME, 4)
    with pytest.raises(InternalError):
        await read(lost, other)
    assert other.asked == []


def test_a_key_is_not_in_what_is_shown_of_its_caller() -> None:
    assert "k-secret" not in repr(CALLER)
