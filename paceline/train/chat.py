"""Chats as token ids: the template around a turn, and the thinking inside an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.generation import ChatMessage
from paceline.train.corpus import Role, TokenIds


@dataclass(frozen=True)
class ChatFrame:
    """The template around a user's first turn."""

    before: TokenIds
    after: TokenIds
    """From the user's end of turn to where the assistant begins."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFrame:
        """Read it off two rendered chats: what they share at both ends is the template.

        Raises:
            Unsupported: the tokenizer has no chat template.
        """
        one, other = (tokenizer.render_chat([ChatMessage("user", text)]) for text in ("q", "7"))
        start, end = shared_prefix(one, other), shared_prefix(one[::-1], other[::-1])
        return cls(one[:start], one[len(one) - end :])


OPEN_TAG, CLOSE_TAG = "<think>", "</think>"


def mark_thinking(tokens: NDArray[np.int32], roles: NDArray[np.int8], tokenizer: Tokenizer) -> NDArray[np.int8]:
    """Roles with the answer's thinking, tags included, as `Role.THINKING`. Returns a new array [length].

    Thinking that is never closed goes on to the end; a closing tag alone ends
    thinking that the template opened.
    """
    marked = roles.copy()
    answer = np.flatnonzero(roles == Role.ANSWER)
    if not answer.size:
        return marked
    start, end = int(answer[0]), int(answer[-1]) + 1
    text = tokens[start:end].tolist()
    at, opened_before = 0, True
    while at < len(text):
        opened = _find_tag(text, at, OPEN_TAG, tokenizer)
        closed = _find_tag(text, at, CLOSE_TAG, tokenizer)
        if opened is None and (closed is None or not opened_before):
            break
        low = at if opened is None or (opened_before and closed is not None and closed[0] < opened[0]) else opened[0]
        close = _find_tag(text, low, CLOSE_TAG, tokenizer)
        high = len(text) if close is None else close[1]
        marked[start + low : start + high] = Role.THINKING
        at, opened_before = high, False
    return marked


def _find_tag(text: list[int], at: int, tag: str, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Tokens [first, last + 1) from `at` on that write a tag, wherever the tokenizer cuts it."""
    own = tokenizer.encode(tag)[-1:]
    if tag not in tokenizer.decode(own):
        whole = len(tokenizer.encode(tag)) - len(tokenizer.encode("")) == 1  # a special token, which decode skips
        own = own if whole else ()
    if own:
        found = next((i for i in range(at, len(text)) if text[i] == own[0]), None)
        return None if found is None else (found, found + 1)
    if tag not in tokenizer.decode(text[at:]):
        return None
    end = _smallest(at, len(text), lambda high: tag in tokenizer.decode(text[at:high]))
    first = _smallest(at, end, lambda low: tag not in tokenizer.decode(text[low:end])) - 1
    return first, end


def _smallest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest n in (low, high] for which a monotone condition holds; `high` if none below it does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def shared_prefix(one: TokenIds, other: TokenIds) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
