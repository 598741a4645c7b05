"""How many of a reply's tokens are reasoning: those between the markers.

They are counted by ids: text may be held back behind them. A marker that is no token of its own is looked for in the
text of the latest tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from paceline.models.tokenizer import Tokenizer
from paceline_gateway.reply_format import ReasoningTags, ReplyFormat


class ReasoningTokens:
    """Counts while tokens come; the state is what takes the next one.

    Args:
        tokenizer: of the model.
        form: what its replies consist of.
        in_reasoning: whether the template opened the span.
    """

    def __init__(self, tokenizer: Tokenizer, form: ReplyFormat, *, in_reasoning: bool) -> None:
        self.count = 0
        self._tokenizer = tokenizer
        tags = form.reasoning or ReasoningTags("", "")
        self._opening, self._closing = tags.opening, tags.closing
        self._ids = form.tokens
        # A token has at least a byte of the marker, and the first may have text in front of it.
        self._tail = deque[int](maxlen=len(self._closing.encode()) + 1)
        self._state: Callable[[int], None] | None = None
        if form.reasoning is not None:
            self._state = self._inside if in_reasoning else self._before

    def see(self, token_ids: Sequence[int]) -> None:
        """Take newly committed tokens."""
        for token_id in token_ids:
            if self._state is None:
                return
            self._state(token_id)

    def _before(self, token_id: int) -> None:
        """Reasoning comes first in a reply, or not at all."""
        self._tail.append(token_id)
        text = self._tokenizer.decode(tuple(self._tail)).lstrip()
        if token_id == self._ids.get(self._opening) or text.startswith(self._opening):
            self._tail.clear()
            self._state = self._inside
        elif text and not self._opening.startswith(text):
            self._state = None

    def _inside(self, token_id: int) -> None:
        self.count += 1
        self._tail.append(token_id)
        length = self._closing_length()
        if length:
            self.count -= length
            self._state = None

    def _closing_length(self) -> int:
        """Tokens at the end that make the closing marker; 0: it isn't there yet."""
        tail = tuple(self._tail)
        if (marker := self._ids.get(self._closing)) is not None:
            return int(tail[-1] == marker)
        ends = (n for n in range(1, len(tail) + 1) if self._closing in self._tokenizer.decode(tail[-n:]))
        return min(next(ends, 0), self.count) if self._closing in self._tokenizer.decode(tail) else 0
