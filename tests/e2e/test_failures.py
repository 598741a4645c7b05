"""Killed, frozen and cut peers: the text goes on, unchanged in coupled mode, and the next request works."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial

import pytest

from paceline.client import Generation
from paceline.client.shared import Collector
from paceline.local.service_process import Flags
from paceline.protocol.errors import PeerUnavailable
from paceline.protocol.generation import GenerateRequest, Provenance, SpeculationSettings, Tokens
from tests.chaos.proxy import Proxy
from tests.e2e.cluster import Cluster, cluster_fixture, eventually
from tests.e2e.streams import read, stream

TIMED = "table:vocab=300,seed=1,eos=299,step_ms=4"
NEAR = "table:vocab=300,seed=1,eos=299,noise=0.2,step_ms=1"
LENGTH = 120
"""Long enough that every failure strikes in the middle of the text: 4 ms and more a round."""
STRUCK_AT = 40
OFF = SpeculationSettings(off=True)
request = partial(
    GenerateRequest,
    token_ids=(10, 200, 30),
    seed=23,
    max_new_tokens=LENGTH,
    ignore_eos=True,
    speculation=SpeculationSettings(num_draft_tokens=3),
)
timed = cluster_fixture(TIMED, NEAR)


@pytest.fixture(scope="module")
def plain(timed: Cluster) -> Generation:
    """The text, without a draft and undisturbed."""
    with timed.client() as client:
        return client.generate(request(speculation=OFF))


async def test_draft_killed_and_restarted_within_one_text(timed: Cluster, plain: Generation) -> None:
    async with timed.async_client() as client, aclosing(client.stream(request(max_new_tokens=3000))) as events:
        text = Collector()
        await read(events, text, STRUCK_AT)
        timed.kill("draft")
        await read(events, text, 2 * LENGTH)
        await asyncio.to_thread(timed.restart, "draft")
        async for event in events:
            if isinstance(event, Tokens) and Provenance.ACCEPTED in event.provenance:
                break
        else:
            pytest.fail("the draft didn't join again")
    assert text.token_ids[:LENGTH] == plain.token_ids
    timed.await_links()


async def test_every_resume_point_joins_to_the_same_text(timed: Cluster) -> None:
    """The bytes of table text are mostly broken UTF-8: every cut is a character boundary case."""

    async def join(cut: int) -> tuple[tuple[int, ...], str]:
        first = Collector()
        async for event in client.stream(request(max_new_tokens=cut)):
            first.add(event)
        resumed = await client.generate(request(max_new_tokens=40, resume_token_ids=first.token_ids))
        assert first.end_event is not None
        # A broken stream has no flush of what is left of a character.
        shown = first.generation().text.removesuffix(first.end_event.text)
        return first.token_ids + resumed.token_ids, shown + resumed.text

    async with timed.async_client() as client:
        whole = await client.generate(request(max_new_tokens=40))
        joined = await asyncio.gather(*map(join, range(1, 40)))
    assert set(joined) == {(whole.token_ids, whole.text)}


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Proxy]]:
    """A cluster of little patience, and what its coordinator's link to the target passes through."""
    patience: Flags = {"round_timeout_ms": 600.0, "target_wait_ms": 500.0}
    cluster = Cluster(tmp_path_factory.mktemp("proxied"), TIMED, (f"model:{NEAR}",), coordinator_flags=patience)
    with Proxy(("127.0.0.1", cluster.ports["target"])) as proxy:
        cluster.target_proxy = proxy.address
        with cluster:
            yield cluster, proxy


async def test_a_link_in_a_black_hole_frees_its_sessions_and_they_go_on(
    proxied: tuple[Cluster, Proxy], plain: Generation
) -> None:
    """The target's bytes stop in both directions while the connection stays up."""
    cluster, proxy = proxied
    async with cluster.async_client() as client:
        text = await stream(client, request(), (STRUCK_AT, proxy.swallow_current))
    assert text.token_ids == plain.token_ids
    eventually(lambda: cluster.status("target").sessions == 0, "keepalive ends the old link", 30)
    cluster.wait_idle()


async def test_target_dead_for_good_is_named(proxied: tuple[Cluster, Proxy]) -> None:
    cluster, _ = proxied
    async with cluster.async_client(resume_wait_s=0) as client:
        with pytest.raises(PeerUnavailable, match="target"):
            await stream(client, request(), (STRUCK_AT, lambda: cluster.kill("target")))
        with pytest.raises(PeerUnavailable, match="target"):
            await client.generate(request())
        cluster.restart("target")
        cluster.await_links()
        assert len((await client.generate(request(max_new_tokens=8))).token_ids) == 8
