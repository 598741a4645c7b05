"""A stream's chunks put together to one reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from io import StringIO
from typing import Any

from paceline_gateway.http.answers import LongLists
from paceline_gateway.openai.chunks import too_large_an_answer
from paceline_gateway.openai.types import Chunk

ID_BYTES = 40
"""Of a token's id in a list."""


async def whole(
    chunks: AsyncGenerator[Chunk, None], choice: Callable[[int], FoldedChoice], kind: str, most_bytes: int
) -> Chunk:
    """The reply that chunks make.

    Args:
        chunks: of a stream that says at its end what it took.
        choice: makes what a choice is put together in.
        kind: the reply's `object`.
        most_bytes: that its choices may have.

    Raises:
        HttpError: they have more.
    """
    reply: Chunk = {}
    choices: dict[int, FoldedChoice] = {}
    size = 0
    async with aclosing(chunks) as stream:
        async for chunk in stream:
            for part in chunk["choices"]:
                index = part["index"]
                if index not in choices:
                    choices[index] = choice(index)
                size += choices[index].add(part)
                if size > most_bytes:
                    raise too_large_an_answer(f"more than max_answer_bytes = {most_bytes}")
            # Of one key the last chunk's value counts: what earlier ones tell of rounds is their own affair.
            reply |= {key: value for key, value in chunk.items() if key != "choices"}
    folded = [choices[index].folded for index in sorted(choices)]
    return reply | {"object": kind, "choices": folded}


class FoldedChoice:
    """One choice, growing."""

    def __init__(self, index: int) -> None:
        self._choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        self._text = StringIO()

    def add(self, part: dict[str, Any]) -> int:
        """Take a chunk's part of the choice in; returns how many bytes it takes."""
        size = 0
        for key, value in part.items():
            if key == "logprobs" and value is not None:
                lists = self._choice[key] = self._choice[key] or LongLists()
                before = lists.size
                lists.extend(value)
                size += lists.size - before
            elif key == "token_ids":
                self._choice.setdefault(key, []).extend(value)
                size += ID_BYTES * len(value)
            elif key == "finish_reason":
                self._choice[key] = value or self._choice[key]
            elif key in ("prompt_token_ids", "stop_reason"):
                self._choice[key] = value
        return size

    @property
    def folded(self) -> dict[str, Any]:
        """The whole choice."""
        return self._choice


class FoldedCompletion(FoldedChoice):
    """A choice of `/v1/completions`."""

    def add(self, part: dict[str, Any]) -> int:  # noqa: D102
        return super().add(part) + self._text.write(part["text"])

    @property
    def folded(self) -> dict[str, Any]:  # noqa: D102
        return super().folded | {"text": self._text.getvalue()}


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
    def folded(self) -> dict[str, Any]:  # noqa: D102
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
        return super().folded | {"message": message}

    def _call(self, piece: dict[str, Any]) -> None:
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(piece["index"], empty)
        call["id"] += piece.get("id", "")
        for key, value in piece["function"].items():
            call["function"][key] += value
