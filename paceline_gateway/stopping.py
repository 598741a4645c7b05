"""What ended a reply, as vLLM tells it: the stop string that was found, or the stop token's id."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.generation import MAX_STOP_CHARACTERS

_TAIL_TOKENS = MAX_STOP_CHARACTERS + 8
"""The longest stop string, a token for each character, and what its first token may have in front of it."""


class StopWatch:
    """Sees a reply's tokens. A stop string is complete with the last one, whose text isn't sent."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        self._token_ids = frozenset(token_ids)
        self._tail: deque[int] = deque(maxlen=_TAIL_TOKENS)

    def see(self, token_ids: Sequence[int]) -> None:
        """Take newly committed tokens."""
        self._tail.extend(token_ids)

    @property
    def found(self) -> str | int | None:
        """What a reply that stopped ended with; None: the model's own end."""
        if not self._tail:
            return None
        last = self._tail[-1]
        if last in self._token_ids:
            return last
        return None if last in self._tokenizer.eos_token_ids else self._string()

    def _string(self) -> str | None:
        """The first of the strings in the text, one that reaches into the last token."""
        ids = list(self._tail)
        before, text = len(self._tokenizer.decode(ids[:-1])), self._tokenizer.decode(ids)
        found = ((text.find(string, max(0, before - len(string) + 1)), string) for string in self._strings)
        return min(((at, string) for at, string in found if at >= 0), default=(0, None))[1]
