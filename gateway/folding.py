"""A stream's chunks put together to one reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from gateway.replies import Chunk


async def whole(chunks: AsyncGenerator[Chunk, None], choice: Callable[[int], FoldedChoice], kind: str) -> Chunk:
    """The reply that chunks make.

    Args:
        chunks: of a stream that says at its end what it took.
        choice: makes what a choice is put together in.
        kind: the reply's `object`.
    """
    reply: Chunk = {}
    choices: dict[int, FoldedChoice] = {}
    async with aclosing(chunks) as stream:
        async for chunk in stream:
            for part in chunk["choices"]:
                index = part["index"]
                if index not in choices:
                    choices[index] = choice(index)
                choices[index].add(part)
            # Of one key the last chunk's value counts: what earlier ones tell of rounds is their own affair.
            reply |= {key: value for key, value in chunk.items() if key != "choices"}
    folded = [choices[index].folded for index in sorted(choices)]
    return reply | {"object": kind, "choices": folded}


class FoldedChoice:
    """One choice, growing."""

    def __init__(self, index: int) -> None:
        self._choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        self._texts: list[str] = []

    def add(self, part: dict[str, Any]) -> None:
        """Take a chunk's part of the choice in."""
        for key, value in part.items():
            if key == "logprobs":
                self._choice[key] = _joined(self._choice[key], value)
            elif key == "token_ids":
                self._choice.setdefault(key, []).extend(value)
            elif key == "finish_reason":
                self._choice[key] = value or self._choice[key]
            elif key == "prompt_token_ids":
                self._choice[key] = value

    @property
    def folded(self) -> dict[str, Any]:
        """The whole choice."""
        return self._choice


class FoldedCompletion(FoldedChoice):
    """A choice of `/v1/completions`."""

    def add(self, part: dict[str, Any]) -> None:  # noqa: D102
        super().add(part)
        self._texts.append(part["text"])

    @property
    def folded(self) -> dict[str, Any]:  # noqa: D102
        return super().folded | {"text": "".join(self._texts)}


class FoldedChat(FoldedChoice):
    """A choice of `/v1/chat/completions`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, part: dict[str, Any]) -> None:  # noqa: D102
        super().add(part)
        delta = part["delta"]
        self._texts.append(delta.get("content") or "")
        self._reasoning.append(delta.get("reasoning_content") or "")
        for piece in delta.get("tool_calls") or ():
            self._call(piece)

    @property
    def folded(self) -> dict[str, Any]:  # noqa: D102
        calls = [self._calls[index] for index in sorted(self._calls)]
        text, reasoning = "".join(self._texts), "".join(self._reasoning)
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


def _joined(before: dict[str, Any] | None, more: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two pieces of log-probabilities, lists behind each other; the first one's grow."""
    if before is None or more is None:
        return before or more
    for key, value in before.items():
        if isinstance(value, list):
            value.extend(more[key])
    return before
