"""A server that is not ours: it continues each request greedily by a table's law, and verifies what it is offered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.drafting.client import DraftClient, DraftClientSettings
from paceline.drafting.served_request import ServedRequest
from paceline.protocol.draft import DraftedProposal
from paceline.protocol.handshake import Fingerprint
from tests.services.harness import LAW, SPEC

TOKENS = 4
FIRST_STEP_S = 60.0
Text = list[int]


class Judge:
    """Offers or rests as the test says."""

    def __init__(self, *, offers: bool = True) -> None:
        self.offers = offers
        self.learned: list[tuple[int, int, bool]] = []

    def may_offer(self, rows: int) -> bool:
        return self.offers

    def learn(self, rows: int, tokens: int, step_ms: float, *, has_drafts: bool) -> None:
        assert step_ms > 0
        self.learned.append((rows, tokens, has_drafts))


def next_token(text: Sequence[int]) -> int:
    return int(LAW.logits(text).argmax())


def plain(prompt: Sequence[int], tokens: int) -> Text:
    """What the server says without drafts."""
    text = [*prompt]
    for _ in range(tokens):
        text.append(next_token(text))
    return text


def verify(text: Text, offer: Sequence[int]) -> Text:
    """The tokens that a step commits: of the offer those that are the server's own, and one more."""
    new: Text = []
    for token in (*offer, None):
        new.append(next_token([*text, *new]))
        if new[-1] != token:
            break
    return new


@dataclass
class Served:
    """One request at the server."""

    text: Text
    request: ServedRequest
    offer: Sequence[int] = ()


@dataclass
class ForeignServer:
    """Steps all its requests together. The client is asked from another thread than the services' loop."""

    client: DraftClient
    served: list[Served] = field(default_factory=list)

    async def admit(self, prompt: Sequence[int]) -> Served:
        text = [*prompt, next_token(prompt)]
        self.served.append(Served(text, await asyncio.to_thread(self.client.open, text, len(prompt))))
        return self.served[-1]

    async def step(self) -> None:
        new = [verify(each.text, each.offer) for each in self.served]
        for each, tokens in zip(self.served, new, strict=True):
            each.text += tokens
        rounds = [(each.request, tokens) for each, tokens in zip(self.served, new, strict=True)]
        for each, offer in zip(self.served, await asyncio.to_thread(self.client.step, rounds), strict=True):
            each.offer = offer

    async def drafted(self) -> None:
        """Wait until the draft has something for every round; its first step compiles."""
        async with asyncio.timeout(FIRST_STEP_S):
            for each in self.served:
                while not each.request.session.has_prepared(each.request.length - 1):  # noqa: ASYNC110  # by a thread
                    await asyncio.sleep(0.001)

    async def run(self, tokens: int) -> None:
        """Run until each request has so many tokens behind its first one, with the draft in time."""
        while min(each.request.length for each in self.served) < tokens:
            await self.drafted()
            await self.step()


@asynccontextmanager
async def client_of(
    address: str, judge: Judge | None = None, vocab: int = SPEC.vocab, **settings: Any
) -> AsyncIterator[DraftClient]:
    """A client that has been started, and is linked if somebody listens."""
    client = DraftClient(
        DraftClientSettings.model_validate({"draft": {"address": address}, **settings}),
        Fingerprint(vocab_size=vocab),
        most_tokens=TOKENS,
        max_length=SPEC.max_length,
        judge=judge or Judge(),
    )
    client.start()
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)


def lie_to(client: DraftClient, lie: Callable[[DraftedProposal], Any]) -> list[Any]:
    """Have the draft's proposals told to the client by a lie; the list grows by each that is one."""
    link = client._pool.peers[0].link
    honest, lies = link.on_event, list[Any]()

    def hear(event: Any) -> None:
        if isinstance(event, DraftedProposal):  # one that came is decoded when it is read
            read = DraftedProposal(event.session_id, event.outcome, event.proposal, event.timings)
            event = lie(read)
            if event != read:
                lies.append(event)
        honest(event)

    link.on_event = hear
    return lies
