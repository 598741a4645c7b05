"""Drafts for a server that is not ours, from a real draft service over a real link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from draft_service.scheduler import DraftScheduler
from paceline.drafting.client import DraftClient
from paceline.drafting.draft_pool import DraftPool
from paceline.drafting.round_draft import MAX_PENDING_TOKENS
from paceline.drafting.served_request import GreedyRequest, RoundEnd, ServedRequest
from paceline.protocol.codec import failure_of
from paceline.protocol.draft import DraftBudget, DraftedProposal, DraftOpened, Shadow
from paceline.protocol.errors import InternalError, Overloaded
from paceline.protocol.generation import Provenance
from paceline.protocol.proposal import ROOT, Outcome, Proposal, SparseDistribution
from paceline.protocol.records import RoundRecord, StepTimings
from paceline.runtime import metrics
from tests.drafting.foreign_server import TOKENS, ForeignServer, Judge, client_of, lie_to, plain
from tests.e2e.cluster import free_port
from tests.metrics.scrape import Exposition
from tests.services.harness import SPEC, RecordingEngine, chain, draft_service, eventually

PROMPTS = ((1, 2, 3), (9, 8), (1, 2, 3))
LENGTH = 40


@asynccontextmanager
async def drafting(
    *prompts: Sequence[int], judge: Judge | None = None, **settings: Any
) -> AsyncIterator[tuple[ForeignServer, DraftClient, DraftScheduler]]:
    """A server with requests, its client, and the draft service's sessions."""
    async with (
        draft_service(RecordingEngine()) as (servicer, address),
        client_of(address, judge, **settings) as client,
    ):
        await eventually(lambda: client.is_up, "the link")
        server = ForeignServer(client)
        for prompt in prompts:
            await server.admit(prompt)
        yield server, client, servicer.scheduler


def check(server: ForeignServer, prompts: Any = PROMPTS) -> None:
    for each, prompt in zip(server.served, prompts, strict=True):
        assert each.text == plain(prompt, len(each.text) - len(prompt))


async def test_a_step_verifies_what_was_drafted_for_its_outcome() -> None:
    """The draft is the server's own model here, so all that it had time to draft is accepted."""
    async with drafting(*PROMPTS) as (server, client, scheduler):
        await server.run(LENGTH)
        check(server)
        counts = client.counts
        assert counts.hits > 0
        assert 0 < counts.accepted == counts.proposed <= counts.hits * TOKENS
        assert scheduler.sessions == client.sessions == len(PROMPTS)
        for each in server.served:
            client.end(each.request)
        await eventually(lambda: scheduler.sessions == 0, "no session is left at the draft")


async def test_a_server_without_a_draft_goes_on_alone() -> None:
    async with client_of(f"127.0.0.1:{free_port()}") as client:
        server = ForeignServer(client)
        await server.admit(PROMPTS[0])
        for _ in range(8):
            await server.step()
            assert server.served[0].offer == []
        check(server, PROMPTS[:1])


async def test_a_draft_that_dies_costs_proposals_alone() -> None:
    async with drafting(PROMPTS[0]) as (server, client, _):
        await server.run(12)
        peer = client._pool.peers[0]
        client._post(lambda: peer.link.drop(peer.link._unavailable()))
        await eventually(lambda: not client.sessions, "the session is lost")
        await server.step()
        await eventually(lambda: client.sessions == 1 or not client.is_up, "it is told")
        before = client.counts.hits
        while client.counts.hits == before:  # the link comes back, and the session with it
            await server.step()
            await asyncio.sleep(0.005)
        check(server, PROMPTS[:1])


def with_nodes(event: DraftedProposal, **changes: Any) -> DraftedProposal:
    return replace(event, proposal=replace(event.proposal, **changes))


def behind(event: DraftedProposal, **changes: Any) -> DraftedProposal:
    return event if event.outcome is None else replace(event, outcome=replace(event.outcome, **changes))


