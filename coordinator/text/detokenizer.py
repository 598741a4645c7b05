"""Token ids to text, piece by piece: never half a character, never past a stop string.

The emitted text is a function of the token ids alone, so a resumed stream that
replays its ids goes on at the same character.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.models.tokenizer import REPLACEMENT, Tokenizer

CONTEXT_TOKENS = 6
"""Prompt tokens decoded ahead of the output, so that its first space survives."""


class Detokenizer:
    """Decodes one token at a time; a stop string sets `stopped`."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._prefix_offset = 0
        self._read_offset = len(self._ids)
        self._tail = ""
        self.stopped = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Add one token and return the text that no later token can change.

        With `may_stop` false, no stop string is looked for in the token's text, nor across its end.
        """
        self._ids.append(token_id)
        new = self._new_characters(whole=True)
        return self._release(new) if may_stop else new

    def flush(self) -> str:
        """The text that is still held back, at the end of the generation."""
        if self.stopped:
            return ""
        text = self._tail + self._new_characters(whole=False)
        self._tail = ""
        return text

    def _new_characters(self, *, whole: bool) -> str:
        old_text = self._tokenizer.decode(self._ids[self._prefix_offset : self._read_offset])
        text = self._tokenizer.decode(self._ids[self._prefix_offset :])
        if whole and (text.endswith(REPLACEMENT) or len(text) <= len(old_text)):
            return ""
        self._prefix_offset, self._read_offset = self._read_offset, len(self._ids)
        return text[len(old_text) :]

    def _release(self, new: str) -> str:
        text = self._tail + new
        stops_at = [index for index in (text.find(stop) for stop in self._stop) if index >= 0]
        if stops_at:
            self.stopped = True
            self._tail = ""
            return text[: min(stops_at)]
        keep = self._possible_stop_suffix(text)
        self._tail = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_stop_suffix(self, text: str) -> int:
        """Length of the longest suffix that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
