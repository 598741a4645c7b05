"""Killed, frozen and cut peers: the text goes on, unchanged in coupled mode, and the next request works."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from paceline.protocol.errors import InvalidInput, PeerUnavailable
from paceline.protocol.generation import Finished, GenerateRequest, Provenance, SpeculationSettings, Started, Tokens
from tests.chaos.proxy import Proxy
from tests.e2e.cluster import Cluster, eventually

TIMED = "table:vocab=300,seed=1,eos=299,step_ms=4"
NEAR = "table:vocab=300,seed=1,eos=299,noise=0.2,step_ms=1"
LENGTH = 160
"""Long enough that every failure strikes in the middle of the text: 4 ms and more a round."""


def request(length: int = LENGTH, *, off: bool = False, seed: int = 23) -> GenerateRequest:
    return GenerateRequest(
        token_ids=(10, 200, 30),
        seed=seed,
        max_new_tokens=length,
        ignore_eos=True,
        speculation=SpeculationSettings(off=off, num_draft_tokens=3),
    )


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("timed"), target_model=TIMED, drafters=(f"model:{NEAR}",)) as running:
        yield running


@pytest.fixture(scope="module")
def plain(timed: Cluster) -> tuple[int, ...]:
    with timed.client() as client:
        return client.generate(request(off=True)).token_ids


async def stream_and_strike(
    cluster: Cluster,
    strike: Callable[[], None],
    after_tokens: int = 40,
    resume_wait_s: float = 60.0,
    length: int = LENGTH,
) -> tuple[list[int], list[Provenance], str, Finished]:
    """Stream one generation; `strike` once some tokens have come."""
    ids: list[int] = []
    provenance: list[Provenance] = []
    text = ""
    struck = False
    async with cluster.async_client(resume_wait_s=resume_wait_s) as client:
        async for event in client.stream(request(length)):
            if isinstance(event, Tokens):
                ids += event.token_ids
                provenance += event.provenance
                text += event.text
                if not struck and len(ids) >= after_tokens:
                    struck = True
                    await asyncio.to_thread(strike)
            elif isinstance(event, Finished):
                return ids, provenance, text + event.text, event
    raise AssertionError("the stream ended without Finished")


async def test_draft_killed_and_back(timed: Cluster, plain: tuple[int, ...]) -> None:
    ids, provenance, _, _ = await stream_and_strike(timed, lambda: timed.kill("draft"))
    assert tuple(ids) == plain
    assert Provenance.TARGET in provenance, "the text went on without a draft"
    timed.restart("draft")
    timed.await_links()
    with timed.client() as client:
        again = client.generate(request())
    assert again.token_ids == plain
    assert Provenance.ACCEPTED in again.provenance, "the draft is used again"


async def test_draft_killed_and_restarted_within_one_text(timed: Cluster, plain: tuple[int, ...]) -> None:
    def strike() -> None:
        timed.kill("draft")
        timed.restart("draft")
        timed.await_links()

    # The text takes longer than the draft's restart.
    ids, provenance, _, _ = await stream_and_strike(timed, strike, length=3000)
    assert tuple(ids)[:LENGTH] == plain
    assert len(ids) == 3000
    assert Provenance.ACCEPTED in provenance[-100:], "the draft joined again"


def test_a_coordinator_that_starts_without_its_draft_takes_requests_for_it(
    timed: Cluster, plain: tuple[int, ...]
) -> None:
    """It doesn't know the draft's drafters yet, and serves those who name one."""
    timed.kill("draft")
    timed.kill("coordinator")
    timed.restart("coordinator")
    with timed.client() as client:
        named = replace(request(), speculation=SpeculationSettings(drafter="model", num_draft_tokens=3))
        assert client.generate(named).token_ids == plain
    timed.restart("draft")
    timed.await_links()


async def test_frozen_draft_costs_speed_only(timed: Cluster, plain: tuple[int, ...]) -> None:
    draft = timed.processes["draft"]
    try:
        ids, _, _, _ = await stream_and_strike(timed, lambda: draft.signal(signal.SIGSTOP))
    finally:
        draft.signal(signal.SIGCONT)
    assert tuple(ids) == plain
    timed.await_links()
    timed.wait_idle()


async def test_target_killed_and_restarted(timed: Cluster, plain: tuple[int, ...]) -> None:
    def strike() -> None:
        timed.kill("target")
        timed.restart("target")

    ids, _, _, _ = await stream_and_strike(timed, strike)
    assert tuple(ids) == plain
    timed.await_links()
    timed.wait_idle()


async def test_target_dead_for_good_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags: dict[str, object] = {"target_wait_ms": 500.0}
    with Cluster(
        tmp_path_factory.mktemp("dead"), target_model=TIMED, drafters=(), coordinator_flags=flags
    ) as cluster:
        with pytest.raises(PeerUnavailable, match="target"):
            await stream_and_strike(cluster, lambda: cluster.kill("target"), resume_wait_s=0)
        with pytest.raises(PeerUnavailable, match="target"), cluster.client(resume_wait_s=0) as client:
            client.generate(request())
        cluster.restart("target")
        cluster.await_links()
        with cluster.client() as client:
            assert len(client.generate(request(8)).token_ids) == 8


async def test_coordinator_killed_and_restarted_resumes_the_same_text(timed: Cluster, plain: tuple[int, ...]) -> None:
    with timed.client() as client:
        undisturbed = client.generate(request()).text

    def strike() -> None:
        timed.kill("coordinator")
        timed.restart("coordinator")

    ids, _, text, _ = await stream_and_strike(timed, strike)
    assert tuple(ids) == plain
    assert text == undisturbed, "joined at any byte of a character"
    timed.wait_idle()


def test_every_resume_point_joins_to_the_same_text(timed: Cluster) -> None:
    """The bytes of table text are mostly broken UTF-8: every cut is a character boundary case."""
    with timed.client() as client:
        whole = client.generate(request(40))
        events = list(client.stream(request(40)))
        started = events[0]
        assert isinstance(started, Started)
        for cut in range(1, 40, 3):
            first = client.generate(request(cut))
            shown = "".join(_shown_text(client, cut))
            resumed = client.generate(
                GenerateRequest(
                    token_ids=(10, 200, 30),
                    seed=23,
                    max_new_tokens=40,
                    ignore_eos=True,
                    resume_token_ids=first.token_ids,
                )
            )
            assert first.token_ids + resumed.token_ids == whole.token_ids
            assert shown + resumed.text == whole.text, cut


def _shown_text(client: object, length: int) -> Iterator[str]:
    """Text of the first tokens without the flush at the end, as a broken stream leaves it."""
    for event in client.stream(request(length)):  # type: ignore[attr-defined]
        if isinstance(event, Tokens):
            yield event.text


async def test_client_cancel_frees_both_sessions(timed: Cluster) -> None:
    async with timed.async_client() as client:
        stream = client.stream(request(2000))
        async for event in stream:
            if isinstance(event, Tokens):
                break
        assert timed.status("target").sessions == 1
        cancelled = time.monotonic()
        await stream.aclose()
        timed.wait_idle()
        assert time.monotonic() - cancelled < 5
        assert len((await client.generate(request(8))).token_ids) == 8


async def test_cut_link_frees_its_sessions_and_they_go_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("cut"), target_model=TIMED, drafters=(f"model:{NEAR}",))
    with Proxy(("127.0.0.1", cluster.ports["target"])) as proxy:
        cluster.target_proxy = proxy.address
        with cluster:
            with cluster.client() as client:
                plain = client.generate(request(off=True)).token_ids
            ids, _, _, _ = await stream_and_strike(cluster, proxy.cut)
            assert tuple(ids) == plain
            cluster.wait_idle()


async def test_black_hole_target_is_noticed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The target's bytes stop in both directions while the connection stays up."""
    cluster = Cluster(
        tmp_path_factory.mktemp("hole"),
        target_model=TIMED,
        drafters=(f"model:{NEAR}",),
        coordinator_flags={"round_timeout_ms": 600.0},
    )
    with Proxy(("127.0.0.1", cluster.ports["target"])) as proxy:
        cluster.target_proxy = proxy.address
        with cluster:
            with cluster.client() as client:
                plain = client.generate(request(off=True)).token_ids
            ids, _, _, _ = await stream_and_strike(cluster, proxy.swallow_current)
            assert tuple(ids) == plain
            eventually(lambda: cluster.status("target").sessions == 0, "keepalive ends the old link", 30)


async def test_one_sessions_failure_leaves_the_others_alone(timed: Cluster) -> None:
    async with timed.async_client() as client:
        long = asyncio.ensure_future(client.generate(request()))
        with pytest.raises(InvalidInput, match="max_new_tokens"):
            await client.generate(request(1_000_000))
        assert len((await long).token_ids) == LENGTH
