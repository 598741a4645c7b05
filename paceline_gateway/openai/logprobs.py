"""Log-probabilities in the shapes of chat and of completions, those of an echoed prompt too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from paceline.models.tokenizer import REPLACEMENT, Tokenizer
from paceline.protocol.generation import PromptLogprobs
from paceline.protocol.target import RowLogprobs

LEAST = -9999.0
"""What stands for minus infinity, which JSON has no number for; OpenAI's own."""
MOST_HELD = 8
"""Tokens whose text is looked for together: a character has at most 4 bytes, so more have no text of their own."""


def chat_logprobs(rows: Sequence[RowLogprobs], top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: each token with its `top` most probable ones."""
    content = []
    for row in rows:
        entries = [_entry(*each, tokenizer) for each in zip(row.token_ids, row.logprobs, strict=True)]
        content.append(entries[0] | {"top_logprobs": entries[1 : top + 1]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[RowLogprobs],
    starts: Sequence[int],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion.

    Args:
        token_ids: that were emitted.
        rows: one for each.
        starts: one for each: where its text begins in the choice's text, in characters.
        tokenizer: of the model.
    """
    return {
        "tokens": [token_text(token_id, tokenizer) for token_id in token_ids],
        "token_logprobs": [_finite(row.logprobs[0]) for row in rows],
        "top_logprobs": [_most_probable(row, tokenizer) for row in rows],
        "text_offset": list(starts),
    }


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


@lru_cache(1 << 16)
def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's own text; empty: a special one. Bytes that are no whole character are U+FFFD."""
    return tokenizer.decode((token_id,))


def _most_probable(row: RowLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """By text, most probable first, the emitted token among them; of equal texts the more probable one counts."""
    found: dict[str, float] = {}
    for token_id, logprob in sorted(zip(row.token_ids, row.logprobs, strict=True), key=lambda each: -each[1]):
        found.setdefault(token_text(token_id, tokenizer), _finite(logprob))
    return found


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    written = list(_token_bytes(token_id, tokenizer))
    return {"token": token_text(token_id, tokenizer), "logprob": _finite(logprob), "bytes": written}


@lru_cache(1 << 16)
def _token_bytes(token_id: int, tokenizer: Tokenizer) -> bytes:
    return tokenizer.text_bytes(token_id)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
