"""Reproducible mode over real links: tokens and log-probabilities are the same bits on every way to them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from paceline.engine.interface import Engine
from paceline.protocol.proposal import ROOT, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.session import Close
from paceline.protocol.target import Round, TargetOpened, Verdict
from paceline.sampling.tree import child_with_token
from tests.engine import tiny
from tests.services.harness import Events, linked, target_link, target_open, target_service, verdict_of

LENGTH = 40
SAMPLING = SamplingParams(temperature=0.9, logprobs=1)
SYSTEM = tuple(random.Random(2).choices(range(tiny.VOCAB), k=70))
PROMPTS = tuple((*SYSTEM[:cut], cut, 5) for cut in (3, 60, 70, 70, 40))

Emitted = tuple[int, float]
"""A token and its log-probability, whose bits are compared."""


@dataclass
class Request:
    """One text, round by round, by a schedule of its own; drafts know the right text where there is one."""

    number: int
    random: random.Random
    right: list[Emitted]
    session: int = 0

    async def text(self, events: Events) -> list[Emitted]:
        prompt = PROMPTS[self.number]
        emitted: list[Emitted] = []
        node, fresh = ROOT, True
        while len(emitted) < LENGTH:
            tokens = (*prompt, *(token for token, _ in emitted))
            if fresh or self.random.random() < 0.1:
                await self._open(events, tokens, len(prompt), fresh)
                node, fresh = ROOT, False
            proposal = self._proposal(len(emitted))
            verdict = await verdict_of(events, Round(self.session, len(tokens) - 1, node, (tokens[-1],), proposal))
            node = self._accept(proposal, verdict, emitted)
        events.send(Close(self.session))
        return emitted[:LENGTH]

    async def _open(self, events: Events, tokens: tuple[int, ...], prompt_length: int, fresh: bool) -> None:
        if not fresh:
            events.send(Close(self.session))
        self.session += 100
        noise = NoiseKey(self.number)
        events.send(target_open(self.session, tokens, prompt_length=prompt_length, sampling=SAMPLING, noise=noise))
        if self.random.random() < 0.5:
            await events.of(TargetOpened, self.session)

    def _proposal(self, at: int) -> Proposal | None:
        ahead = [token for token, _ in self.right[at : at + self.random.choice([0, 1, 3, 7, 9])]]
        if not ahead:
            return None
        wrong = [(token + 1) % tiny.VOCAB for token in ahead]
        if self.random.random() < 0.5:
            tokens = (*ahead, *wrong[:2])
            return Proposal(1, tokens, (1.0,) * len(tokens))
        # A wrong and a right child at each depth; the right ones have odd numbers.
        tokens = tuple(token for pair in zip(wrong, ahead, strict=True) for token in pair)
        parents = tuple(2 * (row // 2) - 1 if row > 1 else ROOT for row in range(len(tokens)))
        return Proposal(1, tokens, (1.0,) * len(tokens), parents)

    def _accept(self, proposal: Proposal | None, verdict: Verdict, emitted: list[Emitted]) -> int:
        node = ROOT
        while True:
            token, row = verdict.token_ids[node + 1], verdict.logprobs[node + 1]
            emitted.append((token, row.logprobs[row.token_ids.index(token)]))
            following = child_with_token(proposal, node, token) if proposal else None
            if following is None:
                return node
            node = following


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="reuse"), pytest.param(False, id="no reuse", marks=pytest.mark.full)],
)
def engine(request: pytest.FixtureRequest) -> Engine:
    config = tiny.llama(hidden_size=64, intermediate_size=1536)
    made, _ = tiny.engine_and_plain(config, reproducible=True, prefix_reuse=request.param)
    return made


async def test_any_batch_any_draft_any_reopening(engine: Engine) -> None:
    nobody: list[Emitted] = []
    async with target_service(engine, prefill_chunk=40, reproducible=True) as (_, address):
        async with linked(target_link(address)) as events:
            alone = [await Request(i, random.Random(0), nobody, i + 1).text(events) for i in range(len(PROMPTS))]
        for seed in range(2):
            async with linked(target_link(address)) as events:
                requests = [Request(i, random.Random(10 * seed + i), alone[i], i + 1) for i in range(len(PROMPTS))]
                found = await asyncio.gather(*(request.text(events) for request in requests))
            assert found == alone