LIES: dict[str, Callable[[DraftedProposal], Any]] = {
    "ids beyond the vocabulary": lambda event: with_nodes(event, token_ids=(SPEC.vocab,) * len(event.proposal)),
    "other tokens": lambda event: with_nodes(
        event, token_ids=tuple((each + 1) % SPEC.vocab for each in event.proposal.token_ids)
    ),
    "a tree": lambda event: with_nodes(event, parents=(-1,) * len(event.proposal)),
    "too many nodes": lambda event: replace(event, proposal=chain([1] * 64, event.proposal.proposal_id)),
    "no nodes": lambda event: replace(event, proposal=chain([], event.proposal.proposal_id)),
    "supports": lambda event: with_nodes(
        event,
        supports=tuple(SparseDistribution((each,), (1.0,)) for each in event.proposal.token_ids),
        draft_probabilities=(1.0,) * len(event.proposal),
    ),
    "an id that it never had": lambda event: with_nodes(event, proposal_id=1 << 40),
    "another round": lambda event: behind(event, base_length=7),
    "a node beyond the round": lambda event: behind(event, node=50),
    "a next token beyond the vocabulary": lambda event: behind(event, next_token=SPEC.vocab + 9),
    "another outcome": lambda event: behind(event, next_token=5),
    "another session": lambda event: replace(event, session_id=event.session_id + 1),
    "a failure": lambda event: failure_of(event.session_id, InternalError("it can't")),
    "a failure of another session": lambda event: failure_of(event.session_id + 1, InternalError("it can't")),
    "overload": lambda event: failure_of(event.session_id, Overloaded("it is full")),
    "a shadow that nobody asked for": lambda event: Shadow(event.session_id, 0, (1, 2), (0.5, 0.5)),
    "a shadow of tokens that don't exist": lambda event: Shadow(event.session_id, -7, (1,) * 900, (0.5,) * 900),
    "negative ids": lambda event: with_nodes(event, token_ids=(-1,) * len(event.proposal)),
    "ids beyond any number": lambda event: with_nodes(event, token_ids=(1 << 70,) * len(event.proposal)),
    "a round before the prompt": lambda event: behind(event, base_length=-3),
    "a round that is far ahead": lambda event: behind(event, base_length=1 << 40),
    "a node before the round": lambda event: behind(event, node=-9),
    "a negative next token": lambda event: behind(event, next_token=-1),
    "an answer that nobody waits for": lambda event: replace(event, outcome=None),
    "a drafter of another name": lambda event: with_nodes(event, drafter="another\n" * 99),
    "times that can't be": lambda event: replace(event, timings=StepTimings(service_ms=float("nan"), rows=-5)),
    "that it has opened again": lambda event: DraftOpened(event.session_id, "another", 1 << 40),
}


ALIKE = {"ids beyond any number", "a round before the prompt", "a node before the round", "another session"}
ALIKE |= {"a next token beyond the vocabulary", "a negative next token", "a shadow that nobody asked for"}
"""Lies that another one is like: the client does the same with both."""


@pytest.mark.parametrize("lie", [pytest.param(lie, marks=[pytest.mark.full] * (lie in ALIKE)) for lie in LIES])
async def test_a_draft_that_lies_costs_proposals_alone(lie: str) -> None:
    async with drafting() as (server, client, _):
        lies = lie_to(client, LIES[lie])
        await server.admit(PROMPTS[0])
        await eventually(lambda: bool(lies), "a lie")
        for _ in range(30):
            await server.step()
            assert all(0 <= each < SPEC.vocab for each in server.served[0].offer)
            assert len(server.served[0].offer) <= TOKENS
            await asyncio.sleep(0.002)
        check(server, PROMPTS[:1])


@pytest.mark.parametrize(
    ("tokens", "node", "is_ours"),
    [((9,), ROOT, True), ((5, 9), 0, True), ((6, 7, 9), 2, True), ((5, 7, 9), 1, False), ((8, 9), 0, False)],
)
def test_a_round_is_ours_whose_tokens_are_a_path_of_its_tree(
    tokens: tuple[int, ...], node: int, is_ours: bool
) -> None:
    pool = DraftPool(timeout_s=1.0, vocab_size=SPEC.vocab)
    request = ServedRequest(pool, GreedyRequest(1, 99), "", DraftBudget(2), (1, 2))
    request.proposal = Proposal(1, (5, 6, 7), (1.0,) * 3, (ROOT, ROOT, 1))
    assert request.begin_round(tokens) == (Outcome(1, node, 9), is_ours)
    request.proposal = None
    assert request.begin_round((9, 9))[1] is False


async def test_a_round_that_verified_something_else_begins_the_draft_anew() -> None:
    """A server may have put other tokens in the place of those that were offered."""
    async with drafting(PROMPTS[0]) as (server, _, scheduler):
        (each,) = server.served
        await server.run(10)
        opened = each.request.session.peer
        each.offer = plain(each.text, 2)[-2:]  # its own tokens: accepted, and never offered
        each.request.proposal = None
        session = each.request.session
        with mock.patch.object(session, "open", wraps=session.open) as reopened:
            await server.step()
            await eventually(lambda: reopened.called, "the draft has the text anew")
        await server.run(20)
        check(server, PROMPTS[:1])
        assert each.request.session.peer is opened
        await eventually(lambda: scheduler.sessions == 1, "the old session is closed")


