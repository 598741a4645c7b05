"""Costs on a link: said with the welcome and when a line has moved, refused when malformed, absent from old peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.costs.cost_line import MAX_POINTS, CostLine
from paceline.costs.service_costs import Costs, DraftCosts, DrafterLine, TargetCosts, changed_lines, merge_costs
from paceline.protocol import codec
from paceline.protocol.errors import InvalidInput
from paceline.protocol.handshake import MAX_DRAFTERS, MAX_FRAME_BYTES
from paceline.protocol.target import TargetEvent, TargetOpened
from paceline.rpc import cost_messages
from paceline.rpc.cost_messages import DRAFT_COSTS, TARGET_COSTS, CostsSender, most_bytes
from paceline.v1 import target_service_pb2 as pb
from tests.rpc.harness import (
    Client,
    ScriptedServicer,
    Servicer,
    a_verdict,
    an_open,
    hello_frame,
    raw_stream,
    serving,
    until,
    welcome_frame,
)

LINE = CostLine(((1, 10.0), (8, 20.0)))
COSTS = TargetCosts(LINE, LINE.scale(1.5), sessions=2, rows=6, queue=1)

lines = st.dictionaries(st.integers(1, 4096), st.integers(1, 100_000), max_size=MAX_POINTS).map(
    lambda points: CostLine(tuple(zip(sorted(points), sorted(points.values()), strict=True)))
)
counts = st.integers(0, 1 << 20)


@given(st.builds(TargetCosts, lines, lines, counts, counts, counts))
def test_a_targets_costs_are_read_as_they_were_written(costs: TargetCosts) -> None:
    message = TARGET_COSTS.encode(costs)
    assert TARGET_COSTS.decode(message) == costs
    assert message.ByteSize() <= most_bytes(costs)


others = st.dictionaries(st.text(min_size=1, max_size=8), lines, max_size=MAX_DRAFTERS - 1).map(
    lambda drafters: tuple(DrafterLine(name, line) for name, line in drafters.items())
)

beside = st.dictionaries(st.text(max_size=8), lines, max_size=MAX_DRAFTERS).map(
    lambda drafters: tuple(DrafterLine(name, line) for name, line in drafters.items())
)


@settings(max_examples=25, deadline=None)
@given(st.builds(DraftCosts, lines, counts, counts, counts, others, beside))
def test_a_drafts_costs_are_read_as_they_were_written(costs: DraftCosts) -> None:
    message = DRAFT_COSTS.encode(costs)
    assert DRAFT_COSTS.decode(message) == costs
    assert message.ByteSize() <= most_bytes(costs)


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ([("a", LINE), ("a", LINE)], "each named once"),
        ([("", LINE)], "a drafter's name"),
        ([(str(n), LINE) for n in range(MAX_DRAFTERS)], f"at most {MAX_DRAFTERS - 1}"),
    ],
)
def test_lines_of_drafters_have_names_of_their_own(others: list[tuple[str, CostLine]], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        DraftCosts(LINE, others=tuple(DrafterLine(name, line) for name, line in others))


@pytest.mark.parametrize(
    ("beside", "named"),
    [(["", ""], "each named once"), ([str(n) for n in range(MAX_DRAFTERS + 1)], f"at most {MAX_DRAFTERS}")],
)
def test_lines_beside_the_target_have_names_of_their_own_too(beside: list[str], named: str) -> None:
    with pytest.raises(InvalidInput, match=rf"costs beside.*{named}"):
        DraftCosts(LINE, beside=tuple(DrafterLine(name, LINE) for name in beside))


def test_steps_beside_the_target_take_what_the_others_do_until_there_were_any() -> None:
    told = DraftCosts(LINE, others=(DrafterLine("a", LINE.scale(3)),))
    said = DraftCosts(beside=(DrafterLine("", LINE.scale(2)),))
    now = merge_costs(said, told)
    assert [told.line_of(name, beside=True) for name in ("", "a")] == [LINE, LINE.scale(3)]
    assert [now.line_of(name, beside=True) for name in ("", "model", "a")] == [LINE.scale(n) for n in (2, 2, 3)]
    assert now.line_of("") == LINE, "nobody waits for those"
    assert changed_lines(now, told) == said


def test_a_drafters_line_that_has_not_moved_is_left_out_and_kept() -> None:
    told = DraftCosts(LINE, others=(DrafterLine("a", LINE), DrafterLine("b", LINE)))
    now = DraftCosts(LINE, others=(DrafterLine("a", LINE), DrafterLine("b", LINE.scale(2))))
    said = changed_lines(now, told)
    assert said == DraftCosts(others=(DrafterLine("b", LINE.scale(2)),))
    assert merge_costs(said, told) == now
    assert now.line_of("b") == LINE.scale(2)
    assert now.line_of("") == now.line_of("model") == LINE


@pytest.fixture
def servicer() -> Servicer:
    return Servicer(costs=COSTS)


async def test_costs_come_with_the_welcome_and_before_their_frames_events(servicer: Servicer, client: Client) -> None:
    assert client.link.costs == COSTS
    servicer.costs = TargetCosts(LINE.scale(2), COSTS.beside, 9, 9, 9)
    seen: list[tuple[TargetEvent, TargetCosts]] = []
    client.link.on_event = lambda event: seen.append((event, client.link.costs))
    client.send(an_open(1))
    await until(lambda: seen)
    assert seen == [(TargetOpened(1), servicer.costs)]


FACTORS = (1.0, 1.02, 1.04, 1.05, 1.06, 1.10, 1.10, 0.5)
SAID = [False, False, True, False, False, True, False, True]


async def test_a_line_is_said_again_when_it_has_moved_and_only_then(servicer: Servicer, port: int) -> None:
    said: list[bool] = []
    async with raw_stream(port) as stream:
        await stream.write(hello_frame())
        assert (await stream.read()).costs.alone.rows == [1, 8]
        for session, factor in enumerate(FACTORS, start=1):
            servicer.costs = TargetCosts(LINE.scale(factor), COSTS.beside, 3, 4, 5)
            await stream.write(pb.VerifyRequest(commands=[codec.encode_target_command(an_open(session))]))
            costs = (await stream.read()).costs
            assert (costs.sessions, costs.rows, costs.queue) == (3, 4, 5), "the counts are in every frame"
            assert not costs.beside.rows, "it has not moved"
            said.append(bool(costs.alone.rows))
    assert said == SAID


def _everything(costs: Costs, told: Costs) -> Costs:
    return costs


def _nothing(costs: Costs, told: Costs) -> Costs:
    return told


@pytest.mark.parametrize("mutant", [_everything, _nothing])
async def test_mutant_lines_that_are_said_always_or_never_are_noticed(
    servicer: Servicer, port: int, monkeypatch: pytest.MonkeyPatch, mutant: Any
) -> None:
    monkeypatch.setattr(cost_messages, "changed_lines", mutant)
    with pytest.raises(AssertionError):
        await test_a_line_is_said_again_when_it_has_moved_and_only_then(servicer, port)


async def test_every_link_is_told_whatever_the_others_were(port: int) -> None:
    async with Client(port) as one, Client(port) as other:
        for client in (one, other):
            await client.link.wait_up(10)
            await client.is_served()
            assert client.link.costs == COSTS


@asynccontextmanager
async def saying(*frames: pb.VerifyResponse) -> AsyncIterator[tuple[asyncio.Queue[pb.VerifyResponse], Client]]:
    """A client of a target that says these frames, and those that are put behind them."""
    queue: asyncio.Queue[pb.VerifyResponse] = asyncio.Queue()

    async def script(link: int, context: Any) -> None:
        while True:
            await context.write(await queue.get())

    for frame in frames:
        queue.put_nowait(frame)
    async with serving(ScriptedServicer(script)) as port, Client(port) as client:
        await client.link.wait_up(10)
        yield queue, client


def a_frame(session: int, costs: pb.TargetCosts | None) -> pb.VerifyResponse:
    return pb.VerifyResponse(events=[codec.encode_target_event(a_verdict(session))], costs=costs)


def a_line(rows: list[float], ms: list[float]) -> pb.TargetCosts:
    return pb.TargetCosts(alone={"rows": rows, "ms": ms})


MALFORMED = {
    "falling rows": (a_line([2, 1], [1, 2]), "cost line point"),
    "falling ms": (a_line([1, 2], [2, 1]), "cost line point"),
    "no time": (a_line([1], [0]), "cost line point"),
    "no rows": (a_line([0], [1]), "cost line point"),
    "rows without times": (a_line([1, 2], [1]), "cost line ms = 1: must be 2"),
    "not a number": (a_line([1], [float("nan")]), "cost line ms = nan"),
    "rows not a number": (a_line([float("nan")], [1]), "cost line point"),
    "an age": (a_line([1], [1e9]), "cost line ms = 1000000000.0"),
    "negative": (a_line([1], [-1]), "cost line ms = -1.0"),
    "too many points": (a_line([*range(1, MAX_POINTS + 2)], [1] * (MAX_POINTS + 1)), "cost line points = 65"),
    "too many rows": (a_line([float(1 << 21)], [1]), "cost line point"),
    "beside": (pb.TargetCosts(beside={"rows": [1, 1], "ms": [1, 1]}), "cost line point"),
    "too many sessions": (pb.TargetCosts(sessions=(1 << 20) + 1), "costs sessions"),
    "too many in the queue": (pb.TargetCosts(queue=(1 << 32) - 1), "costs queue"),
}


@pytest.mark.parametrize(("costs", "words"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_costs_are_refused_by_name(costs: pb.TargetCosts, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        TARGET_COSTS.decode(costs)


async def test_malformed_costs_are_named_once_and_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    costs, words = MALFORMED["not a number"]
    frames = [welcome_frame(costs=TARGET_COSTS.encode(COSTS)), a_frame(1, costs), a_frame(2, costs)]
    async with saying(*frames) as (queue, client):
        await until(lambda: len(client.events) == 2)
        assert client.link.costs == COSTS
        queue.put_nowait(a_frame(3, TARGET_COSTS.encode(TargetCosts(LINE.scale(3), rows=7))))
        await until(lambda: len(client.events) == 3)
        assert client.link.costs == TargetCosts(LINE.scale(3), COSTS.beside, rows=7), "what comes next is taken in"
        assert client.events == [a_verdict(session) for session in (1, 2, 3)]
        assert not client.downs
    (line,) = [record.getMessage() for record in caplog.records if "malformed costs" in record.getMessage()]
    assert words in line
    assert f"target at {client.link.address}" in line


async def test_malformed_costs_beside_a_welcome_cost_no_link() -> None:
    async with saying(welcome_frame(costs=a_line([1], [-1]))) as (_, client):
        assert client.link.costs == TargetCosts()


async def test_of_an_old_peer_nothing_is_known_even_after_a_new_one(servicer: Servicer, port: int) -> None:
    async with Client(port, reconnect_min_ms=1) as client:
        await client.link.wait_up(10)
        servicer.costs = None
        client.link.drop(client.link.why_down())
        assert client.link.costs == COSTS, "while the link is down its last word stands"
        await until(lambda: len(client.ups) == 2)
        await client.is_served()
        assert client.link.costs == TargetCosts()


def test_a_full_frame_goes_without_costs_and_the_next_one_says_them() -> None:
    teller = CostsSender(TARGET_COSTS, lambda: COSTS)
    full = pb.VerifyResponse(events=[pb.TargetEvent(features={"data": b"x" * (MAX_FRAME_BYTES - 100)})])
    assert not teller.add_to(full).HasField("costs")
    assert full.ByteSize() <= MAX_FRAME_BYTES
    assert TARGET_COSTS.decode(teller.add_to(pb.VerifyResponse()).costs) == COSTS
    assert not teller.add_to(pb.VerifyResponse()).costs.alone.rows
