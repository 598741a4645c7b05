"""A prompt's own tokens in a completion's log-probabilities: what each is, and where its text begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.models.tokenizer import REPLACEMENT, Tokenizer
from paceline.protocol.generation import PromptLogprobs
from paceline_gateway.logprobs import completion_logprobs, token_text

MOST_HELD = 8
"""Tokens whose text is looked for together: a character has at most 4 bytes, so more have no text of their own."""


class EchoedPrompt:
    """Follows a prompt token by token; the text behind which each stands is decoded in short pieces."""

    def __init__(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._ids = token_ids
        self._tokenizer = tokenizer
        self._context = self._read = self._next = 0
        self._length = 0
        """Characters of the text that the first `_read` tokens make."""

    def first(self) -> dict[str, Any]:
        """Of the first token, which nothing comes before: no number is known of it."""
        start, token = self._start(), token_text(self._ids[0], self._tokenizer)
        return {"tokens": [token], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [start]}

    def rows(self, event: PromptLogprobs) -> dict[str, Any]:
        """Of the next ones."""
        ids = [row.token_ids[0] for row in event.rows]
        starts = [self._start() for _ in ids]
        return completion_logprobs(ids, event.rows, starts, self._tokenizer)

    def _start(self) -> int:
        """Where the next token's text begins, in characters."""
        start = self._length
        self._next += 1
        before = self._tokenizer.decode(self._ids[self._context : self._read])
        text = self._tokenizer.decode(self._ids[self._context : self._next])
        whole = len(text) > len(before) and not text.endswith(REPLACEMENT)
        if whole or self._next - self._read >= MOST_HELD:
            self._length += max(0, len(text) - len(before))
            self._context, self._read = self._read, self._next
        return start
