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
"""OpenAI's number for minus infinity, which JSON doesn't have."""
MAX_PENDING_TOKENS = 8
"""Tokens that are decoded together at most: a character has at most 4 bytes, so more tokens have no text."""


def chat_logprobs(rows: Sequence[RowLogprobs], top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write `choices[].logprobs` of a chat: each token with the `top` most probable ones."""
    content = []
    for row in rows:
        pairs = zip(row.token_ids, row.logprobs, strict=True)
        entries = [_entry(token_id, logprob, tokenizer) for token_id, logprob in pairs]
        content.append(entries[0] | {"top_logprobs": entries[1 : top + 1]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[RowLogprobs],
    starts: Sequence[int],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Write `choices[].logprobs` of a completion.

    Args:
        token_ids: the emitted tokens.
        rows: one for each token.
        starts: one for each token: where its text begins in the choice's text, in characters.
        tokenizer: the model's.
    """
    return {
        "tokens": [token_text(token_id, tokenizer) for token_id in token_ids],
        "token_logprobs": [_finite(row.logprobs[0]) for row in rows],
        "top_logprobs": [_most_probable(row, tokenizer) for row in rows],
        "text_offset": list(starts),
    }


class PromptEcho:
    """Writes log-probabilities of an echoed prompt, token by token; the prompt is decoded in short pieces."""

    def __init__(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._ids = token_ids
        self._tokenizer = tokenizer
        self._context_start = self._read_end = self._next = 0
        self._length = 0
        """Length of the first `_read_end` tokens' text, in characters."""

    def first(self) -> dict[str, Any]:
        """Write the first token, which has no log-probability."""
        start, token = self._start(), token_text(self._ids[0], self._tokenizer)
        return {"tokens": [token], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [start]}

    def rows(self, event: PromptLogprobs) -> dict[str, Any]:
        """Write the next tokens."""
        ids = [row.token_ids[0] for row in event.rows]
        starts = [self._start() for _ in ids]
        return completion_logprobs(ids, event.rows, starts, self._tokenizer)

    def _start(self) -> int:
        """Return where the next token's text begins, in characters, and step on."""
        start = self._length
        self._next += 1
        context = self._tokenizer.decode(self._ids[self._context_start : self._read_end])
        text = self._tokenizer.decode(self._ids[self._context_start : self._next])
        is_whole = len(text) > len(context) and not text.endswith(REPLACEMENT)
        if is_whole or self._next - self._read_end >= MAX_PENDING_TOKENS:
            self._length += max(0, len(text) - len(context))
            self._context_start, self._read_end = self._read_end, self._next
        return start


@lru_cache(1 << 16)
def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token's own text; empty: a special token. Bytes that are no whole character become U+FFFD."""
    return tokenizer.decode((token_id,))


def _most_probable(row: RowLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Map texts to log-probabilities, most probable first; of equal texts the more probable token counts."""
    by_text: dict[str, float] = {}
    for token_id, logprob in sorted(zip(row.token_ids, row.logprobs, strict=True), key=lambda pair: -pair[1]):
        by_text.setdefault(token_text(token_id, tokenizer), _finite(logprob))
    return by_text


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    token_bytes = list(_token_bytes(token_id, tokenizer))
    return {"token": token_text(token_id, tokenizer), "logprob": _finite(logprob), "bytes": token_bytes}


@lru_cache(1 << 16)
def _token_bytes(token_id: int, tokenizer: Tokenizer) -> bytes:
    return tokenizer.text_bytes(token_id)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
