"""A request's prompt and prediction as token ids: refused by their size first, and read off the event loop.

A tokenizer takes half a second for a megabyte. Short texts are read at once; others in threads, in which the
library lets go of Python's lock. Long ones have a thread of their own, so that they delay each other and nobody else,
and hold the memory of one tokenising at a time (30 bytes and more for each byte of text).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import require
from paceline.protocol.generation import GenerateRequest

AT_ONCE_BYTES = 4 << 10
"""Texts up to this size are read on the event loop, in about 1 ms: a thread would take as long to answer."""
LONG_BYTES = 128 << 10
"""Beyond this size, about 50 ms, a text goes to the thread for long ones."""
PIECE_BYTES = 32
"""A value takes a template as long as tokenising so much text, about 10 µs: 4,096 empty messages are not short."""
SHORT_THREADS = 2
Output = TypeVar("Output")


class PromptReader:
    """Tokenises the prompts of one model's requests; belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._short = ThreadPoolExecutor(SHORT_THREADS, "tokenise-short")
        self._long = ThreadPoolExecutor(1, "tokenise-long")

    async def tokenise(self, request: GenerateRequest, max_length: int) -> GenerateRequest:
        """The request, with its prompt or messages and its prediction as token ids.

        Args:
            request: as the client sent it.
            max_length: the model's context length, in tokens.

        Raises:
            InvalidInput: more bytes than the context can hold, or no token at all.
            Unsupported: messages, and the model has no chat template.
        """
        if not request.token_ids:
            name = "chat content bytes" if request.messages else "prompt bytes"
            pieces = 2 * len(request.messages)
            ids = await self.read(lambda: self._ids(request), text_bytes(request), max_length, name, pieces)
            require(len(ids) > 0, "prompt", request.prompt, "text of at least 1 token")
            request = replace(request, prompt=None, messages=(), token_ids=ids)
        if request.prediction_text:
            ids = await self.tokenise_prediction(request.prediction_text, max_length)
            request = replace(request, prediction_text="", prediction=ids)
        return request

    async def tokenise_prediction(self, text: str, max_length: int) -> tuple[int, ...]:
        """A predicted output's ids; raises `InvalidInput` for more bytes than the context can hold."""
        encode = partial(self._tokenizer.encode, text, add_special_tokens=False)
        return await self.read(encode, utf8_bytes(text), max_length, "prediction bytes")

    async def read(
        self, tokenise: Callable[[], tuple[int, ...]], size: int, max_length: int, name: str, pieces: int = 0
    ) -> tuple[int, ...]:
        """The ids that `tokenise` returns; it runs where a text of its size belongs.

        Args:
            tokenise: makes ids of a text; it may run in a thread.
            size: of the text in bytes.
            max_length: the model's context length, in tokens.
            name: of the size, in an error.
            pieces: names of values that a template goes through, however short these are: a message has two.

        Raises:
            InvalidInput: more bytes than the context can hold.
            PacelineError: as `tokenise`.
        """
        most = max_length * self._tokenizer.max_token_bytes
        require(size <= most, name, size, f"at most {most}, the longest text of {max_length} tokens")
        return await self.run(tokenise, max(size, pieces * PIECE_BYTES))

    async def run(self, work: Callable[[], Output], size: int) -> Output:
        """Run `work` where tokenising a text of `size` bytes, which takes as long, belongs; returns its output."""
        if size <= AT_ONCE_BYTES:
            return work()
        threads = self._long if size > LONG_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """End the threads; waiting work is cancelled."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    def _ids(self, request: GenerateRequest) -> tuple[int, ...]:
        if request.messages:
            return self._tokenizer.render_chat(request.messages)
        return self._tokenizer.encode(request.prompt or "")


def text_bytes(request: GenerateRequest) -> int:
    """Size of the prompt, or of all messages' contents, in UTF-8."""
    texts = [message.content for message in request.messages] or [request.prompt or ""]
    return sum(map(utf8_bytes, texts))


def utf8_bytes(text: str) -> int:
    """Size of a text in UTF-8."""
    return len(text.encode("utf-8", "surrogatepass"))
