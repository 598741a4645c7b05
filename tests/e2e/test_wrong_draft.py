"""A draft service that answers wrongly, or never: the text is the target's own, the round costs at most its wait."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.rpc.link import FrameWriter, serve_draft_link
from paceline.types import (
    Acceptance,
    Commit,
    DraftCommand,
    DraftedProposal,
    DraftEvent,
    DraftOpen,
    Fingerprint,
    GenerateRequest,
    Outcome,
    Proposal,
    Provenance,
    SpeculationSettings,
    Welcome,
)
from paceline.v1 import draft_service_pb2_grpc as pb_grpc
from tests.e2e.cluster import Cluster

LENGTH = 24
MOST_WAITS = 5
"""Rounds 1, 3, 6, 11 and 20."""
Answer = Callable[[int, Outcome | None], DraftedProposal | None]


def out_of_range(session: int, outcome: Outcome | None) -> DraftedProposal:
    return DraftedProposal(session, outcome, Proposal(1, (64,), (0.5,)))


def too_long(session: int, outcome: Outcome | None) -> DraftedProposal:
    return DraftedProposal(session, outcome, Proposal(1, (1,) * 20, (0.5,) * 20))


def without_supports(session: int, outcome: Outcome | None) -> DraftedProposal:
    return DraftedProposal(session, outcome, Proposal(1, (1,), (0.5,)))


def for_another_outcome(session: int, outcome: Outcome | None) -> DraftedProposal:
    return DraftedProposal(session, Outcome(10_000, -1, 0), Proposal(1, (1,), (0.5,)))


def never(session: int, outcome: Outcome | None) -> None:
    return None


class WrongDraft(pb_grpc.DraftServiceServicer):
    """Welcomes every coordinator and gives the answer it was made with."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def Draft(self, request_iterator: Any, context: Any) -> None:
        welcome = Welcome("wrong", Fingerprint(), max_length=4096, max_sessions=10, drafters=("wrong",))
        await serve_draft_link(context, welcome, lambda writer: Handler(writer, self._answer))


class Handler:
    def __init__(self, writer: FrameWriter[DraftEvent], answer: Answer) -> None:
        self._writer = writer
        self._answer = answer

    def on_command(self, command: DraftCommand) -> None:
        if isinstance(command, DraftOpen | Commit):
            outcome = command.outcome if isinstance(command, Commit) else None
            drafted = self._answer(command.session_id, outcome)
            if drafted is not None:
                self._writer.send(drafted)

    def closed(self) -> None:
        """Nothing is held."""


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    pb_grpc.add_DraftServiceServicer_to_server(WrongDraft(answer), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest.mark.parametrize("answer", [out_of_range, too_long, without_supports, for_another_outcome, never])
async def test_the_text_goes_on_without_it(tmp_path: Path, answer: Answer) -> None:
    acceptance = Acceptance.REJECTION if answer is without_supports else Acceptance.COUPLED
    async with serving(answer) as address:
        flags: dict[str, object] = {"draft.address": address, "draft_timeout_ms": 50.0}
        with Cluster(tmp_path, drafters=(), coordinator_flags=flags) as cluster:
            async with cluster.async_client() as client:
                plain = await client.generate(request(acceptance, off=True))
                drafted = await client.generate(request(acceptance, off=False))
    assert set(drafted.provenance) == {Provenance.TARGET}
    assert drafted.token_ids == plain.token_ids
    waited = [record for record in drafted.stats.records if record.draft_wait_ms >= 50]
    assert len(waited) <= MOST_WAITS, "each wait in vain doubles the rounds that don't wait"


def request(acceptance: Acceptance, *, off: bool) -> GenerateRequest:
    return GenerateRequest(
        token_ids=(1, 2, 3),
        seed=8,
        max_new_tokens=LENGTH,
        acceptance=acceptance,
        speculation=SpeculationSettings(off=off, num_draft_tokens=3),
    )
