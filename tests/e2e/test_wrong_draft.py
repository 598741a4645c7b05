"""A draft service that answers wrongly, or never: the text is the target's own, the round costs at most its wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from paceline.client import Client, Generation
from paceline.protocol import codec
from paceline.protocol.draft import Commit, DraftCommand, DraftedProposal, DraftEvent, DraftOpen, Verifying
from paceline.protocol.generation import GenerateRequest, Provenance, SpeculationSettings
from paceline.protocol.handshake import MAX_FRAME_BYTES, Fingerprint, Welcome
from paceline.protocol.proposal import AUTO, ROOT, Acceptance, Outcome, Proposal, SparseDistribution
from paceline.rpc.frames import MESSAGE_OVERHEAD_BYTES, FrameWriter
from paceline.rpc.link_kinds import DRAFT
from paceline.rpc.servicer import serve_link
from paceline.v1 import draft_service_pb2_grpc as pb_grpc
from tests.e2e.cluster import TARGET, Cluster, cluster_fixture, eventually, free_port

PORT = free_port()
LENGTH = 24
MODEL = "model"
TIMED = f"{TARGET},step_ms=20"
"""A target that leaves the draft time to prepare for outcomes."""
CROWDED = f"{TIMED},max_kv_rows=40"
"""A target with rows for fewer nodes than are proposed to it."""
PROMPT = (1, 2, 3)
REPEATS = (5, 6, 7, 8, 5, 6)
"""Its first round waits for the draft, and carries an n-gram match without one."""
MOST_WAITS = 5
"""Rounds 1, 3, 6, 11 and 20."""
Answer = Callable[[int, Outcome | None], DraftedProposal | None]
"""What is sent for a session that was opened, or a commit to it."""
Prepare = Callable[[int, int], DraftedProposal | None]
"""What is sent for the outcomes of a session's round, by its base length: before it leaves, and as it does."""


def out_of_range(session: int, outcome: Outcome | None) -> DraftedProposal:
    return DraftedProposal(session, outcome, Proposal(1, (64,), (0.5,)))


def too_long(session: int, outcome: Outcome | None) -> DraftedProposal:
    return DraftedProposal(session, outcome, Proposal(1, (1,) * 20, (0.5,) * 20))


def without_supports(session: int, outcome: Outcome | None) -> DraftedProposal:
    return DraftedProposal(session, outcome, Proposal(1, (1,), (0.5,)))


def with_supports(session: int, outcome: Outcome | None) -> DraftedProposal:
    support = SparseDistribution((1, 2), (0.5, 0.5))
    return DraftedProposal(session, outcome, Proposal(1, (1,), (0.5,), supports=(support,)))


def under_a_long_name(session: int, outcome: Outcome | None) -> DraftedProposal:
    """The records of all rounds would be more than a message holds."""
    return DraftedProposal(session, outcome, Proposal(1, (1,), (0.5,), drafter="x" * 200_000))


def as_large_as_a_frame(session: int, outcome: Outcome | None) -> DraftedProposal | None:
    """The round that carries it would be larger."""
    drafted = under_a_long_name(session, outcome)
    rest = codec.encode_draft_event(drafted).ByteSize() - len(drafted.proposal.drafter) + MESSAGE_OVERHEAD_BYTES
    name = "x" * (MAX_FRAME_BYTES - rest)
    return replace(drafted, proposal=replace(drafted.proposal, drafter=name)) if outcome is None else None


def for_another_outcome(session: int, outcome: Outcome | None) -> DraftedProposal:
    return DraftedProposal(session, Outcome(10_000, -1, 0), Proposal(1, (1,), (0.5,)))


def never(session: int, outcome: Outcome | None) -> None:
    return None


def for_nothing(session: int, base_length: int) -> None:
    return None


def prepared(session: int, base_length: int, node: int, next_token: int) -> DraftedProposal:
    return DraftedProposal(session, Outcome(base_length, node, next_token), Proposal(1, (1, 2), (0.5, 0.5)))


def for_a_token_beyond(session: int, base_length: int) -> DraftedProposal:
    return prepared(session, base_length, ROOT, 64)


def behind_a_node_beyond(session: int, base_length: int) -> DraftedProposal:
    return prepared(session, base_length, 40, 1)


def wide(nodes: int) -> Proposal:
    return Proposal(1, tuple(range(nodes)), (0.5,) * nodes, parents=(ROOT,) * nodes)


def too_wide(session: int, outcome: Outcome | None) -> DraftedProposal:
    return DraftedProposal(session, outcome, wide(60))


def too_wide_ahead(session: int, base_length: int) -> DraftedProposal:
    return DraftedProposal(session, Outcome(base_length, ROOT, 1), wide(50))


class WrongDraft(pb_grpc.DraftServiceServicer):
    """Welcomes every coordinator and gives the answers it was made with."""

    def __init__(self, answer: Answer, prepare: Prepare) -> None:
        self._answer = answer
        self._prepare = prepare

    async def Draft(self, request_iterator: Any, context: Any) -> None:
        welcome = Welcome("wrong", Fingerprint(), max_length=4096, max_sessions=10, drafters=(MODEL,))
        await serve_link(DRAFT, context, welcome, lambda writer: Handler(writer, self._answer, self._prepare))