async def test_a_client_that_rests_tells_nothing_and_comes_back() -> None:
    judge = Judge(offers=False)
    async with drafting(PROMPTS[0], judge=judge) as (server, client, scheduler):
        (each,) = server.served
        for _ in range(20):
            await server.step()
            assert each.offer == []
        assert scheduler.sessions == 0
        assert judge.learned == [(1, 1, False)] * 19
        judge.offers = True
        await server.step()
        await server.run(40)
        assert client.counts.hits > 0
        judge.offers = False
        before = each.request.length
        while each.request.length < before + 2 * MAX_PENDING_TOKENS + TOKENS:
            await server.step()
        await eventually(lambda: scheduler.sessions == 0, "it lags too far behind")
        check(server, PROMPTS[:1])


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds between looks whether the server is idle."""
    monkeypatch.setattr("paceline.drafting.client.LOOK_S", 0.05)
    return 0.05


@pytest.mark.usefixtures("often")
async def test_an_idle_server_keeps_no_session_and_goes_on_with_drafts() -> None:
    async with drafting(PROMPTS[0], idle_s=0.1) as (server, client, scheduler):
        await server.run(12)
        await eventually(lambda: scheduler.sessions == 0, "its sessions are closed")
        await server.step()
        before = client.counts.hits
        await server.run(30)
        assert client.counts.hits > before
        check(server, PROMPTS[:1])


async def test_a_server_before_its_first_step_is_not_idle(often: float) -> None:
    async with drafting(PROMPTS[0]) as (_, client, scheduler):
        await asyncio.sleep(2 * often)
        assert client.sessions == scheduler.sessions == 1


async def test_a_defect_in_following_ends_the_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with drafting(PROMPTS[0]) as (server, client, _):
        (each,) = server.served
        await server.run(10)

        def broken(end: RoundEnd) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(each.request, "follow", broken)
        await server.step()
        await eventually(lambda: client.sessions == 0, "the session is closed")
        await server.step()
        check(server, PROMPTS[:1])


async def test_rounds_are_recorded_with_the_wait_for_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[RoundRecord] = []

    def round_done(record: RoundRecord, provenance: Iterable[Provenance]) -> None:
        assert len([*provenance]) == record.accepted + 1
        records.append(record)

    monkeypatch.setattr(metrics, "round_done", round_done)
    async with drafting(PROMPTS[0]) as (server, client, _):
        await server.run(20)
        await server.step()
        await eventually(lambda: len(records) == client.counts.rounds, "all rounds")
    for record in records:
        assert record.draft_wait_ms + record.target.service_ms == pytest.approx(record.round_ms)
        assert record.cache_hit is (record.proposed > 0) is bool(record.drafter)
        assert record.cache_hit is not record.cache_miss
    assert any(record.cache_hit for record in records)
    assert sum(record.accepted for record in records) == client.counts.accepted
    bases = [record.base_length for record in records]
    assert bases == sorted(set(bases))
    assert all(b - a == each.accepted + 1 for a, b, each in zip(bases, bases[1:], records, strict=False))


async def test_the_rounds_of_a_step_have_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[float, list[RoundRecord]] = {}

    def round_done(record: RoundRecord, provenance: Iterable[Provenance]) -> None:
        steps.setdefault(record.round_ms, []).append(record)

    monkeypatch.setattr(metrics, "round_done", round_done)
    async with drafting(*PROMPTS[:2]) as (server, client, _):
        await server.run(20)
        await server.step()
        await eventually(lambda: sum(map(len, steps.values())) == client.counts.rounds, "all rounds")
    of_both = [records for records in steps.values() if len(records) == 2]
    assert any(record.proposed for records in of_both for record in records)
    for records in of_both:
        assert [each.target.rows for each in records] == [sum(1 + each.proposed for each in records)] * 2


async def test_its_rounds_are_counted_and_its_requests_left_to_the_server() -> None:
    assert metrics.configure("paceline-coordinator", model="m", prometheus=True)
    try:
        async with drafting(PROMPTS[0]) as (server, client, _):
            await server.run(20)
            client.end(server.served[0].request)
            await eventually(lambda: client.sessions == 0, "the request has ended")
            found = Exposition.of(metrics.exposition()[0].decode())
            assert found.value("paceline_round_duration_seconds_count") == client.counts.rounds
            assert found.value("paceline_tokens_committed_total", provenance="accepted") == client.counts.accepted > 0
            assert [found.value("paceline_requests_active", state=each) for each in ("waiting", "running")] == [0, 0]
    finally:
        metrics.shutdown()


async def test_a_proposal_never_passes_the_longest_request() -> None:
    async with drafting() as (server, client, _):
        client._max_length = 16
        each = await server.admit(PROMPTS[0])
        while each.request.length < 14:
            await server.step()
            assert not each.offer or each.request.length + len(each.offer) + 1 <= 16
        assert each.request.propose(Outcome(each.request.length - 1, -1, 0)) is None
