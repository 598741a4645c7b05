"""Token ids to text, piece by piece: never half a character, never past a stop string.

What has been emitted is a function of the token ids alone, so a resumed stream
that replays the ids it has goes on at the same character.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.models.tokenizer import REPLACEMENT, Tokenizer

CONTEXT_TOKENS = 6
"""Prompt tokens decoded ahead of the output, so that its first space survives."""


class Detokenizer:
    """Grows by one token at a time; `stopped` is set by a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._context_start = 0
        self._read = len(self._ids)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Add one token; returns the text that has become certain.

        In text that may not stop no stop string is looked for, nor in what joins it to the text behind it.
        """
        self._ids.append(token_id)
        new = self._new_characters(whole=True)
        return self._release(new) if may_stop else new

    def flush(self) -> str:
        """The text held back so far; for the end of the generation."""
        if self.stopped:
            return ""
        text = self._held + self._new_characters(whole=False)
        self._held = ""
        return text

    def _new_characters(self, *, whole: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._context_start : self._read])
        text = self._tokenizer.decode(self._ids[self._context_start :])
        if whole and (text.endswith(REPLACEMENT) or len(text) <= len(before)):
            return ""
        self._context_start, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [index for index in (text.find(stop) for stop in self._stop) if index >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = self._possible_stop_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_stop_suffix(self, text: str) -> int:
        """Length of the longest suffix that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