class Handler:
    def __init__(self, writer: FrameWriter[DraftEvent], answer: Answer, prepare: Prepare) -> None:
        self._writer = writer
        self._answer = answer
        self._prepare = prepare

    def on_command(self, command: DraftCommand) -> None:
        if isinstance(command, DraftOpen):
            self._send(self._answer(command.session_id, None))
            self._send(self._prepare(command.session_id, len(command.spec.token_ids) - 1))
        elif isinstance(command, Commit):
            committed = command.committed_length + len(command.token_ids)
            self._send(self._answer(command.session_id, command.outcome))
            self._send(self._prepare(command.session_id, committed - 1))
        elif isinstance(command, Verifying):
            self._send(self._prepare(command.session_id, command.base_length))

    def _send(self, drafted: DraftedProposal | None) -> None:
        if drafted is not None:
            self._writer.send(drafted)

    def on_closed(self) -> None:
        """Nothing is held."""


@asynccontextmanager
async def serving(answer: Answer, prepare: Prepare = for_nothing, port: int = 0) -> AsyncIterator[str]:
    server = grpc.aio.server()
    pb_grpc.add_DraftServiceServicer_to_server(WrongDraft(answer, prepare), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def cluster_of_a_wrong_draft(target_model: str) -> Any:
    """One cluster for all drafts of a kind: each comes to the same port, and leaves it."""
    flags = {"draft.address": f"127.0.0.1:{PORT}", "draft_timeout_ms": 50.0}
    return cluster_fixture(target_model, coordinator_flags=flags)


quick, timed, crowded = map(cluster_of_a_wrong_draft, (TARGET, TIMED, CROWDED))


async def both(
    cluster: Cluster, answer: Answer, prepare: Prepare = for_nothing, **changes: Any
) -> tuple[Generation, Generation]:
    """A text without the wrong draft, and one with it."""
    async with serving(answer, prepare, PORT), cluster.async_client() as client:
        await linked(cluster.address)
        return await client.generate(request(off=True, **changes)), await client.generate(
            request(off=False, **changes)
        )


@pytest.mark.parametrize(
    "answer",
    [
        out_of_range,
        too_long,
        without_supports,
        with_supports,
        under_a_long_name,
        as_large_as_a_frame,
        for_another_outcome,
        never,
    ],
)
async def test_the_text_goes_on_without_it(quick: Cluster, answer: Answer) -> None:
    acceptance = Acceptance.REJECTION if answer is without_supports else Acceptance.COUPLED
    plain, drafted = await both(quick, answer, acceptance=acceptance)
    assert set(drafted.provenance) == {Provenance.TARGET}
    assert drafted.token_ids == plain.token_ids
    waited = [record for record in drafted.stats.records if record.draft_wait_ms >= 50]
    assert len(waited) <= MOST_WAITS, "behind a wait in vain nothing is waited for until the draft is heard of"


def request(
    acceptance: Acceptance = Acceptance.COUPLED, *, off: bool, prompt: tuple[int, ...] = PROMPT
) -> GenerateRequest:
    """Matches are proposed only for a prompt that repeats itself."""
    return GenerateRequest(
        token_ids=prompt,
        seed=8,
        max_new_tokens=LENGTH,
        acceptance=acceptance,
        speculation=SpeculationSettings(drafter=AUTO if prompt is REPEATS else MODEL, off=off, num_draft_tokens=3),
    )


@pytest.mark.parametrize(
    ("prepare", "prompt", "reason"),
    [
        (for_a_token_beyond, PROMPT, "drafted for a next token of 64"),
        (behind_a_node_beyond, PROMPT, "drafted for node 40"),
        (behind_a_node_beyond, REPEATS, "drafted for node 40"),
    ],
)
async def test_a_wrong_outcome_ends_the_drafts_session_and_nothing_else(
    timed: Cluster, prepare: Prepare, prompt: tuple[int, ...], reason: str
) -> None:
    log = timed.processes["coordinator"].log_file
    before = log.read_text().count(reason)
    plain, drafted = await both(timed, never, prepare, prompt=prompt)
    assert drafted.token_ids == plain.token_ids
    assert log.read_text().count(reason) > before


@pytest.mark.parametrize(("answer", "prepare"), [(too_wide, for_nothing), (never, too_wide_ahead)])
async def test_what_the_target_has_no_rows_for_is_cut(crowded: Cluster, answer: Answer, prepare: Prepare) -> None:
    plain, drafted = await both(crowded, answer, prepare)
    assert drafted.token_ids == plain.token_ids
    assert any(record.proposed for record in drafted.stats.records) == (answer is too_wide), "the rest is verified"
    assert "target refused" not in crowded.processes["coordinator"].log_file.read_text()
    crowded.wait_idle()


async def linked(address: str) -> None:
    """Wait until a coordinator has its link to a draft in this process."""

    def ready() -> bool:
        with Client(address) as client:
            return client.describe_models()[0].draft_ready

    await asyncio.to_thread(eventually, ready, "the coordinator has its link to the draft")
