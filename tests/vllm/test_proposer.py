"""The proposer in a vLLM that is a fake: its config, its batch of rows, and its calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from paceline_vllm.proposer import DraftProposer
from tests.drafting.foreign_server import FIRST_STEP_S, TOKENS, plain, verify
from tests.e2e.cluster import free_port
from tests.services.harness import SPEC, RecordingEngine, draft_service, eventually
from tests.vllm.fakes import config, put_tokenizers

WIDTH = 128


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    put_tokenizers(monkeypatch)


@contextmanager
def proposer_of(asked: Any) -> Iterator[DraftProposer]:
    proposer = DraftProposer(asked)
    proposer.load_model(None)
    try:
        yield proposer
    finally:
        if proposer.drafts.client is not None:
            proposer.drafts.client.close()


class Batch:
    """vLLM's batch: rows of tokens that are moved when a request ends, and are written behind the step."""

    def __init__(self, proposer: DraftProposer) -> None:
        self.proposer = proposer
        self.texts: list[list[int]] = []
        self.offers: list[list[int]] = []
        self.token_ids = np.zeros((16, WIDTH), np.int32)

    def add(self, prompt: tuple[int, ...]) -> None:
        self.texts.append([*prompt])
        self.offers.append([])

    def remove(self, row: int) -> None:
        """The last row takes its place."""
        self.texts[row], self.offers[row] = self.texts[-1], self.offers[-1]
        self.texts.pop()
        self.offers.pop()

    def step(self, computing: int | None = None) -> None:
        """A step of all rows; that of `computing` computes a part of its prompt."""
        sampled = [
            [] if row == computing else verify(text, offer)
            for row, (text, offer) in enumerate(zip(self.texts, self.offers, strict=True))
        ]
        for row, new in enumerate(sampled):
            self.texts[row] += new
            self.token_ids[row, : len(self.texts[row])] = self.texts[row]
        lengths = np.array([*map(len, self.texts), *[0] * (16 - len(self.texts))], np.int32)
        self.offers = self.proposer.propose(sampled, lengths, self.token_ids, slot_mappings=None)

    def has_drafts(self) -> bool:
        requests = [each.request for each in self.proposer._rows._places]
        return all(each.session.has_prepared(each.length - 1) for each in requests)


async def test_rows_are_served_from_what_was_drafted_ahead_and_their_texts_are_the_servers_own() -> None:
    prompts = [(1, 2, 3), (7, 7), (1, 2, 3), (5,)]
    async with draft_service(RecordingEngine(), name="model") as (servicer, address):
        with proposer_of(config(address)) as proposer:
            client = proposer.drafts.client
            assert client is not None
            await eventually(lambda: client.is_up, "the link")
            batch = Batch(proposer)
            for prompt in prompts[:3]:
                batch.add(prompt)
            batch_prompts = [*prompts[:3]]
            await asyncio.to_thread(batch.step, 1)
            for step in range(14):
                async with asyncio.timeout(FIRST_STEP_S):
                    while not batch.has_drafts():  # noqa: ASYNC110  # by a thread
                        await asyncio.sleep(0.001)
                await asyncio.to_thread(batch.step)
                if step == 4:
                    batch.remove(0)
                    batch_prompts = [prompts[2], prompts[1]]
                if step == 8:
                    batch.add(prompts[3])
                    batch_prompts.append(prompts[3])
            for text, prompt in zip(batch.texts, batch_prompts, strict=True):
                assert text == plain(prompt, len(text) - len(prompt))
            assert client.counts.hits > 20
            assert client.counts.accepted > 0.9 * client.counts.proposed, (
                "equal ones that change places may be mixed up"
            )
            while servicer.scheduler.sessions > len(batch.texts):
                await asyncio.to_thread(batch.step)  # the request that has ended is noticed
            assert {len(offer) for offer in batch.offers} <= {*range(TOKENS + 1)}


@pytest.mark.parametrize("requests", [200, pytest.param(1_000, marks=pytest.mark.full)])
async def test_requests_that_are_aborted_at_any_time_leave_no_session(requests: int) -> None:
    draws = random.Random(4)
    async with draft_service(RecordingEngine()) as (servicer, address):
        with proposer_of(config(address, idle_s=0.2)) as proposer:
            assert proposer.drafts.client is not None
            client = proposer.drafts.client
            await eventually(lambda: client.is_up, "the link")
            batch = Batch(proposer)
            for request in range(requests):
                batch.add((request % SPEC.vocab, draws.randrange(SPEC.vocab)))
                await asyncio.to_thread(batch.step, draws.choice([None, len(batch.texts) - 1]))
                while len(batch.texts) > draws.randint(0, 8):
                    batch.remove(draws.randrange(len(batch.texts)))
            assert client.sessions > 0
            await eventually(lambda: client.sessions == servicer.scheduler.sessions == 0, "no session is left")


async def test_ranks_but_the_first_offer_nothing_and_link_to_nobody() -> None:
    proposer = DraftProposer(config("127.0.0.1:1", rank=3))
    assert proposer.drafts.client is None
    assert proposer.propose([[1], []], np.array([2, 2]), np.zeros((2, 8), np.int32)) == [[], []]
    with proposer_of(config(f"127.0.0.1:{free_port()}", rank=2)) as first:
        assert first.drafts.client is not None


async def test_a_defect_ends_the_drafts_and_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with proposer_of(config(f"127.0.0.1:{free_port()}")) as proposer:
        monkeypatch.setattr(proposer._rows, "find", lambda rows: 1 / 0)
        lengths, ids = np.array([2]), np.zeros((1, 8), np.int32)
        assert proposer.propose([[1]], lengths, ids) == [[]]
        assert proposer.drafts.client is None
        assert proposer.propose([[1]], lengths, ids) == [[]]


async def test_a_setting_that_is_wrong_is_named() -> None:
    with pytest.raises(ValidationError, match="answer_ms"):
        DraftProposer(config("127.0.0.1:1", answer_ms=-1))
    with pytest.raises(ValidationError, match="adress"):
        DraftProposer(config("127.0.0.1:1", adress="127.0.0.1:2"))
