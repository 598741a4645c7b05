"""A lost text goes on where the target is the same, behind its last token, or not at all."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from paceline.protocol.errors import InternalError, Overloaded, PacelineError, PeerUnavailable, UntrustedPeer
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
from paceline.rpc.retries import RETRIES_PER_MINUTE, Retries, RetryBudget
from paceline.runtime.gateway_config import GatewayConfig
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.coordinators import Coordinators, Upstream
from paceline_gateway.upstream.rerouting import Rerouting

TEXT = (11, 12, 13, 14)
SAME = Fingerprint("m", "t", 99, "n")
OTHER = replace(SAME, model="another")
CALLER = HttpCaller("r", api_key="k-secret")
EXPIRED, DEFECT = UntrustedPeer("its certificate has expired"), InternalError("defect")
USED_UP = Overloaded("used up", metadata={"limit": "tokens_per_minute"}, retry_after_ms=9)


class Losing:
    """Writes `TEXT`, and fails behind its first `lasts` tokens; None: before it has begun."""

    running = 0

    def note_answer(self) -> None:
        pass

    failed_at = 0.0

    def __init__(
        self,
        target: Fingerprint,
        lasts: int | None,
        failure: PacelineError | None = None,
        unfit: PacelineError | None = None,
    ) -> None:
        """unfit: what it raises when it is asked what it serves."""
        self.address = "c:1"
        self.unfit = unfit
        self.asked: list[GenerateRequest] = []
        self._target = target
        self._lasts = lasts
        self._failure = failure or PeerUnavailable("gone")

    async def recent_description(self, caller: HttpCaller) -> ModelDescription:
        if self.unfit is not None:
            raise self.unfit
        return ModelDescription("m", self._target, SAME, 99, (), True, True)

    @contextmanager
    def client(self, caller: HttpCaller) -> Iterator[Losing]:
        yield self

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        self.asked.append(request)
        if self._lasts is None:
            raise self._failure
        yield Started(7, request.token_ids, "m")
        for token in TEXT[len(request.resume_token_ids) : self._lasts]:
            yield Tokens((token,), "x", (Provenance.TARGET,))
        if self._lasts < len(TEXT):
            raise self._failure
        yield Finished(FinishReason.LENGTH, "", GenerationStats())


async def read(*coordinators: Losing, budget: RetryBudget | None = None) -> list[GenerateEvent]:
    """The events of a text that the first of them begins."""
    gateway = Coordinators(GatewayConfig(coordinator_wait_ms=150), "t")
    gateway.budget = budget or gateway.budget
    several: Any = coordinators
    gateway.members = several
    first = Upstream(several[0], await coordinators[0].recent_description(CALLER))
    # The lost one is asked last, as by a gateway that has noticed.
    gateway._by_preference = lambda caller: [*several[1:], several[0]]  # type: ignore[method-assign]
    made = Rerouting(gateway, first, CALLER).stream(GenerateRequest(token_ids=(1,)))
    async with aclosing(made) as events:
        return [event async for event in events]


@pytest.mark.parametrize("lasts", [0, 1, 3])
async def test_a_text_goes_on_behind_its_last_token(lasts: int) -> None:
    lost, other = Losing(SAME, lasts), Losing(SAME, 4)
    events = await read(lost, other)
    assert tokens_of(events) == list(TEXT)
    assert [type(event) for event in events].count(Started) == 1
    assert (other.asked[0].seed, other.asked[0].resume_token_ids) == (7, TEXT[:lasts])


def tokens_of(events: list[GenerateEvent]) -> list[int]:
    return [event.token_ids[0] for event in events if isinstance(event, Tokens)]


def full(retry_after_ms: int | None, target: Fingerprint = SAME, lasts: int | None = None) -> Losing:
    return Losing(target, lasts, Overloaded("full", retry_after_ms=retry_after_ms))


@pytest.mark.parametrize(
    ("coordinators", "counts"),
    [
        pytest.param([full(20, lasts=2), Losing(SAME, 4)], [1, 1], id="no room once it has begun"),
        pytest.param([Losing(SAME, 2), Losing(SAME, 4, unfit=EXPIRED), Losing(SAME, 4)], [1, 0, 1], id="past unfit"),
        pytest.param([full(60_000), full(60_000), Losing(SAME, 4)], [1, 1, 1], id="no room at once"),
        pytest.param([full(60_000, lasts=0), full(60_000, lasts=0), Losing(SAME, 4)], [1, 1, 1], id="at targets"),
        pytest.param([full(60_000), Losing(SAME, None), Losing(SAME, 4)], [1, 1, 1], id="past one that is gone"),
    ],
)
async def test_what_one_loses_or_has_no_room_for_goes_on_elsewhere(
    coordinators: list[Losing], counts: list[int]
) -> None:
    assert tokens_of(await read(*coordinators)) == list(TEXT)
    assert [len(each.asked) for each in coordinators] == counts


@pytest.mark.parametrize(
    ("coordinators", "error", "others"),
    [
        pytest.param([Losing(SAME, 2), Losing(OTHER, 4)], PeerUnavailable("gone"), [0], id="another target"),
        pytest.param([Losing(SAME, 2, DEFECT), Losing(SAME, 4)], DEFECT, [0], id="another failure than a loss"),
        pytest.param([Losing(SAME, None, USED_UP), Losing(SAME, 4)], USED_UP, [0], id="a limit of the key"),
        pytest.param([full(300), Losing(SAME, None), Losing(OTHER, 4)], Overloaded("full"), [1, 0], id="no other"),
    ],
)
async def test_a_text_that_goes_on_nowhere_ends_with_its_error(
    coordinators: list[Losing], error: PacelineError, others: list[int]
) -> None:
    with pytest.raises(type(error), match=error.message):
        await read(*coordinators)
    assert [len(each.asked) for each in coordinators[1:]] == others


async def test_a_lost_text_asks_each_other_one_for_room() -> None:
    lost, refusing, last = Losing(SAME, 2), full(60_000), Losing(SAME, 3, Overloaded("full", retry_after_ms=60_000))
    with pytest.raises(Overloaded):  # nobody has room for as long as the gateway waits
        await read(lost, refusing, last)
    asked = [[len(request.resume_token_ids) for request in each.asked] for each in (lost, refusing, last)]
    assert asked == [[0, 3], [2, 3], [2]]


@pytest.mark.parametrize("hints", [(700, 300, 500), (None, 300, 500), (300, None, 400)])
async def test_the_smallest_hint_is_told_where_nobody_has_room(hints: tuple[int | None, ...]) -> None:
    refusing = [full(hint) for hint in hints]
    with pytest.raises(Overloaded) as caught:
        await read(*refusing)
    assert caught.value.retry_after_ms == 300
    assert [len(each.asked) for each in refusing] == [1, 1, 1]


async def tries_elsewhere(budget: RetryBudget, requests: int) -> int:
    """Tries beyond the first of requests that three coordinators refuse."""
    everywhere = [full(300) for _ in range(3)]
    for _ in range(requests):
        with pytest.raises(Overloaded):
            await read(*everywhere, budget=budget)
    return sum(len(each.asked) for each in everywhere) - requests


async def test_an_overload_of_all_is_not_multiplied_and_leaves_tries_to_lost_texts() -> None:
    budget = RetryBudget(clock=lambda: 0.0)
    assert await tries_elsewhere(budget, requests=100) == RETRIES_PER_MINUTE // 2
    assert tokens_of(await read(Losing(SAME, 2), Losing(SAME, 4), budget=budget)) == list(TEXT)


async def test_these_tests_notice_who_does_not_ask_elsewhere_or_asks_without_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Retries, "take_spare", lambda retries: True)
    assert await tries_elsewhere(RetryBudget(), requests=100) == 200
    monkeypatch.setattr(Retries, "take_spare", lambda retries: False)
    with pytest.raises(Overloaded):
        await read(full(300), Losing(SAME, 4))


def test_a_key_is_not_in_what_is_shown_of_its_caller() -> None:
    assert "k-secret" not in repr(CALLER)
