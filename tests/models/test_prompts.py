"""Prompts: refused by their bytes, and a long one holds nobody up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.models import prompts
from paceline.models.prompts import AT_ONCE_BYTES, LONG_BYTES, PromptReader
from paceline.models.tokenizer import TableTokenizer, Tokenizer, load_tokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import ChatMessage, GenerateRequest
from tests.rpc.harness import until

WAIT_S = 10.0
CONTEXT = 1 << 22


class HeldTokenizer(TableTokenizer):
    """Reads bytes; a text of `held_from` characters waits until it may go on."""

    def __init__(self, held_from: int) -> None:
        super().__init__(300, None)
        self.held_from = held_from
        self.go = threading.Event()
        self.begun = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        self.begun += 1
        if len(text) >= self.held_from:
            assert self.go.wait(WAIT_S), "the test lets it go on"
        return (1,)

    def render_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return self.encode("".join(message.content for message in messages))


@asynccontextmanager
async def reading(tokenizer: Tokenizer, context: int = CONTEXT) -> AsyncIterator[Callable[[GenerateRequest], Any]]:
    reader = PromptReader(tokenizer)
    try:
        yield lambda request: asyncio.wait_for(reader.tokenise(request, context), WAIT_S)
    finally:
        if isinstance(tokenizer, HeldTokenizer):
            tokenizer.go.set()
        reader.close()


def prompt_of(size: int) -> GenerateRequest:
    return GenerateRequest(prompt="x" * size)


def chat_of(size: int) -> GenerateRequest:
    half = ChatMessage("user", "x" * (size // 2))
    return GenerateRequest(messages=(half, half))


@pytest.mark.parametrize("ask", [prompt_of, chat_of])
async def test_twenty_long_prompts_hold_up_neither_short_nor_middling_ones(
    ask: Callable[[int], GenerateRequest],
) -> None:
    tokenizer = HeldTokenizer(held_from=3_900_000)
    async with reading(tokenizer) as read:
        long = [asyncio.ensure_future(read(ask(3_900_000))) for _ in range(20)]
        for size in (2, AT_ONCE_BYTES, AT_ONCE_BYTES + 2, LONG_BYTES) * 5:
            assert (await read(ask(size))).token_ids == (1,)
        assert not any(each.done() for each in long)
        tokenizer.go.set()
        assert [each.token_ids for each in await asyncio.gather(*long)] == [(1,)] * 20


async def test_on_the_event_loop_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: read at once, a long prompt is let go before anything else gets a turn."""
    monkeypatch.setattr(prompts, "AT_ONCE_BYTES", 1 << 30)
    tokenizer = HeldTokenizer(held_from=3_900_000)
    threading.Timer(0.2, tokenizer.go.set).start()
    async with reading(tokenizer) as read:
        long = asyncio.ensure_future(read(prompt_of(3_900_000)))
        await read(prompt_of(2))
        assert tokenizer.go.is_set()
        await long


async def test_a_prompt_whose_request_has_gone_is_not_read() -> None:
    tokenizer = HeldTokenizer(held_from=1_000_000)
    async with reading(tokenizer) as read:
        waiting = [asyncio.ensure_future(read(prompt_of(1_000_000))) for _ in range(5)]
        await until(lambda: tokenizer.begun)
        for each in waiting[1:]:
            each.cancel()
        await asyncio.gather(*waiting[1:], return_exceptions=True)
        tokenizer.go.set()
        assert (await waiting[0]).token_ids == (1,)
        assert (await read(prompt_of(1_000_000))).token_ids == (1,)
    assert tokenizer.begun == 2


@pytest.mark.parametrize(
    ("vocab", "request_", "name", "most"),
    [
        (300, GenerateRequest(prompt="é" * 51), "prompt bytes = 102", 100),
        (64, GenerateRequest(prompt="𝄞" * 101), "prompt bytes = 404", 400),
        (300, chat_of(102), "chat content bytes = 102", 100),
    ],
)
async def test_more_bytes_than_the_context_can_hold_are_refused_unread(
    vocab: int, request_: GenerateRequest, name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(f"table:vocab={vocab}")
    monkeypatch.setattr(tokenizer, "encode", None)
    with pytest.raises(InvalidInput) as caught:
        async with reading(tokenizer, 100) as read:
            await read(request_)
    assert caught.value.message == f"{name}: must be at most {most}, the longest text of 100 tokens"


@pytest.mark.parametrize("vocab", [40, 300])
def test_no_text_of_a_context_s_length_is_refused(vocab: int) -> None:
    tokenizer = load_tokenizer(f"table:vocab={vocab}")
    for text in ("x", "é", "𝄞", "\0"):
        assert len(text.encode()) <= len(tokenizer.encode(text)) * tokenizer.max_token_bytes


class FrontedTokenizer(TableTokenizer):
    """Puts token 299 in front of every text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return (*((299,) if add_special_tokens else ()), *super().encode(text))


async def test_ids_pass_as_they_are_and_text_becomes_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("table:vocab=300")
    async with reading(tokenizer, 100) as read:
        ids = GenerateRequest(token_ids=(1, 2))
        assert await read(ids) is ids
        text = GenerateRequest(prompt="hi", seed=4)
        assert await read(text) == GenerateRequest(token_ids=(104, 105), seed=4)
        monkeypatch.setattr(tokenizer, "encode", lambda text: ())
        with pytest.raises(InvalidInput, match="prompt = 'hi': must be text of at least 1 token"):
            await read(text)


@pytest.mark.parametrize(
    ("beside", "token_ids"), [({"prompt": "hi"}, (299, 104, 105)), ({"token_ids": (7,)}, (7,))], ids=["text", "ids"]
)
async def test_a_prediction_becomes_ids_without_what_stands_in_front_of_a_prompt(
    beside: dict[str, Any], token_ids: tuple[int, ...]
) -> None:
    async with reading(FrontedTokenizer(300, None), 100) as read:
        ids = await read(GenerateRequest(**beside, prediction_text="ho"))
    assert (ids.token_ids, ids.prediction, ids.prediction_text) == (token_ids, (104, 111), "")
