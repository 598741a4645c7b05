"""A stream's chunks, folded to one reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from io import StringIO
from typing import Any

from paceline_gateway.http.answers import LongLists
from paceline_gateway.openai.chunks import answer_too_large
from paceline_gateway.openai.types import Chunk

ID_BYTES = 40
"""Bytes of a token's id in a list."""


async def fold(
    chunks: AsyncGenerator[Chunk, None], choice: Callable[[int], FoldedChoice], kind: str, max_bytes: int
) -> Chunk:
    """Fold chunks to one reply.

    Args:
        chunks: a stream whose last chunk has the reply's figures.
        choice: builds an empty choice.
        kind: the reply's `object`.
        max_bytes: the limit of all choices together.

    Raises:
        HttpError: the choices have more.
    """
    reply: Chunk = {}
    choices: dict[int, FoldedChoice] = {}
    size = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            for part in chunk["choices"]:
                index = part["index"]
                if index not in choices:
                    choices[index] = choice(index)
                size += choices[index].add(part)
                if size > max_bytes:
                    raise answer_too_large(f"more than max_answer_bytes = {max_bytes}")
            # The last chunk's fields count: earlier ones are about their own rounds.
            reply |= {key: value for key, value in chunk.items() if key != "choices"}
    return reply | {"object": kind, "choices": [choices[index].choice_fields for index in sorted(choices)]}


class FoldedChoice:
    """One choice, which grows chunk by chunk."""

    def __init__(self, index: int) -> None:
        self._choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        self._text = StringIO()

    def add(self, part: dict[str, Any]) -> int:
        """Take in a chunk's part of the choice; return its size in bytes."""
        size = 0
        for key, value in part.items():
            if key == "logprobs" and value is not None:
                lists = self._choice[key] = self._choice[key] or LongLists()
                earlier_size = lists.size
                lists.extend(value)
                size += lists.size - earlier_size
            elif key == "token_ids":
                self._choice.setdefault(key, []).extend(value)
                size += ID_BYTES * len(value)
            elif key == "finish_reason":
                self._choice[key] = value or self._choice[key]
            elif key in ("prompt_token_ids", "stop_reason"):
                self._choice[key] = value
        return size

    @property
    def choice_fields(self) -> dict[str, Any]:
        """The whole choice."""
        return self._choice


class FoldedCompletion(FoldedChoice):
    """A choice of `/v1/completions`."""

    def add(self, part: dict[str, Any]) -> int:  # noqa: D102
        return super().add(part) + self._text.write(part["text"])

    @property
    def choice_fields(self) -> dict[str, Any]:  # noqa: D102
        return super().choice_fields | {"text": self._text.getvalue()}


class FoldedChat(FoldedChoice):
    """A choice of `/v1/chat/completions`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._reasoning = StringIO()
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, part: dict[str, Any]) -> int:  # noqa: D102
        delta = part["delta"]
        size = super().add(part) + self._text.write(delta.get("content") or "")
        size += self._reasoning.write(delta.get("reasoning_content") or "")
        for piece in delta.get("tool_calls") or ():
            self._call(piece)
            size += sum(map(len, piece["function"].values()))
        return size

    @property
    def choice_fields(self) -> dict[str, Any]:  # noqa: D102
        calls = [self._calls[index] for index in sorted(self._calls)]
        text, reasoning = self._text.getvalue(), self._reasoning.getvalue()
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        if reasoning:
            message["reasoning_content"] = reasoning
        return super().choice_fields | {"message": message}

    def _call(self, piece: dict[str, Any]) -> None:
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(piece["index"], empty)
        call["id"] += piece.get("id", "")
        for key, value in piece["function"].items():
            call["function"][key] += value
