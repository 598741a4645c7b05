"""Chats as token ids: the template around a turn, and the reasoning inside an answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.models.reasoning import ReasoningMarks, SpanFollower, reasoning_marks
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.generation import ChatMessage
from paceline_training.corpus import Role, TokenIds


@dataclass(frozen=True)
class ChatFrame:
    """The template around a user's first turn."""

    prefix: TokenIds
    suffix: TokenIds
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


def mark_thinking(tokens: NDArray[np.int32], roles: NDArray[np.int8], tokenizer: Tokenizer) -> NDArray[np.int8]:
    """Roles with the answer's reasoning, marks included, as `Role.THINKING`. Returns a new array [length].

    Reasoning that is never closed goes on to the end. What the template opened is found behind the prompt, or, in a
    text without one, by a closing mark before any opening one.
    """
    marked_roles = roles.copy()
    marks = reasoning_marks(tokenizer)
    answer = np.flatnonzero(roles == Role.ANSWER)
    if marks is None or not answer.size:
        return marked_roles
    text = tokens[answer[0] : answer[-1] + 1].tolist()
    starts_open = closes_first(marks, text) or marks.follow(tokens[: answer[0]].tolist()).is_open
    thinking_mask = marks.span_mask(text, is_open=starts_open)
    marked_roles[answer[0] : answer[-1] + 1][thinking_mask] = Role.THINKING
    return marked_roles


def closes_first(marks: ReasoningMarks, token_ids: Iterable[int]) -> bool:
    """Whether a text has a closing marker before any opening one."""
    opening, closing = SpanFollower(marks, is_open=False), SpanFollower(marks, is_open=True)
    for token_id in token_ids:
        if opening.see(token_id):
            return False
        closing.see(token_id)
        if not closing.is_open:
            return True
    return False


def shared_prefix(one: TokenIds, other: TokenIds) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
